"""Containers made from the fixtures: floats change no bit, and quantised ones keep the contract."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import (
    generate_greedily,
    list_cases,
    make_case,
    open_model,
    open_store,
    read_expected,
    run,
)

from headrace import _core
from headrace.convert import Recipe, convert


@pytest.mark.parametrize("format", ["bf16", "f32"])
@pytest.mark.parametrize(("name", "case"), list_cases(), ids="-".join)
def test_a_floating_container_gives_the_bits_of_its_source(
    name: str, case: str, format: str, tmp_path: Path
) -> None:
    source = make_case(name, case, tmp_path / "source")
    convert(source, tmp_path / "container", Recipe(experts=format, dense=format))
    expected = read_expected(name, case)
    ids, greedy = expected["ids"].tolist(), expected["greedy"].tolist()
    found = []
    for folder in (source, tmp_path / "container"):
        model, checkpoint = open_model(folder)
        with open_store(checkpoint) as store:
            found.append(run(model, store, ids, [40]))
            assert generate_greedily(model, store, ids, len(greedy)) == greedy
    assert checkpoint.kind == "container"
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


RECIPES = [
    Recipe("q4", "q8", 32),
    Recipe("q4", "q4", 64),
    Recipe("q8", "q8"),
    Recipe("mxfp4", "q8"),
    Recipe("q4", "bf16"),
]


@pytest.fixture(scope="module", params=RECIPES, ids=lambda r: f"{r.experts}-{r.dense}-{r.group}")
def container(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("quantised")
    source = make_case("qwen3_moe", "default", root / "source")
    convert(source, root / "container", request.param)
    yield root / "container"


def test_a_quantised_container_keeps_the_numeric_contract(container: Path) -> None:
    """The same bits for any chunking, any number of slots, any instruction set."""
    expected = read_expected("qwen3_moe", "default")
    ids = expected["ids"].tolist()
    model, checkpoint = open_model(container)
    with open_store(checkpoint) as store:
        whole = run(model, store, ids, [40], "f16")
        found = {"chunks": run(model, store, ids, [17, 1, 22], "f16")}
        found["decode"] = run(model, store, ids, [1] * 40, "f16")
        try:
            for isa in _core.available_isas():
                _core.set_isa(isa)
                found[isa] = run(model, store, ids, [33, 7], "f16")
        finally:
            _core.set_isa("auto")
    with open_store(checkpoint, num_slots=2) as store:
        assert store is not None
        found["two slots"] = run(model, store, ids, [33, 7], "f16")
        assert store.stats().evictions > 0
    for how, logits in found.items():
        np.testing.assert_array_equal(logits.view(np.uint32), whole.view(np.uint32), how)


def test_a_quantised_container_still_resembles_its_source(container: Path) -> None:
    """A sanity bound, far above the error of 4 bits and far below that of a swapped matrix."""
    expected = read_expected("qwen3_moe", "default")
    model, checkpoint = open_model(container)
    with open_store(checkpoint) as store:
        logits = run(model, store, expected["ids"].tolist(), [40])
    error = np.std(logits - expected["logits"]) / np.std(expected["logits"])
    assert 1e-4 < error < 0.5
