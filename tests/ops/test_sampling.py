"""Sampling, log-probabilities and penalties."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import ops
from headrace.errors import NumericError, ShapeError
from headrace.ops import reference

from .conftest import assert_same_bits

Everywhere = Callable[[Callable[[], Any]], list[Any]]
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        PLAIN | {"temperature": 0.0},
        PLAIN | {"temperature": 0.3},
        PLAIN | {"top_k": 5},
        PLAIN | {"top_p": 0.7},
        PLAIN | {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        PLAIN | {"top_k": 1},
        PLAIN | {"top_p": 1e-6},
        PLAIN | {"top_k": 10_000_000_000},
    ],
)
def test_equals_reference(everywhere: Everywhere, rng: np.random.Generator, params: Any) -> None:
    logits = (rng.standard_normal(997) * 3).astype(np.float32)
    logits[::7] = np.round(logits[::7])  # ties
    logits[5] = -np.inf
    expected = [reference.sample(logits, **params, seed=9, position=p) for p in range(25)]
    for got in everywhere(
        lambda: [ops.sample(logits, **params, seed=9, position=p) for p in range(25)]
    ):
        assert got == expected


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 0.9999999])
def test_the_border_of_top_p_is_exact_however_many_tokens_lie_at_it(
    rng: np.random.Generator, spread: float, top_p: float
) -> None:
    logits = (rng.standard_normal(20_011) * spread).astype(np.float32)
    params = PLAIN | {"top_p": top_p, "min_p": 0.001}
    for position in range(4):
        got = ops.sample(logits, **params, seed=3, position=position)
        assert got == reference.sample(logits, **params, seed=3, position=position)


def test_greedy_takes_the_lower_of_equal_ids() -> None:
    logits = np.array([1, 3, 2, 3, 3], np.float32)
    assert ops.sample(logits, **PLAIN | {"temperature": 0.0}, seed=0, position=0) == 1


def test_top_k_and_top_p_cut_ties_by_id() -> None:
    logits = np.zeros(10, np.float32)
    for params, allowed in (({"top_k": 3}, {0, 1, 2}), ({"top_p": 0.35}, {0, 1, 2, 3})):
        drawn = {ops.sample(logits, **PLAIN | params, seed=1, position=p) for p in range(300)}
        assert drawn == allowed


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1])).astype(np.float32)
    drawn = [ops.sample(logits, **PLAIN, seed=123, position=p) for p in range(20_000)]
    counts = np.bincount(drawn, minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=0.012)


def test_seed_and_position_decide() -> None:
    logits = np.zeros(1000, np.float32)
    first = [ops.sample(logits, **PLAIN, seed=7, position=p) for p in range(50)]
    again = [ops.sample(logits, **PLAIN, seed=7, position=p) for p in reversed(range(50))][::-1]
    other = [ops.sample(logits, **PLAIN, seed=8, position=p) for p in range(50)]
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5
    assert ops.sample(logits, **PLAIN, seed=2**64 - 1, position=0) == reference.sample(
        logits, **PLAIN, seed=2**64 - 1, position=0
    )


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[3, 50]] = 0.0
    drawn = {ops.sample(logits, **PLAIN, seed=1, position=p) for p in range(100)}
    assert drawn == {3, 50}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_logits(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[4] = bad
    with pytest.raises(NumericError, match="token 4"):
        ops.sample(logits, **PLAIN, seed=0, position=0)
    with pytest.raises(NumericError, match="every logit"):
        ops.sample(np.full(3, -np.inf, np.float32), **PLAIN, seed=0, position=0)


@pytest.mark.parametrize(
    "params", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}]
)
def test_parameters_out_of_range(params: Any) -> None:
    with pytest.raises(ShapeError, match="out of range"):
        ops.sample(np.zeros(4, np.float32), **PLAIN | params, seed=0, position=0)


@pytest.mark.parametrize("vocab", [1, 15, 1000])
def test_log_softmax(everywhere: Everywhere, rng: np.random.Generator, vocab: int) -> None:
    logits = (rng.standard_normal((3, vocab)) * 5).astype(np.float32)
    expected = reference.log_softmax(logits)
    for got in everywhere(lambda: ops.log_softmax(logits)):
        assert_same_bits(got, expected)
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(expected, exact, atol=2e-6, rtol=1e-6)


def test_log_equals_libm(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(1, 2e5, 5000), [1.0, 0.5, 2.0**-1000, 1.7e308]])
    np.testing.assert_allclose(reference.log(x), np.log(x), rtol=4e-16, atol=1e-16)


def test_penalties(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(50).astype(np.float32)
    ids = np.array([4, 9, 30], np.int32)
    counts = np.array([0, 2, 1], np.int32)
    params = {"repetition": 1.3, "presence": 0.4, "frequency": 0.2}
    got = ops.apply_penalties(logits, ids, counts, **params)
    assert_same_bits(got, reference.apply_penalties(logits, ids, counts, **params))
    by_hand = logits[9] / 1.3 if logits[9] > 0 else logits[9] * 1.3
    assert got[9] == pytest.approx(by_hand - 2 * 0.2 - 0.4, abs=1e-6)
    untouched = np.setdiff1d(np.arange(50), ids)
    np.testing.assert_array_equal(got[untouched], logits[untouched])
    with pytest.raises(ShapeError, match="id 50 of 50"):
        ops.apply_penalties(logits, np.array([50], np.int32), counts[:1], **params)
