"""The Hugging Face hub: what a repository holds, ranges of its files, and where pulled models lie.

Everything goes through the client library `huggingface_hub` (mirrors, tokens, redirects, and the
hub's own error codes); `tokenizers` depends on it already, so it costs no further package. What a
checkpoint is follows from its config and headers alone: `write_skeleton` fetches those and makes
files of the true lengths whose data are holes, which every reader of headers takes for the model.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import platformdirs

from headrace.checkpoint.base import CONFIG_NAME, GENERATION_CONFIG_NAME
from headrace.checkpoint.container import is_container
from headrace.checkpoint.gguf_split import stem_of
from headrace.checkpoint.huggingface import TOKENIZER_FILES, sample_offsets
from headrace.checkpoint.journal import PARTIAL_SUFFIX
from headrace.checkpoint.jsonfile import parse_object
from headrace.checkpoint.safetensors import INDEX_NAME, MAX_HEADER_BYTES, SINGLE_NAME
from headrace.checkpoint.writer import write_json
from headrace.errors import CheckpointError, ConfigError, EngineError, hide_credentials
from headrace.hub_gguf import SUFFIX as GGUF_SUFFIX
from headrace.hub_gguf import GgufFiles, gguf_models, matching, read_gguf_header
from headrace.metrics import format_bytes

PULLED_NAME = "headrace-pull.json"
"""Written into a pulled folder when its last file is there."""
MAX_SMALL_BYTES = 256 << 20
"""Most that a config, an index or a tokenizer file may have: it is held in memory."""
FIRST_BYTES = 1 << 16
"""Asked for at once, in the hope that it holds a shard's whole header."""
MAX_ATTEMPTS = 6
"""A range is given up after so many answers in a row that brought no byte."""
NUM_CONNECTIONS = 8
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_BEFORE_LABEL = "@"
"""Between the names of a repository, which never hold it, and of a GGUF model in it."""
PULLING_SUFFIX = ".pulling"
"""Of the folder that holds the headers of a source while it is converted on the way."""
_OFFLINE = ("1", "true", "yes", "on")


def models_folder() -> Path:
    """Return the folder of pulled models: $HEADRACE_MODELS, else the user's data folder."""
    chosen = os.environ.get("HEADRACE_MODELS")
    return Path(chosen) if chosen else Path(platformdirs.user_data_dir("headrace")) / "models"


def pulled_folder(model_id: str) -> Path:
    """Return where a model lies once pulled, whether it was or not.

    Args:
        model_id: OWNER/NAME, or OWNER/NAME:LABEL for one of the GGUF models of a repository.
    """
    owner, _, name = model_id.partition("/")
    return models_folder() / owner / name.replace(":", _BEFORE_LABEL)


def is_pulled(folder: Path) -> bool:
    """Whether a pull into a folder was finished."""
    return is_container(folder) or (folder / PULLED_NAME).is_file()


def find_pulled(model_id: str) -> Path | None:
    """Return the folder or GGUF file of a model that was pulled before, None if it never was.

    Raises:
        CheckpointError: its download was begun and is not complete, or the id fits several models.
    """
    repo_id, _, tag = model_id.partition(":")
    folder = pulled_folder(repo_id)
    if tag or not folder.is_dir():
        labels = _pulled_labels(folder)
        fitting = matching(tag, labels)
        if not fitting:
            return None
        if len(fitting) > 1:
            raise CheckpointError(
                f"{model_id} fits several models that were pulled: {folder.parent}\n"
                f"expected one of {', '.join(f'{repo_id}:{label}' for label in fitting)}"
            )
        folder = pulled_folder(f"{repo_id}:{fitting[0]}")
    if not is_pulled(folder):
        raise CheckpointError(
            f"download of {model_id} is incomplete: {folder}\n"
            f"hint: run `headrace pull {model_id}` again; it goes on where it was"
        )
    return folder / _read_note(folder).get("file", "")


def _pulled_labels(folder: Path) -> dict[str, str]:
    """The GGUF models of a repository that were pulled, or begun: label -> name of its file."""
    start = folder.name + _BEFORE_LABEL
    others = (PARTIAL_SUFFIX, PULLING_SUFFIX)  # of folders at work beside a model's
    found = [p for p in sorted(folder.parent.glob(f"{escape(start)}*")) if p.is_dir()]
    return {
        path.name.removeprefix(start): stem_of(_read_note(path).get("file", "").rpartition("/")[2])
        for path in found
        if not path.name.endswith(others)
    }


def _read_note(folder: Path) -> dict[str, str]:
    """What was pulled into a folder; empty if that is a container, or no finished pull.

    Raises:
        CheckpointError: the note is damaged.
    """
    note = folder / PULLED_NAME
    content = parse_object(note.read_bytes(), str(note)) if note.is_file() else {}
    for key, value in content.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"malformed note of a pull: {note}\nexpected a text for `{key}`, got {value!r}"
            )
    return content


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _OFFLINE


@dataclass(frozen=True)
class Repository:
    """The files of one commit of a model repository that its checkpoint consists of."""

    repo_id: str
    commit: str
    endpoint: str
    files: Mapping[str, int]
    """Name -> bytes; configs, tokenizer, template, and the safetensors files with their index."""
    shards: tuple[str, ...]
    """The safetensors or GGUF files among them."""
    label: str = ""
    """What tells a GGUF model from the others of the repository."""

    @property
    def model_id(self) -> str:
        """What names the model once it is pulled."""
        return f"{self.repo_id}:{self.label}" if self.label else self.repo_id

    def path_in(self, folder: Path) -> Path:
        """Return what is opened where a folder holds the files: it, or the first GGUF file."""
        return folder / self.shards[0] if self.label else folder

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def url(self, name: str) -> str:
        """Return the address of a file of this commit."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo_id, name, revision=self.commit, endpoint=self.endpoint)

    def read(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            CheckpointError: it is too large for one, or cannot be had.
        """
        size = self.files[name]
        if size > MAX_SMALL_BYTES:
            raise CheckpointError(
                f"file is too large: {name} of {self.repo_id}\n"
                f"expected at most {MAX_SMALL_BYTES} bytes, got {size}"
            )
        return self.read_range(name, 0, size)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Read bytes of a file; as `fetch`."""
        parts: list[bytes] = []
        self.fetch(name, offset, length, parts.append)
        return b"".join(parts)

    def fetch(self, name: str, offset: int, length: int, take: Callable[[bytes], Any]) -> None:
        """Hand a range of a file to `take` piece by piece, in order, going on after a cut.

        Raises:
            CheckpointError: the hub cannot be reached, refuses, or answers with other bytes.
        """
        done, attempt = 0, 0
        with translated(self.repo_id, self.endpoint):
            while done < length:
                before = done
                try:
                    for piece in self._answer(name, offset + done, length - done):
                        take(piece)
                        done += len(piece)
                except _connection_errors():
                    if done == before and attempt == MAX_ATTEMPTS:
                        raise
                attempt = 0 if done > before else attempt + 1
                if attempt > MAX_ATTEMPTS:
                    raise ConnectionError(f"{name} ends at byte {offset + done}")
                if done < length:
                    time.sleep(0.1 * 2**attempt)

    def _answer(self, name: str, offset: int, length: int) -> Iterator[bytes]:
        client: Any = importlib.import_module("huggingface_hub.utils")  # exports without types
        headers = client.build_hf_headers(
            headers={"Range": f"bytes={offset}-{offset + length - 1}"}
        )
        headers["Accept-Encoding"] = "identity"
        with client.get_session().stream("GET", self.url(name), headers=headers) as response:
            if response.status_code == 429 or response.status_code >= 500:
                raise ConnectionError(f"{name}: the server answers with {response.status_code}")
            if response.status_code // 100 != 2:
                response.read()
            client.hf_raise_for_status(response)
            is_whole = response.status_code == 200 and offset == 0 and length == self.files[name]
            if response.status_code != 206 and not is_whole:
                raise CheckpointError(
                    f"the server sends whole files only: {name} of {self.repo_id}\n"
                    f"expected status 206 for a range, got {response.status_code} from "
                    f"{hide_credentials(self.endpoint)}"
                )
            got = 0
            for piece in response.iter_bytes():
                got += len(piece)
                if got > length:
                    raise CheckpointError(
                        f"the server sent too much: {name} of {self.repo_id}\n"
                        f"expected {length} bytes from offset {offset}, got {got} or more"
                    )
                yield piece


def is_hub_id(text: str) -> bool:
    """Whether a word has the form OWNER/NAME or OWNER/NAME:LABEL, and names no missing file."""
    is_file = ":" not in text and text.endswith((".gguf", ".safetensors"))
    return not is_file and _HUB_ID.fullmatch(text) is not None


def open_repository(model_id: str, revision: str | None = None) -> Repository:
    """Ask the hub what a model repository holds.

    Args:
        model_id: OWNER/NAME, or OWNER/NAME:LABEL for one of several GGUF models.
        revision: branch, tag or commit; None for the main branch.

    Raises:
        CheckpointError: no such repository, revision or model in it, gated, no network, or neither
            safetensors nor GGUF files.
    """
    if not is_hub_id(model_id):
        raise CheckpointError(
            f"no repository id: {model_id}\nexpected OWNER/NAME, or OWNER/NAME:LABEL for GGUF files"
        )
    if is_offline():
        raise CheckpointError(
            f"{model_id} was not pulled, and HF_HUB_OFFLINE forbids the network\n"
            f"expected it at {pulled_folder(model_id)}"
        )
    repo_id, _, tag = model_id.partition(":")
    api = _open_client()
    with translated(repo_id, api.endpoint):
        info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=30)
    shown = hide_credentials(api.endpoint)
    listed = {s.rfilename: s.size for s in info.siblings or ()}
    sizes = {n: s for n, s in listed.items() if isinstance(s, int) and s >= 0 and _is_safe(n)}
    found = {n: s for n, s in sizes.items() if "/" not in n}
    if not info.sha:
        raise CheckpointError(f"the hub names no commit of {repo_id}: {shown}")
    models = gguf_models(sizes)
    if tag or (models and not found.keys() & {SINGLE_NAME, INDEX_NAME}):
        label = _choose_gguf(repo_id, tag, models, sizes)
        names = models[label].names
        files = {name: sizes[name] for name in names}
        return Repository(repo_id, info.sha, api.endpoint, files, names, label)
    small = (CONFIG_NAME, GENERATION_CONFIG_NAME, *TOKENIZER_FILES)
    files = {name: found[name] for name in small if name in found}
    if CONFIG_NAME not in files:
        raise CheckpointError(f"no {CONFIG_NAME} in the repository: {repo_id}, {shown}")
    shards = _shards(Repository(repo_id, info.sha, api.endpoint, found, ()), found)
    if INDEX_NAME in found and SINGLE_NAME not in shards:
        files[INDEX_NAME] = found[INDEX_NAME]
    files.update({name: found[name] for name in shards})
    return Repository(repo_id, info.sha, api.endpoint, files, shards)


def _is_safe(name: str) -> bool:
    """Whether a file of a repository lies inside it, as the hub promises."""
    return not name.startswith("/") and ".." not in name.split("/")


def _choose_gguf(
    repo_id: str, tag: str, models: Mapping[str, GgufFiles], sizes: Mapping[str, int]
) -> str:
    """Return the label of the one model that is meant."""
    if not models:
        raise CheckpointError(
            f"no GGUF model in the repository: {repo_id}\n"
            f"hint: leave out `:{tag}` if it is a checkpoint in safetensors"
        )
    fitting = matching(tag, {label: files.stem for label, files in models.items()})
    if len(fitting) == 1:
        return fitting[0]
    what = f"{len(fitting)} of {len(models)}" if fitting else f"none of {len(models)}"
    choice = ", ".join(
        f"{label} ({format_bytes(sum(sizes[name] for name in models[label].names))})"
        for label in fitting or models
    )
    title = f"`{tag}` fits {what} GGUF models" if tag else f"{what} GGUF models fit"
    raise CheckpointError(f"{title}: {repo_id}\nexpected {repo_id}:LABEL with one of {choice}")


def _open_client() -> Any:
    """Return the hub's client, with the address of $HF_ENDPOINT if that is set.

    Raises:
        ConfigError: an environment variable of the client is malformed; it may hold a password, so
            its value is not shown.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or None
    if endpoint is not None and not _is_address(endpoint):
        raise ConfigError(
            "HF_ENDPOINT is no address of a hub\n"
            "expected https://HOST, also with a port or a path; what it holds is not shown"
        )
    try:
        from huggingface_hub import HfApi
    except ValueError as error:  # it reads its variables when it is imported
        raise ConfigError(
            f"an environment variable of huggingface_hub is malformed: {error}\n"
            "hint: look at those that begin with HF_"
        ) from None
    return HfApi(endpoint=endpoint)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0  # asked for, the port is checked
    except ValueError:
        return False
    return has_host and parts.scheme in ("http", "https") and not (parts.query or parts.fragment)


def _shards(repository: Repository, found: Mapping[str, int]) -> tuple[str, ...]:
    if SINGLE_NAME in found:
        return (SINGLE_NAME,)
    if INDEX_NAME not in found:
        weights = [n for n in found if n.endswith((".bin", ".pth", ".safetensors"))]
        raise CheckpointError(
            f"no checkpoint in the repository: {repository.repo_id}\n"
            f"expected {SINGLE_NAME}, {INDEX_NAME} or GGUF files, got "
            f"{', '.join(weights[:4]) or 'no weights'}"
        )
    content = parse_object(repository.read(INDEX_NAME), f"{INDEX_NAME} of {repository.repo_id}")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"malformed index: {INDEX_NAME} of {repository.repo_id}\n"
            "expected a non-empty object `weight_map`"
        )
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} shards are missing in the repository: "
            f"{repository.repo_id}\nfirst missing: {missing[0]}"
        )
    return tuple(names)


def write_skeleton(repository: Repository, folder: Path, with_samples: bool) -> None:
    """Make a folder with a repository's small files, and shards with a header and no data.

    Args:
        repository: what to fetch from.
        folder: to be filled; made if it is not there.
        with_samples: also fetch what identifies the data, so that the folder has the fingerprint
            of the whole download.

    Raises:
        CheckpointError: as `Repository.fetch`, or a header that cannot be one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(NUM_CONNECTIONS, "hub") as pool:
        small = [n for n in repository.files if n not in repository.shards]
        for name, data in zip(small, pool.map(repository.read, small), strict=True):
            (folder / name).write_bytes(data)

        def make(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_shard(folder / name, repository.files[name], read_parts(name))

        def read_parts(name: str) -> dict[int, bytes]:
            parts = {0: _read_header(repository, name)}
            if with_samples:
                parts.update(_read_samples(repository, name, len(parts[0])))
            return parts

        for _ in pool.map(make, repository.shards):
            pass


def write_shard(path: Path, num_bytes: int, parts: Mapping[int, bytes]) -> None:
    """Write a file of a given length that holds only some parts, by offset, and else holes."""
    with path.open("wb") as file:
        file.truncate(num_bytes)
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)


def _read_header(repository: Repository, name: str) -> bytes:
    size = repository.files[name]
    if name.endswith(GGUF_SUFFIX):
        where = f"{name} of {repository.repo_id}"
        return read_gguf_header(
            where, size, lambda offset, length: repository.read_range(name, offset, length)
        )
    first = repository.read_range(name, 0, min(size, FIRST_BYTES))
    length = 8 + int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > min(size, 8 + MAX_HEADER_BYTES):
        raise CheckpointError(
            f"safetensors header does not fit its file: {name} of {repository.repo_id}\n"
            f"expected at most {size} bytes, got {length if len(first) >= 8 else 'no length'}"
        )
    if length <= len(first):
        return first[:length]
    return first + repository.read_range(name, len(first), length - len(first))


def _read_samples(repository: Repository, name: str, data_start: int) -> dict[int, bytes]:
    return {
        offset: repository.read_range(name, offset, length)
        for offset, length in sample_offsets(data_start, repository.files[name])
        if length
    }


@contextlib.contextmanager
def translated(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn what the client library raises into one clear message, without credentials."""
    from huggingface_hub import errors

    shown = hide_credentials(endpoint)
    try:
        yield
    except EngineError:
        raise
    except errors.GatedRepoError:
        raise CheckpointError(
            f"repository is gated: {repo_id}, {shown}\n"
            "hint: accept its terms on its page, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"no such repository, or a private one: {repo_id}, {shown}\n"
            "hint: check the spelling OWNER/NAME; for a private one set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"no such revision of {repo_id}, {shown}") from None
    except errors.EntryNotFoundError as error:
        text = hide_credentials(str(error))
        raise CheckpointError(f"no such file in {repo_id}, {shown}\n{text}") from None
    except errors.HFValidationError as error:
        text = hide_credentials(f"{repo_id}\n{error}")
        raise CheckpointError(f"no repository id: {text}") from None
    except Exception as error:
        if isinstance(error, (*_connection_errors(), errors.HfHubHTTPError)):
            hint = "check the network; what was downloaded is kept, and the same command goes on"
        elif isinstance(error, (_http().InvalidURL, ValueError, ImportError)):
            hint = "check HF_TOKEN and the proxy (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY)"
        else:
            raise
        text = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"cannot read {repo_id} from the hub: {shown}\n"
            f"{type(error).__name__}: {hide_credentials(text)}\nhint: {hint}"
        ) from None


def _connection_errors() -> tuple[type[Exception], ...]:
    """What a connection that fails or is cut raises; an answer with an error status is none."""
    return (_http().TransportError, ConnectionError)


def _http() -> Any:
    """The module that the hub's client speaks HTTP with: httpx, or its successor."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    return sys.modules[errors.HTTPError.__module__.partition(".")[0]]


def note_pulled(folder: Path, repository: Repository) -> None:
    """Write the note that a pull is complete."""
    write_json(folder / PULLED_NAME, _note(repository))


def require_same(folder: Path, repository: Repository) -> None:
    """Check that a finished pull in a folder is of this repository and commit.

    Raises:
        ConfigError: it is of another one, or not of a pull.
        CheckpointError: its note is damaged.
    """
    got = _read_note(folder)
    if got != _note(repository):
        raise ConfigError(
            f"folder holds another model or revision: {folder}\n"
            f"expected {repository.model_id} at {repository.commit}, "
            f"got {got.get('repository', 'a container')} at {got.get('commit', 'no commit')}\n"
            "hint: remove it, or choose another one with --to"
        )


def _note(repository: Repository) -> dict[str, str]:
    note = {"repository": repository.repo_id, "commit": repository.commit}
    return {**note, "file": repository.shards[0]} if repository.label else note
