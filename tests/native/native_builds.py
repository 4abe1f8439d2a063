"""The native core built in a folder of its own, for a processor or in a way that is not ours."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGESTS = ROOT / "native" / "tests" / "kernel_digests.txt"


def call(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the work tree; its errors come in its output."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def build_native(name: str, *options: str, target: str = "all") -> Path:
    """Build without Python; the folder stays, so that the next run compiles only what changed."""
    folder = ROOT / "build" / name
    configured = call(
        "cmake", "-S", ROOT, "-B", folder, "-DHEADRACE_PYTHON=OFF", "-DHEADRACE_NATIVE_TESTS=ON",
        *options,
    )  # fmt: skip
    assert configured.returncode == 0, configured.stdout
    built = call("cmake", "--build", folder, "--parallel", "2", "--target", target)
    assert built.returncode == 0, built.stdout
    return folder


def sets_that_agree(output: str) -> list[str]:
    """The instruction sets of which `kernel_digest` found no case to differ."""
    return re.findall(r"^(?:\d+: )?([\w-]+): [1-9]\d* cases, 0 differ$", output, re.MULTILINE)
