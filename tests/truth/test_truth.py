"""Promise 3: placement never changes a token, nor any bit of a logit, whatever the cache does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace import _core, ops
from headrace.config import POLICIES, EngineConfig
from headrace.convert import Recipe, convert
from headrace.errors import ExpertReadError
from headrace.experts import History
from headrace.inspect import open_model
from headrace.tune import Measured, candidates
from headrace.tuned import ENGINE_FIELDS, EXPERT_FIELDS, with_settings
from truth.identity import (
    EXPERTS,
    LAYERS,
    NUM_RECORDS,
    Run,
    Setting,
    run,
    with_experts,
    write_checkpoint,
)

FLOOR = 2
RECIPES = {
    "q4": Recipe("q4", "q8", 32),
    "q4-g64": Recipe("q4", "q4", 64),
    "q8": Recipe("q8", "bf16", 32),
    "mxfp4": Recipe("mxfp4", "q8", 32),
    "bf16": Recipe("bf16", "bf16", 32),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in place (float32) and converted by every recipe."""
    folder = tmp_path_factory.mktemp("truth")
    source = write_checkpoint(folder / "hf")
    paths = {"in-place": source}
    for name, recipe in RECIPES.items():
        convert(source, folder / name, recipe)
        paths[name] = folder / name
    return paths


@pytest.fixture(scope="module")
def truths(models: dict[str, Path]) -> dict[str, Run]:
    """All resident, one reader, one thread at a time: what every other setting must equal."""
    return {
        name: run(path, Setting(experts=with_experts(readers=1))) for name, path in models.items()
    }


@pytest.fixture(autouse=True)
def _no_fault_left() -> Iterator[None]:
    _core.clear_faults()
    yield
    _core.clear_faults()


def assert_same(got: Run, truth: Run) -> None:
    assert got.errors == [None, None]
    assert got.ids == truth.ids
    assert got.logits == truth.logits


def test_the_truth_depends_on_every_expert_used(truths: dict[str, Run]) -> None:
    """The recipes differ, so their logits must: the comparison sees small changes of weights."""
    logits = [truth.logits[0] for truth in truths.values()]
    assert len(set(logits)) == len(logits)


@pytest.mark.parametrize("num_slots", range(FLOOR, NUM_RECORDS + 1))
def test_every_cache_size(models: dict[str, Path], truths: dict[str, Run], num_slots: int) -> None:
    got = run(models["q4"], Setting(num_slots=num_slots))
    assert_same(got, truths["q4"])
    if num_slots == FLOOR:
        assert got.stats.evictions > 0 and got.stats.reread_bytes > 0  # type: ignore[attr-defined]
    if num_slots == NUM_RECORDS:
        assert got.stats.evictions == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["in-place", *RECIPES])
@pytest.mark.parametrize("num_slots", [FLOOR, 5, NUM_RECORDS - 1])
def test_every_format(
    models: dict[str, Path], truths: dict[str, Run], name: str, num_slots: int
) -> None:
    assert_same(run(models[name], Setting(num_slots=num_slots)), truths[name])


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("num_slots", [FLOOR, 7])
def test_chunks_and_batches(
    models: dict[str, Path], truths: dict[str, Run], chunk: int, together: bool, num_slots: int
) -> None:
    got = run(models["q4"], Setting(num_slots=num_slots, chunk=chunk, together=together))
    assert_same(got, truths["q4"])


@pytest.mark.parametrize(
    "options",
    [
        {"readers": 1},
        {"readers": 8, "block_bytes": 4096},
        {"direct": False},
        {"read_ahead": 1},
        {"read_ahead": 64, "readers": 2},
        {"half_life_tokens": 1},
        *({"policy": policy} for policy in POLICIES),
        {"verify": False},
    ],
    ids=str,
)
def test_readers_and_policy(
    models: dict[str, Path], truths: dict[str, Run], options: dict[str, object]
) -> None:
    setting = Setting(num_slots=5, experts=with_experts(**options))
    for name in ("q4", "in-place"):
        assert_same(run(models[name], setting), truths[name])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_slots", [FLOOR, 3, 9])
def test_every_policy_with_batches_advice_and_resizing(
    models: dict[str, Path], truths: dict[str, Run], policy: str, num_slots: int
) -> None:
    setting = Setting(
        num_slots=num_slots, chunk=5, experts=with_experts(policy=policy), prefetch=True
    )
    together = replace(setting, together=True, resize=(num_slots, FLOOR))
    for each in (setting, together):
        assert_same(run(models["q4"], each), truths["q4"])


@pytest.mark.parametrize("num_slots", [FLOOR, 3, 9, NUM_RECORDS])
def test_prefetch_of_any_advice(
    models: dict[str, Path], truths: dict[str, Run], num_slots: int
) -> None:
    got = run(models["q4"], Setting(num_slots=num_slots, prefetch=True))
    assert_same(got, truths["q4"])
    if num_slots == NUM_RECORDS:
        assert got.stats.prefetch_bytes > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("lookahead", ["auto", "off"])
@pytest.mark.parametrize("num_slots", [FLOOR, 8, 16, NUM_RECORDS - 1])
@pytest.mark.parametrize("chunk", [1, 64])
def test_lookahead(
    models: dict[str, Path], truths: dict[str, Run], lookahead: str, num_slots: int, chunk: int
) -> None:
    setting = Setting(num_slots=num_slots, chunk=chunk, experts=with_experts(lookahead=lookahead))
    for name in ("q4", "in-place"):
        got = run(models[name], setting)
        assert_same(got, truths[name])
        has_read = lookahead == "auto" and num_slots >= 8
        assert (got.stats.lookahead_used > 0) == has_read  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_slots", [8, 16])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_lookahead_that_is_lied_to(
    models: dict[str, Path], truths: dict[str, Run], num_slots: int, together: bool, policy: str
) -> None:
    setting = Setting(
        num_slots=num_slots,
        together=together,
        experts=with_experts(policy=policy),
        lie=True,
        prefetch=True,
        resize=(num_slots, 8, 5, FLOOR),
    )
    assert_same(run(models["q4"], setting), truths["q4"])


def test_slots_shrink_and_grow_while_running(
    models: dict[str, Path], truths: dict[str, Run]
) -> None:
    setting = Setting(num_slots=12, prefetch=True, resize=(12, 4, FLOOR, 9))
    assert_same(run(models["q4"], setting), truths["q4"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("together", [False, True])
def test_slots_are_given_back_and_taken_again_under_pressure(
    models: dict[str, Path], truths: dict[str, Run], tmp_path: Path, policy: str, together: bool
) -> None:
    setting = Setting(
        num_slots=20, chunk=5, together=together, prefetch=True, pressure=tmp_path,
        experts=with_experts(policy=policy),
    )  # fmt: skip
    for name in ("q4", "in-place"):
        got = run(models[name], setting)
        assert_same(got, truths[name])
        assert got.moves.give_backs > 1
        assert got.moves.slots_given_back > 4 and got.moves.slots_taken_again > 1


def test_what_tune_may_choose(models: dict[str, Path], truths: dict[str, Run]) -> None:
    """Every candidate of the search, and all of one kind together."""
    base = Measured(
        ids=(), prefill_s=1, decode_s=1, num_slots=12, num_records=NUM_RECORDS, hit_rate=0.5,
        readers=2, block_bytes=8192, threads=2, chunk=6, policy="next-use",
    )  # fmt: skip
    tried = candidates(base, EngineConfig())
    assert set(tried) >= {*ENGINE_FIELDS, *EXPERT_FIELDS}
    choices = [{name: value} for name, values in tried.items() for value in values]
    choices.append({name: values[-1] for name, values in tried.items() if values})
    before = ops.num_threads()
    try:
        for choice in choices:
            config = with_settings(EngineConfig(experts=with_experts()), choice)
            ops.set_threads(before if config.threads == "auto" else config.threads)
            setting = Setting(
                num_slots=12 if config.slots == "auto" else config.slots,
                chunk=6 if config.chunk == "auto" else config.chunk,
                experts=config.experts,
            )
            assert_same(run(models["q4"], setting), truths["q4"])
    finally:
        ops.set_threads(before)


def test_history_of_any_kind(
    models: dict[str, Path], truths: dict[str, Run], tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    for turn in range(3):
        counts = rng.integers(0, 1000, (LAYERS, EXPERTS)).astype(np.int64)
        history = _history(tmp_path / f"history-{turn}", counts)
        assert_same(run(models["q4"], Setting(num_slots=6, warm=history)), truths["q4"])


def _history(path: Path, counts: np.ndarray) -> History:
    history = History(
        path,
        fingerprint="of this test",
        layers=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        mode="write",
    )
    history.add(counts, 1000)
    return history


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(models: dict[str, Path], truths: dict[str, Run], threads: int) -> None:
    before = ops.num_threads()
    ops.set_threads(threads)
    try:
        assert_same(run(models["q4"], Setting(num_slots=5)), truths["q4"])
    finally:
        ops.set_threads(before)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("name", ["in-place", *RECIPES])
def test_instruction_sets(
    models: dict[str, Path], truths: dict[str, Run], isa: str, name: str
) -> None:
    before = ops.isa()
    ops.set_isa(isa)
    try:
        assert_same(run(models[name], Setting(num_slots=5)), truths[name])
    finally:
        ops.set_isa(before)


@pytest.mark.parametrize("kind", ["short", "delay"])
def test_slow_and_short_reads_change_nothing(
    models: dict[str, Path], truths: dict[str, Run], kind: str
) -> None:
    _core.inject_fault(kind, after=2, count=10, path_contains="experts-")
    assert_same(run(models["q4"], Setting(num_slots=5)), truths["q4"])
    assert _core.num_faults_fired() > 0


@pytest.mark.parametrize("kind", ["eio", "flip", "end"])
@pytest.mark.parametrize("together", [False, True])
def test_a_bad_record_ends_only_the_requests_that_need_it(
    models: dict[str, Path], truths: dict[str, Run], kind: str, together: bool
) -> None:
    """Every record in turn cannot be read. Who needs it fails with its name; the rest is right."""
    truth = truths["q4"]
    _, checkpoint = open_model(models["q4"])
    records = checkpoint.records
    assert records is not None
    outcomes = set()
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        _core.clear_faults()
        offset = int(records.offset[layer, expert, 0])
        file = records.files[int(records.file[layer, expert, 0])]
        _core.inject_fault(kind, count=-1, path_contains=file.name, offset=offset)
        got = run(models["q4"], Setting(num_slots=5, together=together))
        for index, error in enumerate(got.errors):
            if error is None:
                assert got.ids[index] == truth.ids[index]
                assert got.logits[1 + index] == truth.logits[1 + index]
            else:
                assert isinstance(error, ExpertReadError)
                for part in (f"layer {layer}", f"expert {expert}", file.name):
                    assert part in str(error), str(error)
        outcomes.add(tuple(error is None for error in got.errors))
    assert outcomes & {(True, False), (False, True)}, "no record was needed by one request alone"


def test_one_failed_read_is_tried_again(models: dict[str, Path], truths: dict[str, Run]) -> None:
    _core.inject_fault("eio", after=20, count=1, path_contains="experts-")
    assert_same(run(models["q4"], Setting(num_slots=5)), truths["q4"])
    assert _core.num_faults_fired() == 1


@pytest.mark.parametrize("after", [0, 12, 24, 28, 44])
def test_a_planted_stale_slot_is_noticed(
    models: dict[str, Path], truths: dict[str, Run], after: int
) -> None:
    """The truth test must be able to fail: one slot is handed out with what it held before."""
    _core.inject_fault("stale_slot", after=after, count=1)
    got = run(models["q4"], Setting(num_slots=5))
    assert _core.num_faults_fired() == 1
    with pytest.raises(AssertionError):
        assert_same(got, truths["q4"])
