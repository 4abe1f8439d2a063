"""A stand-in for a model: scores depend on every token of the prefix, read through the page table.

A wrong page, position, chunk border or row order changes its output, as it would a real model's.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import ExpertReadError
from headrace.experts import StepCounters


class FakeKV:
    """Pages of one number per token; unwritten places are poison."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.values = np.full((num_pages, page_tokens), -1, np.int64)
        self.page_tokens = page_tokens


class FakeStore:
    """Counts as an expert store does: each distinct id of a step is a request, and a miss."""

    record_bytes = 4096

    def __init__(self) -> None:
        self.requests = 0
        self.paced: list[tuple[int, int]] = []

    def note_step(self, parts: Any) -> None:
        self.parts = parts

    def note_pace(self, tokens: int, seconds: float, used: StepCounters) -> None:
        self.paced.append((tokens, used.misses))

    def counters(self) -> StepCounters:
        return StepCounters(
            requests=self.requests,
            hits=0,
            misses=self.requests,
            bytes_read=self.requests * self.record_bytes,
            prefetch_bytes=0,
            stall_ns=0,
            drive_busy_ns=0,
        )


@dataclass
class FakeModel:
    """Scores from a hash of the prefix; token `poison` cannot be computed."""

    vocab: int = 32
    poison: int | None = None
    kind: type[Exception] = ExpertReadError
    calls: list[int] = field(default_factory=list)  # rows of each call

    def __call__(self, ids: list[int], rows: Any, kv: Any, experts: Any, logits_rows: Any) -> Any:
        self.calls.append(len(ids))
        if self.poison is not None and self.poison in ids:
            raise self.kind("record is short: layer 1, expert 2")
        if experts is not None:
            experts.requests += len(set(ids.tolist()))
        for token, position, sequence in zip(ids, rows.positions, rows.sequences, strict=True):
            page = rows.page_table[sequence, position // kv.page_tokens]
            kv.values[page, position % kv.page_tokens] = token
        return (
            np.stack([self._row(rows, kv, t) for t in logits_rows])
            if len(logits_rows)
            else np.zeros((0, self.vocab), np.float32)
        )

    def _row(self, rows: Any, kv: Any, t: Any) -> Any:
        state = 0
        for position in range(rows.positions[t] + 1):
            page = rows.page_table[rows.sequences[t], position // kv.page_tokens]
            token = kv.values[page, position % kv.page_tokens]
            assert token >= 0, f"row reads position {position} before it is written"
            state = (state * 1000003 + int(token) + 1) % (1 << 61)
        return np.random.default_rng(state).normal(size=self.vocab).astype(np.float32)
