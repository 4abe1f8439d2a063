"""The search over settings with a made-up machine, and what is kept of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import tuned
from headrace.config import EngineConfig, ExpertConfig
from headrace.errors import ConfigError, EngineError
from headrace.tune import Measured, Row, candidates, search
from headrace.tuned import Tuned, apply_tuned, save_tuned

GIB = 1 << 30
IDS = (1, 2, 3)


def measured(seconds: float, **values: Any) -> Measured:
    known: dict[str, Any] = {
        "ids": IDS, "prefill_s": 0.25 * seconds, "decode_s": 0.75 * seconds, "num_slots": 100,
        "num_records": 400, "hit_rate": 0.5, "readers": 4, "block_bytes": 1 << 20, "threads": 2,
        "chunk": 256, "policy": "next-use",
    }  # fmt: skip
    return Measured(**(known | values))


class FakeMachine:
    """Runs take 10 s, times a factor per setting; keeps the order of the runs."""

    def __init__(self, factors: Mapping[tuple[str, int | str], float]) -> None:
        self.factors, self.runs, self.now = factors, [dict[str, int | str]()], 0.0
        self.runs.clear()

    def __call__(self, settings: Mapping[str, int | str]) -> Measured:
        self.runs.append(dict(settings))
        seconds = 10.0
        for item in settings.items():
            seconds *= self.factors.get(item, 1.0)
        self.now += seconds
        return measured(seconds)

    def search(self, seconds: float = 1e9, **options: Any) -> Any:
        config = EngineConfig(**options)
        return search(self, config, seconds=seconds, clock=lambda: self.now)


def rows_of(found: Any) -> dict[tuple[str, int | str], Row]:
    return {(row.name, row.value): row for row in found.rows}


def test_what_is_faster_twice_is_taken_and_the_next_builds_on_it() -> None:
    machine = FakeMachine({("readers", 8): 0.8, ("policy", "lru"): 0.9, ("threads", 1): 1.5})
    found = machine.search()
    assert found.settings == {"readers": 8, "policy": "lru"}
    assert found.is_complete
    assert found.after.seconds == pytest.approx(10 * 0.8 * 0.9)
    rows = rows_of(found)
    assert rows["readers", 8].verdict == "taken"
    assert rows["readers", 8].gain == pytest.approx(0.25)
    assert rows["threads", 1].verdict == "slower"
    # old, new | new, old: the order is reversed for the confirmation.
    at = machine.runs.index({"readers": 8})
    assert machine.runs[at - 1 : at + 3] == [{}, {"readers": 8}, {"readers": 8}, {}]


def test_a_gain_below_three_per_cent_is_noise() -> None:
    found = FakeMachine({("readers", 8): 0.975}).search()
    assert found.settings == {}
    assert rows_of(found)["readers", 8].verdict == "no gain"


def test_a_gain_of_milliseconds_is_noise() -> None:
    found = search(
        lambda settings: measured(0.03 if settings else 0.05), EngineConfig(), seconds=1e9
    )
    assert found.settings == {} and {row.verdict for row in found.rows} == {"no gain"}


def test_a_gain_that_does_not_hold_in_reverse_order_is_not_taken() -> None:
    """A machine that gets faster by itself: the old setting does, too."""

    class Warming(FakeMachine):
        def __call__(self, settings: Mapping[str, int | str]) -> Measured:
            super().__call__(settings)
            return measured(10.0 if len(self.runs) <= 2 else 9.0)

    found = Warming({}).search()
    assert found.settings == {}
    assert found.rows[0].verdict == "not confirmed: +0.0 % in reverse order"


def test_other_ids_are_an_error_that_names_the_setting() -> None:
    def broken(settings: Mapping[str, int | str]) -> Measured:
        return measured(10.0, ids=(1, 9, 3) if "policy" in settings else IDS)

    with pytest.raises(
        EngineError, match=r"policy frequency\ntoken 1: expected \(2,\), got \(9,\)"
    ):
        search(broken, EngineConfig(), seconds=1e9, clock=lambda: 0.0)


def test_a_refused_setting_is_a_row_and_not_the_end() -> None:
    def refusing(settings: Mapping[str, int | str]) -> Measured:
        if "slots" in settings:
            raise ConfigError("option `slots` is below\nmore")
        return measured(10.0)

    found = search(refusing, EngineConfig(), seconds=1e9, clock=lambda: 0.0)
    rows = rows_of(found)
    assert rows["slots", 75].verdict == "refused: option `slots` is below"
    assert rows["slots", 75].seconds is None and found.is_complete


def test_time_ends_the_search_between_two_candidates() -> None:
    machine = FakeMachine({})
    found = machine.search(seconds=45)
    assert not found.is_complete and len(found.rows) == 3


def test_options_given_and_settings_without_effect_are_left_alone() -> None:
    names = candidates(measured(1), EngineConfig(threads=1, experts=ExpertConfig(readers=2)))
    assert "readers" not in names and "threads" not in names and "policy" in names
    resident = candidates(measured(1, num_slots=400), EngineConfig())
    assert set(resident) <= {"threads", "chunk"}
    assert all(v <= 512 for v in candidates(measured(1, chunk=512), EngineConfig())["chunk"])


# What is kept

CHECKPOINT: Any = SimpleNamespace(fingerprint="of this test", records=None)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(ceiling: int = GIB, **settings: int | str) -> Path:
        entry = Tuned(ceiling, settings, 2.0, 1.0, 0.0)
        path = tmp_path / "tuned" / "model.json"
        save_tuned(path, CHECKPOINT.fingerprint, tuned.machine_identity(CHECKPOINT), entry)
        return path

    return save


def test_kept_settings_are_used_and_an_option_wins(save: Callable[..., Path]) -> None:
    path = save(readers=7, chunk=64, threads=2)
    config, used = apply_tuned(EngineConfig(memory=GIB), CHECKPOINT, path=path)
    assert (config.experts.readers, config.chunk, config.threads) == (7, 64, 2)
    assert used == {"readers": 7, "chunk": 64, "threads": 2}
    given = EngineConfig(memory=GIB, threads=1, experts=ExpertConfig(readers=3))
    config, used = apply_tuned(given, CHECKPOINT, path=path)
    assert (config.experts.readers, config.chunk, config.threads) == (3, 64, 1)
    assert used == {"chunk": 64}
    off = EngineConfig(memory=GIB, tuned=False)
    assert apply_tuned(off, CHECKPOINT, path=path) == (off, {})


def test_another_memory_drops_what_depends_on_it(
    save: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = save(readers=7, chunk=64, slots=50)
    _, used = apply_tuned(EngineConfig(memory=GIB * 21 // 20), CHECKPOINT, path=path)
    assert used == {"readers": 7, "chunk": 64, "slots": 50}
    _, used = apply_tuned(EngineConfig(memory=2 * GIB), CHECKPOINT, path=path)
    assert used == {"readers": 7}
    assert "chunk, slots not used: found with 1 GiB of memory, now it is 2 GiB" in caplog.text
    assert len(caplog.records) == 1


def test_another_machine_drops_all_and_keeps_its_own(
    save: Callable[..., Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = save(readers=7)
    config = EngineConfig(memory=GIB)
    assert apply_tuned(config, CHECKPOINT, path=path, root=tmp_path) == (config, {})
    assert "of another machine" in caplog.text
    other = tuned.machine_identity(CHECKPOINT, tmp_path)
    save_tuned(path, CHECKPOINT.fingerprint, other, Tuned(GIB, {"readers": 2}, 1, 1, 0))
    assert apply_tuned(config, CHECKPOINT, path=path)[1] == {"readers": 7}
    assert apply_tuned(config, CHECKPOINT, path=path, root=tmp_path)[1] == {"readers": 2}


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c | {"version": 99},
        lambda c: c | {"fingerprint": "other"},
        lambda c: c | {"machines": []},
        lambda c: c | {"machines": {"m": {"settings": {}}}},
        lambda c: [],
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(
    save: Callable[..., Path], damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(readers=7)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    config = EngineConfig(memory=GIB)
    with caplog.at_level(logging.WARNING):
        assert apply_tuned(config, CHECKPOINT, path=path) == (config, {})
    assert len(caplog.records) == 1 and str(path) in caplog.text


def test_a_value_out_of_range_is_one_line(
    save: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(memory=GIB)
    assert apply_tuned(config, CHECKPOINT, path=save(readers=9999)) == (config, {})
    assert len(caplog.records) == 1 and "`readers` is out of range" in caplog.text
