"""A pull killed by SIGKILL as it changes something on the drive is complete when called again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_helpers import Shape, write_checkpoint
from hub_server import serve

REPO = "owner/tiny"
# Runs a command in forks: to its end, counting its changes; and, per share of that count, killed
# before that change and then run again, both in a folder of their own.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import headrace.cli.pull, headrace.cli.report, headrace.llm, headrace.pull, huggingface_hub.hf_api
from headrace.cli.app import _run

headrace.pull.MARGIN_BYTES = 0
folder, words, shares = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def call(models, kill_at=None):
    report, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["HEADRACE_MODELS"] = str(models / "models")
        count = 0

        def step(event, arguments):
            nonlocal count
            if event not in CHANGES or (event == "open" and not is_change(*arguments)):
                return
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        sys.addaudithook(step)
        status = _run(words)
        os.write(write, b"%d" % count)
        os._exit(status)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, os.read(report, 20)


def is_change(path, mode, flags):
    return str(path).startswith(str(folder)) and flags & (os.O_WRONLY | os.O_RDWR)


status, count = call(folder / "whole")
print(json.dumps([status]), flush=True)
for number, share in enumerate(shares):
    killed, again = (call(folder / str(number), at)[0] for at in (int(share * int(count)), None))
    print(json.dumps([killed, again]), flush=True)
"""
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def contents(path: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(path)): None if p.is_dir() else p.read_bytes() for p in path.rglob("*")
    }


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        # Headers; the client's folder, which was taken for another's; its lock; files; the end.
        ([], [0.05, 0.12, 0.16, 0.2, 0.5, 0.9, 0.97]),
        (["--convert", "small"], [0.2, 0.5, 0.9]),
    ],
)
def test_killed_then_called_again(options: list[str], shares: list[float], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", Shape(layers=2, vocab=60), shards=2)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("whole", *range(len(shares))):
        (work / str(name)).mkdir()
    words = ["pull", REPO, "--memory", "4GiB", *options]
    command = [sys.executable, "-c", SCRIPT, str(work), json.dumps(words), json.dumps(shares)]
    with serve({REPO: tmp_path / "source"}) as server:
        done = subprocess.run(
            command, capture_output=True, check=False, text=True,
            env={**os.environ, "HF_ENDPOINT": server.endpoint},
        )  # fmt: skip
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert ends == [[0], *[[-signal.SIGKILL, 0]] * len(shares)], done.stderr
    whole = contents(work / "whole")
    assert f"models/{REPO}/config.json" in whole and not any(".cache" in name for name in whole)
    for number in range(len(shares)):
        assert contents(work / str(number)) == whole
