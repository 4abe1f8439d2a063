"""Every x86 instruction set on a processor that lacks some: AVX-512, AMX and AVX-VNNI by AVX2.

The kernels are those of the set, each instruction computed by others that give the same bits
(`native/tests/emulated`). So a change of a kernel is held to the contract on any machine; what the
compiler makes of the real instructions is seen only where they are.
"""

import shutil

import pytest
from native_builds import DIGESTS, build_native, call, sets_that_agree

from headrace import _core

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "avx2" not in _core.available_isas()
        or None in (shutil.which("cmake"), shutil.which("g++")),
        reason="AVX-512 is not emulated: needs an x86 processor with AVX2, cmake and g++",
    ),
]


def test_emulated_sets_give_the_bits_of_all_others() -> None:
    build = build_native(
        "emulated", "-DHEADRACE_EMULATED=ON", "-DCMAKE_CXX_COMPILER=g++",
        "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", target="kernel_digest",
    )  # fmt: skip
    run = call(build / "kernel_digest", DIGESTS)
    assert run.returncode == 0, run.stdout
    assert sets_that_agree(run.stdout) == ["scalar", "avx2", "avx-vnni", "avx512", "amx"]
