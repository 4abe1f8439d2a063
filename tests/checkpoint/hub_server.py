"""A server on this machine that speaks the hub's protocol for the calls used, and cuts answers."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/?]+)(/revision/(?P<revision>[^?]+))?(\?.*)?")


@dataclass
class HubServer:
    """What is served, and what was asked."""

    repositories: dict[str, Path]
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Repository -> status and X-Error-Code."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """File -> after how many bytes each of the next answers breaks off."""
    served: dict[str, int] = field(default_factory=dict)
    """File -> bytes of content sent."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, file, Range."""
    ignores_ranges: bool = False
    endpoint: str = ""


@contextmanager
def serve(repositories: dict[str, Path]) -> Iterator[HubServer]:
    """Serve folders as repositories for a while."""
    state = HubServer(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer's content would wait 40 ms behind its headers

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._file(False)

        def do_GET(self) -> None:
            match = _INFO.fullmatch(self.path)
            if match is None:
                self._file(True)
            elif self._is_there(match["repo"]):
                self._info(match["repo"], match["revision"])

        def _is_there(self, repo: str) -> bool:
            if repo in state.errors or repo not in state.repositories:
                self._refuse(*state.errors.get(repo, (404, "RepoNotFound")))
                return False
            return True

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _info(self, repo: str, revision: str | None) -> None:
            if revision not in (None, "main", COMMIT):
                self._refuse(404, "RevisionNotFound")
                return
            folder = state.repositories[repo]
            siblings = [
                {"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size}
                for p in sorted(folder.rglob("*"))
                if p.is_file()
            ]
            content = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False}
            data = json.dumps({**content, "tags": [], "downloads": 0, "siblings": siblings})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data.encode())

        def _file(self, with_content: bool) -> None:
            match = _RESOLVE.fullmatch(self.path)
            if match is None:
                self._refuse(404, "EntryNotFound")
                return
            if not self._is_there(match["repo"]):
                return
            name = match["file"]
            path = state.repositories[match["repo"]] / name
            if not path.is_file():
                self._refuse(404, "EntryNotFound")
                return
            wanted = self.headers.get("Range", "")
            state.requests.append((self.command, name, wanted))
            content = path.read_bytes()
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            start, end = 0, len(content)
            if span and not state.ignores_ranges:
                start = int(span[1])
                end = min(end, int(span[2]) + 1 if span[2] else end)
            part = content[start:end]
            self.send_response(206 if span and not state.ignores_ranges else 200)
            if span and not state.ignores_ranges:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name.replace("/", "-")}-{len(content)}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if not with_content:
                return
            if state.cuts.get(name):
                part = part[: state.cuts[name].pop(0)]
                self.close_connection = True
            state.served[name] = state.served.get(name, 0) + len(part)
            self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
