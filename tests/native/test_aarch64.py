"""The native core on 64-bit ARM: built by a cross compiler, run by qemu's user emulation.

Its own tests compare NEON with the scalar kernels; `kernel_digest` compares both with numbers that
the x86 sets are held to as well (`native/tests/kernel_digests.txt`). qemu computes as the processor
does, so this is a test of bits; it says nothing about speed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGESTS = ROOT / "native" / "tests" / "kernel_digests.txt"
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
SETS = {  # what each processor must find itself able to run
    "max": ["scalar", "neon", "neon-i8mm"],
    "neoverse-n1": ["scalar", "neon"],
    "cortex-a72": ["scalar"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        None in (COMPILER, EMULATOR, shutil.which("cmake")),
        reason="ARM is not tested: needs cmake, aarch64-linux-gnu-g++ and qemu-aarch64 "
        "(Debian: apt-get install cmake g++-aarch64-linux-gnu qemu-user)",
    ),
]


def call(*command: str | Path, cpu: str = "max") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "QEMU_CPU": cpu},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def sets_that_agree(output: str) -> list[str]:
    return re.findall(r"^(?:\d+: )?([\w-]+): [1-9]\d* cases, 0 differ$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def build() -> Path:
    """The build folder, kept in the work tree so that the next run compiles only what changed."""
    folder = ROOT / "build" / "aarch64"
    configured = call(
        "cmake", "-S", ROOT, "-B", folder,
        "-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake",
        "-DHEADRACE_PYTHON=OFF", "-DHEADRACE_NATIVE_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release",
    )  # fmt: skip
    assert configured.returncode == 0, configured.stdout
    built = call("cmake", "--build", folder, "--parallel", "2")
    assert built.returncode == 0, built.stdout
    return folder


@pytest.mark.parametrize("cpu", SETS)
def test_the_native_tests_pass_and_bits_equal_those_of_x86(build: Path, cpu: str) -> None:
    run = call("ctest", "--test-dir", build, "--verbose", "--timeout", "300", cpu=cpu)
    assert run.returncode == 0, run.stdout
    assert sets_that_agree(run.stdout) == SETS[cpu], run.stdout


def test_a_digest_that_differs_is_noticed(build: Path, tmp_path: Path) -> None:
    lines = DIGESTS.read_text().splitlines()
    lines[0] = "0" * 16 + lines[0][16:]
    changed = tmp_path / "digests.txt"
    changed.write_text("\n".join([*lines[:-1], "0" * 16 + " no such case", ""]))
    run = call(EMULATOR, build / "kernel_digest", changed)
    assert run.returncode == 1
    assert re.findall(r"cases, (\d+) differ", run.stdout) == ["3", "3", "3"]
    assert f"neon: `{lines[0][17:]}` is " in run.stdout
