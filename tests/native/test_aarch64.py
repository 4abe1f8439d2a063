"""The native core on 64-bit ARM: built by a cross compiler, run by qemu's user emulation.

Its own tests compare NEON with the scalar kernels; `kernel_digest` compares both with numbers that
the x86 sets are held to as well (`native/tests/kernel_digests.txt`). qemu computes as the processor
does, so this is a test of bits; it says nothing about speed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from native_builds import DIGESTS, build_native, call, sets_that_agree

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


@pytest.fixture(scope="module")
def build() -> Path:
    """The build folder, kept in the work tree so that the next run compiles only what changed."""
    return build_native(
        "aarch64", "-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake",
        "-DCMAKE_BUILD_TYPE=Release",
    )  # fmt: skip


@pytest.mark.parametrize("cpu", SETS)
def test_the_native_tests_pass_and_bits_equal_those_of_x86(build: Path, cpu: str) -> None:
    run = call("ctest", "--test-dir", build, "--verbose", "--timeout", "300", QEMU_CPU=cpu)
    assert run.returncode == 0, run.stdout
    assert sets_that_agree(run.stdout) == SETS[cpu], run.stdout


def test_a_digest_that_differs_is_noticed(build: Path, tmp_path: Path) -> None:
    lines = DIGESTS.read_text().splitlines()
    lines[0] = "0" * 16 + lines[0][16:]
    changed = tmp_path / "digests.txt"
    changed.write_text("\n".join([*lines[:-1], "0" * 16 + " no such case", ""]))
    run = call(EMULATOR, build / "kernel_digest", changed, QEMU_CPU="max")
    assert run.returncode == 1
    assert re.findall(r"cases, (\d+) differ", run.stdout) == ["3", "3", "3"]
    assert f"neon: `{lines[0][17:]}` is " in run.stdout
