"""Huge pages and locked memory, as the system itself reports them."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import _core
from headrace.config import ExpertConfig, SamplingParams
from headrace.llm import LLM
from headrace.metrics import huge_pages_bytes, locked_bytes, resident_bytes

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


def test_slots_given_back_are_no_longer_resident() -> None:
    """What the system counts falls by the slots given back; what is answered stays the same."""
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM("demo", memory="2GiB", experts=OFF) as llm:
        assert llm.store is not None and llm.plan.is_resident
        while llm.store.num_untouched_slots:  # they are warmed in the background
            time.sleep(0.01)
        before = llm.generate("Once upon a time", params)
        held = resident_bytes()
        given = llm.plan.num_slots - llm.store.resize(12)
        fell = (held or 0) - (resident_bytes() or 0)
        size = llm.plan.record_bytes
        assert 0.9 * given * size <= fell <= 1.1 * given * size, "page tables and such are small"
        after = llm.generate("Once upon a time", params)
        assert after.ids == before.ids
        assert after.receipt.num_slots == 12
        assert llm.store.resize(llm.plan.num_slots) == llm.plan.num_slots
        assert llm.generate("Once upon a time", params).ids == before.ids


# In a process of its own: what other tests freed would hide what one model leaves.
CYCLES = """
import sys
from headrace.config import ExpertConfig, SamplingParams
from headrace.llm import LLM
from headrace.metrics import resident_bytes
for _ in range(7):
    with LLM(sys.argv[1], memory="8GiB", experts=ExpertConfig(history="off")) as llm:
        planned_bytes = llm.plan.interpreter_bytes
        llm.generate("ok", SamplingParams(max_tokens=4))
    print(resident_bytes(), planned_bytes)
    del llm
"""


def test_models_that_were_closed_leave_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    """Neither the process grows with each, nor does the next one's plan count what is free.

    With a large vocabulary, of which parsing leaves some 30 MiB of freed memory.
    """
    folder = tmp_path / "wordy"
    shutil.copytree(tiny, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"word {i}": i for i in range(len(vocabulary), 150_000)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = subprocess.run(
        [sys.executable, "-c", CYCLES, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    for first, last in zip(counts[1], counts[-1], strict=True):
        assert last - first < 8 * MIB, counts


def test_only_a_ceiling_that_was_not_named_moves(tiny: Path, monkeypatch: Any) -> None:
    """A machine that has nothing left: `auto` gives back what it can, `--memory` stays."""
    monkeypatch.setattr("headrace.pressure.available_memory_bytes", lambda root: 0)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(tiny, memory="1GiB", experts=OFF) as llm:
        named = llm.generate("ok", params)
        assert llm._watch is None
        assert named.receipt.num_slots == llm.plan.num_slots
        assert named.receipt.slots_given_back == 0
    with LLM(tiny, experts=OFF) as llm:
        assert llm._watch is not None
        llm._watch.look()
        given = llm.generate("ok", params)
    assert given.ids == named.ids
    assert given.receipt.give_backs == 1
    assert given.receipt.slots_given_back == llm.plan.num_slots - given.receipt.num_slots > 0
    assert "slots given back" in given.receipt.lines()[-1]
