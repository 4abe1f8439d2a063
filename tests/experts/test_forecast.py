"""What a plan expects of decoding, by a replay of the last tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import ExpertConfig
from headrace.experts import ExpertStore, History
from headrace.experts.forecast import LEAST_TOKENS, Forecast, make_forecast
from headrace.experts.store import StepCounters

from .conftest import Records, read_all

OPTIONS = ExpertConfig(policy="lru")
USED = StepCounters(
    requests=6, hits=5, misses=1, lookahead_used=1, bytes_read=0, prefetch_bytes=0,
    stall_ns=3_000_000, drive_busy_ns=4_000_000,
)  # fmt: skip


def record(records: Records, path: Path, num_tokens: int, cycle: int) -> History:
    """Decode tokens of which each layer asks for two experts, in turn over `cycle` of them."""
    table = records.table

    def history() -> History:
        return History(
            path, fingerprint="x", layers=table.layers, num_experts=table.num_experts, mode="write"
        )

    for _ in range(2):  # a block each
        with ExpertStore(
            table, num_slots=8, readers=OPTIONS, history=history(), fingerprint="x"
        ) as store:
            for token in range(num_tokens):
                store.note_step([(1, 1, False)])
                for layer in table.layers:
                    read_all(store, layer, [[(2 * token) % cycle, (2 * token + 1) % cycle]])
                store.note_pace(1, 0.010, USED)
    return history()


def forecast(records: Records, history: History, num_slots: int) -> Forecast | None:
    return make_forecast(history, records.table, OPTIONS, "x", num_slots)


def test_too_few_tokens_say_nothing(records: Records, tmp_path: Path) -> None:
    history = record(records, tmp_path / "history.json", LEAST_TOKENS - 1, 2)
    assert forecast(records, history, 8) is None


def test_warm_slots_are_counted(records: Records, tmp_path: Path) -> None:
    """Three layers ask for the same four experts: twelve slots hold them, six hold none in time."""
    history = record(records, tmp_path / "history.json", LEAST_TOKENS, 4)
    held, lost = forecast(records, history, 12), forecast(records, history, 6)
    assert held is not None and held.hit_rate == 1.0 and held.bytes_per_token == 0
    assert lost is not None and lost.hit_rate == 0.0 and lost.misses_per_token == 6
    assert lost.bytes_per_token == 6 * records.table.read_bytes
    assert lost.tokens == LEAST_TOKENS and lost.policy == "lru"


def test_the_pace_gives_the_speed(records: Records, tmp_path: Path) -> None:
    history = record(records, tmp_path / "history.json", LEAST_TOKENS, 4)
    held, lost = forecast(records, history, 12), forecast(records, history, 6)
    assert held is not None and lost is not None
    # Of 10 ms, 3 were stalls over two records, one of them read ahead: 7 ms of computing. The two
    # took 4 ms to read, so 1 of them was hidden; by chance 7 and 4 meet for 28 / 11.
    kept = 1 / (28 / 11)
    assert held.tokens_per_s(None) == pytest.approx(1 / 0.007)
    assert lost.tokens_per_s(None) == pytest.approx(1000 / (7 + 12 - kept * 7 * 12 / 19))
    slow = lost.tokens_per_s(records.table.read_bytes / 0.005)
    assert slow == pytest.approx(1000 / (7 + 30 - kept * 7 * 30 / 37))
