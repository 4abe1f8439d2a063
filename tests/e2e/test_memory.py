"""Huge pages and locked memory, as the system itself reports them."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace import _core
from headrace.config import ExpertConfig, SamplingParams
from headrace.llm import LLM
from headrace.metrics import huge_pages_bytes, locked_bytes

OFF = ExpertConfig(history="off")
MIB = 1 << 20


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not has_huge_pages(), reason="this system gives no huge pages")
def test_large_buffers_lie_in_huge_pages() -> None:
    before = huge_pages_bytes()
    memory = _core.aligned_empty(64 * MIB + 5 * 4096)
    assert memory.ctypes.data % (2 * MIB) == 0
    memory[::4096] = 1
    # All but the end, unless the system ran out of them: then small pages must do.
    assert 32 * MIB <= huge_pages_bytes() - before <= 66 * MIB


def test_the_receipt_says_what_is_locked_and_in_huge_pages(tiny: Path) -> None:
    with LLM(tiny, memory="8GiB", experts=OFF) as llm:
        free = llm.generate("ok", SamplingParams(max_tokens=1)).receipt
    assert free.locked_bytes == locked_bytes() == 0
    assert 0 <= free.huge_pages_bytes <= free.peak_memory_bytes
    if not may_lock():
        pytest.skip("NOT LOCKED: RLIMIT_MEMLOCK is too small here")
    with LLM(tiny, memory="8GiB", experts=OFF, lock_memory=True) as llm:
        held = llm.generate("ok", SamplingParams(max_tokens=1)).receipt
        assert held.locked_bytes >= llm.plan.slots_bytes + llm.plan.dense_bytes // 2
    del llm
    assert locked_bytes() == 0  # the mappings are gone


def may_lock() -> bool:
    try:
        _core.lock_memory(_core.aligned_empty(MIB))
    except MemoryError:
        return False
    return True


# A process with CAP_IPC_LOCK, as root's are, may lock whatever the limit says: it is given up.
REFUSED = """
import ctypes, resource, sys
from headrace.config import ExpertConfig
from headrace.errors import MemoryBudgetError
from headrace.llm import LLM
libc = ctypes.CDLL(None)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~(1 << 14)
assert libc.capset(header, sets) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
try:
    LLM(sys.argv[1], memory="8GiB", experts=ExpertConfig(history="off"), lock_memory=True)
except MemoryBudgetError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_refused_lock_names_the_limit_and_what_to_do(tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tiny)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "refused to lock" in done.stdout
    assert "RLIMIT_MEMLOCK allows this process 65536 bytes" in done.stdout
    assert "`ulimit -l unlimited`" in done.stdout
