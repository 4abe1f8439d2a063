"""A conversion killed by SIGKILL at ten random moments, then resumed, gives the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_helpers import Shape, write_checkpoint

from headrace.convert import Recipe, convert

# Prints a line before each of its steps and dawdles, so that a kill can be aimed between any two.
SCRIPT = """
import sys, time
from pathlib import Path
from headrace.convert import Recipe, convert

def progress(p):
    print(p.done_bytes, flush=True)
    time.sleep(0.004)

convert(Path(sys.argv[1]), Path(sys.argv[2]), Recipe("q4", "q8", 32), progress)
print("done", flush=True)
time.sleep(60)
"""
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def run_and_kill(source: Path, dest: Path, lines: int, delay: float) -> str:
    """Start a conversion, kill it `delay` seconds after its n-th line; return its last line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SCRIPT, str(source), str(dest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        line = ""
        for _ in range(lines):
            line = process.stdout.readline().strip()
            if line in ("done", ""):
                break
        time.sleep(delay)
        process.kill()
        process.wait()
        assert process.returncode == -signal.SIGKILL
    return line


def test_ten_kills_each_then_resumed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", Shape(layers=3))
    recipe = Recipe("q4", "q8", 32)
    convert(tmp_path / "hf", tmp_path / "whole", recipe)
    whole = contents(tmp_path / "whole")
    draw = random.Random(7)
    num_partial, num_kept = 0, 0
    for i in range(10):
        dest = tmp_path / f"out{i}"
        run_and_kill(tmp_path / "hf", dest, draw.randint(0, 44), draw.random() * 0.006)
        num_partial += dest.with_name(dest.name + ".partial").exists()
        num_kept += convert(tmp_path / "hf", dest, recipe).kept_files
        assert contents(dest) == whole
    assert num_partial >= 5, "most kills must hit a conversion that is under way"
    assert num_kept > 0, "some must find finished files"


LIMITED = """
import resource, sys
from pathlib import Path
from headrace.convert import Recipe, convert
from headrace.errors import EngineError

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Recipe("q4", "q8", 32))
except EngineError as error:
    print(error)
    raise SystemExit(1)
"""


@pytest.mark.parametrize("limit", [100, 60_000, 100_000])
def test_the_system_refuses_to_write_on(limit: int, tmp_path: Path) -> None:
    """The kernel's own refusal (a file size limit acts like a full drive), then a resume."""
    pytest.importorskip("resource")
    write_checkpoint(tmp_path / "hf", Shape(vocab=20, experts=16))
    convert(tmp_path / "hf", tmp_path / "whole", Recipe("q4", "q8", 32))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", LIMITED, tmp_path / "hf", tmp_path / "out", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1, done.stderr
    assert "no space left for" in done.stdout
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q8", 32))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_ten_kills_of_one_conversion(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", Shape(layers=3))
    recipe = Recipe("q4", "q8", 32)
    convert(tmp_path / "hf", tmp_path / "whole", recipe)
    draw = random.Random(8)
    for i in range(10):
        line = run_and_kill(tmp_path / "hf", tmp_path / "out", 3 + 4 * i, draw.random() * 0.006)
        assert line != "done" or i > 6
    convert(tmp_path / "hf", tmp_path / "out", recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
