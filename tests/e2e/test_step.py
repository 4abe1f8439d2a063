"""A decode step takes nothing that lasts: no import, no native buffer, no large Python object."""

import builtins
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import ops
from headrace.config import ExpertConfig, SamplingParams
from headrace.llm import LLM, Stream

OFF = ExpertConfig(history="off")
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    {"temperature": 0.0, "logprobs": 5, "stop": ("never written",)},
]
WARM_UP, STEPS = 8, 40
# A step's own objects (ids, rows, page table, events) take 9 KiB; a row of logits of the demo 16.
MOST_STEP_BYTES = 12 << 10


@pytest.fixture(params=SAMPLINGS, ids=lambda p: "-".join(p))
def stream(request: pytest.FixtureRequest) -> Any:
    params = SamplingParams(
        max_tokens=WARM_UP + STEPS + 8, ignore_eos=True, seed=1, **request.param
    )
    with LLM("demo", memory="2GiB", context=512, experts=OFF) as llm:
        stream = llm.stream("It was a", params)
        for _ in range(WARM_UP):
            stream.advance()
        yield stream
        stream.close()


def test_a_step_imports_nothing(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    real = builtins.__import__

    def watch(name: str, *args: Any, **options: Any) -> Any:
        imported.append(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", watch)
    import json  # noqa: F401 - proves that the watch sees

    assert imported.pop() == "json"
    for _ in range(STEPS):
        stream.advance()
    assert not imported


@pytest.fixture
def one_thread() -> Iterator[None]:
    """How many buffers several threads hold at a time is chance."""
    num_threads = ops.num_threads()
    ops.set_threads(1)
    yield
    ops.set_threads(num_threads)


def test_the_native_pools_do_not_grow(one_thread: None, stream: Stream) -> None:
    before = ops.pool_bytes()
    for _ in range(STEPS):
        stream.advance()
    assert ops.pool_bytes() == before


def test_a_step_allocates_little(stream: Stream) -> None:
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(STEPS):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            stream.advance()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    # Alternatives are picked from a copy of the row.
    limit = 2 * MOST_STEP_BYTES if stream.result().logprobs else MOST_STEP_BYTES
    # Lists double now and then, and a page of tokens is hashed every 64.
    assert sorted(peaks)[STEPS // 2] < limit
    assert max(peaks) < 8 * limit


def test_a_large_allocation_would_be_seen() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert len(bytearray(MOST_STEP_BYTES))
        assert tracemalloc.get_traced_memory()[1] - before >= MOST_STEP_BYTES
    finally:
        tracemalloc.stop()


def test_the_watch_would_see_a_growing_pool(tmp_path: Path) -> None:
    before = ops.pool_bytes()
    held = [ops.log_softmax(x) for x in _rows(before)]
    assert ops.pool_bytes() > before
    del held


def _rows(at_least: int) -> list[Any]:
    import numpy as np

    return [np.zeros((1, max(1 << 20, at_least // 4)), np.float32)] * 2
