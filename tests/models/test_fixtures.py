"""Each architecture against transformers, and against itself under every way of running it.

The expected values were made by scripts/make_fixtures.py, see there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tiny_models import (
    LOGIT_TOLERANCE,
    TYPICAL_TOLERANCE,
    generate_greedily,
    list_cases,
    make_case,
    make_small_pages,
    open_model,
    open_store,
    read_expected,
    run,
    run_in_pool,
)

from headrace import _core
from headrace.checkpoint import Checkpoint
from headrace.config import KV_DTYPES
from headrace.models.decoder import Decoder
from headrace.state import StepRows


class Case(NamedTuple):
    model: Decoder
    checkpoint: Checkpoint
    expected: dict[str, np.ndarray]

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.expected["ids"].tolist()
        return ids


@pytest.fixture(scope="module", params=list_cases(), ids=lambda case: "-".join(case))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    name, variant = request.param
    folder = make_case(name, variant, tmp_path_factory.mktemp(name) / variant)
    yield Case(*open_model(folder), read_expected(name, variant))


@pytest.mark.parametrize("dtype", sorted(LOGIT_TOLERANCE))
def test_logits_are_those_of_transformers(case: Case, dtype: str) -> None:
    with open_store(case.checkpoint) as store:
        logits = run(case.model, store, case.ids, [len(case.ids)], dtype)
    difference = np.abs(logits - case.expected["logits"]).max()
    assert difference <= LOGIT_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", sorted(TYPICAL_TOLERANCE))
def test_coarse_pages_are_near_transformers(case: Case, dtype: str) -> None:
    with open_store(case.checkpoint) as store:
        logits = run(case.model, store, case.ids, [len(case.ids)], dtype)
    differences = np.abs(logits - case.expected["logits"]).max(axis=1)
    assert LOGIT_TOLERANCE["f32"] < np.median(differences) <= TYPICAL_TOLERANCE[dtype]


def test_half_precision_pages_are_really_used(case: Case) -> None:
    with open_store(case.checkpoint) as store:
        exact = run(case.model, store, case.ids, [len(case.ids)], "f32")
        rounded = run(case.model, store, case.ids, [len(case.ids)], "f16")
    assert np.abs(exact - rounded).max() > LOGIT_TOLERANCE["f32"]


def test_greedy_tokens_are_those_of_transformers(case: Case) -> None:
    greedy = case.expected["greedy"].tolist()
    with open_store(case.checkpoint) as store:
        assert generate_greedily(case.model, store, case.ids, len(greedy)) == greedy


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("chunks", [[17, 23], [1] * 40, [32, 1, 7]], ids=["two", "decode", "mixed"])
def test_any_chunking_gives_the_same_bits(case: Case, chunks: list[int], dtype: str) -> None:
    with open_store(case.checkpoint) as store:
        whole = run(case.model, store, case.ids, [40], dtype)
        parts = run(case.model, store, case.ids, chunks, dtype)
    np.testing.assert_array_equal(parts.view(np.uint32), whole.view(np.uint32))


def test_streaming_through_two_slots_gives_the_same_bits(case: Case) -> None:
    if case.checkpoint.records is None:
        pytest.skip("a dense model has no experts to stream")
    with open_store(case.checkpoint) as store:
        resident = run(case.model, store, case.ids, [32] + [1] * 8)
    with open_store(case.checkpoint, num_slots=2) as store:
        assert store is not None
        streamed = run(case.model, store, case.ids, [32] + [1] * 8)
        stats = store.stats()
    assert stats.evictions > 0, "two slots held everything: nothing was streamed"
    np.testing.assert_array_equal(streamed.view(np.uint32), resident.view(np.uint32))


def test_every_instruction_set_gives_the_same_bits(case: Case) -> None:
    found = {}
    with open_store(case.checkpoint) as store:
        try:
            for isa in _core.available_isas():
                _core.set_isa(isa)
                found[isa] = run(case.model, store, case.ids, [30] + [1] * 10, "f16")
        finally:
            _core.set_isa("auto")
    assert "scalar" in found
    for isa, logits in found.items():
        np.testing.assert_array_equal(logits.view(np.uint32), found["scalar"].view(np.uint32), isa)


def test_a_sequence_does_not_feel_its_company(case: Case) -> None:
    """Two sequences in one step give the bits that each gives alone."""
    first, second = case.ids[:30], case.ids[10:]
    with open_store(case.checkpoint) as store:
        alone = [run(case.model, store, ids, [30]) for ids in (first, second)]
        kv = case.model.make_state(num_pages=3, dtype="f32")
        rows = StepRows(
            positions=np.tile(np.arange(30, dtype=np.int32), 2),
            sequences=np.repeat(np.arange(2, dtype=np.int32), 30),
            page_table=np.array([[2], [0]], np.int32),
        )
        ids = np.array(first + second, np.int32)
        together = case.model(ids, rows, kv, store, np.arange(60, dtype=np.int32))
    np.testing.assert_array_equal(together.view(np.uint32), np.concatenate(alone).view(np.uint32))


def test_several_pages_in_any_place(case: Case) -> None:
    """Small pages stay within tolerance, and where a page lies changes no bit."""
    with open_store(case.checkpoint) as store:
        found = []
        for pages in ([0, 1, 2], [4, 0, 3]):
            kv = make_small_pages(case.model, 5, 16, "f32")
            found.append(run_in_pool(case.model, store, case.ids, [20, 20], kv, pages))
    assert np.abs(found[0] - case.expected["logits"]).max() <= LOGIT_TOLERANCE["f32"]
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


def test_no_rows_asked_for_gives_no_logits(case: Case) -> None:
    with open_store(case.checkpoint) as store:
        kv = case.model.make_state(num_pages=1, dtype="f32")
        rows = StepRows.for_sequence(0, 4, [0])
        ids = np.array(case.ids[:4], np.int32)
        logits = case.model(ids, rows, kv, store, np.zeros(0, np.int32))
    assert logits.shape == (0, case.model.spec.vocab_size)


def test_rows_not_asked_for_cost_no_expert_of_the_last_layer(case: Case) -> None:
    """Scores of one row are those it has among all rows, and read fewer records."""
    requests, found = [], []
    for wanted in (np.arange(40, dtype=np.int32), np.array([39], np.int32)):
        with open_store(case.checkpoint) as store:
            kv = case.model.make_state(num_pages=1, dtype="f16")
            ids = np.array(case.ids, np.int32)
            rows = StepRows.for_sequence(0, 40, [0])
            found.append(case.model(ids, rows, kv, store, wanted)[-1])
            requests.append(0 if store is None else store.stats().requests)
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    if case.checkpoint.records is not None:
        assert requests[1] < requests[0]


def test_the_embedding_may_stay_on_the_drive(case: Case, tmp_path: Path) -> None:
    if case.model.spec.tie_word_embeddings:
        pytest.skip("a tied table is the head's matrix and always resident")
    model = type(case.model)(case.model.spec, case.checkpoint, embedding_resident=False)
    with open_store(case.checkpoint) as store:
        on_drive = run(model, store, case.ids, [40])
        resident = run(case.model, store, case.ids, [40])
    np.testing.assert_array_equal(on_drive.view(np.uint32), resident.view(np.uint32))
