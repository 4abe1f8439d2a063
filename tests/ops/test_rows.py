"""Norm, rope, embedding, router and elementwise ops against the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import _core, ops
from headrace.errors import NumericError, ShapeError
from headrace.ops import reference

from .conftest import FORMATS, assert_same_bits, make_matrix

Everywhere = Callable[[Callable[[], Any]], list[Any]]


@pytest.mark.parametrize("width", [1, 8, 16, 31, 128, 200])
def test_rms_norm(everywhere: Everywhere, rng: np.random.Generator, width: int) -> None:
    x = rng.standard_normal((7, width)).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    expected = reference.rms_norm(x, weight, 1e-6)
    for got in everywhere(lambda: ops.rms_norm(x, weight, 1e-6)):
        assert_same_bits(got, expected)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(expected, exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="weight"):
        ops.rms_norm(x, weight[:-1] if width > 1 else np.ones(2, np.float32), 1e-6)


@pytest.mark.parametrize("half", [1, 8, 20, 64])
def test_rope(everywhere: Everywhere, rng: np.random.Generator, half: int) -> None:
    positions = np.array([0, 1, 77, 4095, 1_000_000], np.int32)
    inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    cos, sin = reference.rope_angles(positions, inv_freq, 1.25)
    for got_cos, got_sin in everywhere(lambda: ops.rope_angles(positions, inv_freq, 1.25)):
        assert_same_bits(got_cos, cos)
        assert_same_bits(got_sin, sin)
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    np.testing.assert_allclose(cos, 1.25 * np.cos(angles), atol=2e-7, rtol=0)
    np.testing.assert_allclose(sin, 1.25 * np.sin(angles), atol=2e-7, rtol=0)
    x = rng.standard_normal((5, 3, 2 * half + 3)).astype(np.float32)  # three dims pass
    expected = reference.rope(x, cos, sin)
    for got in everywhere(lambda: ops.rope(x, cos, sin)):
        assert_same_bits(got, expected)
    np.testing.assert_array_equal(expected[:, :, 2 * half :], x[:, :, 2 * half :])


def test_rope_refuses_more_dims_than_there_are() -> None:
    angles = np.ones((2, 9), np.float32)
    with pytest.raises(ShapeError, match="18 rotary dims in heads of 16"):
        ops.rope(np.ones((2, 1, 16), np.float32), angles, angles)


def test_sin_cos_is_nearly_correctly_rounded(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-1e6, 1e6, 4000), rng.uniform(-10, 10, 4000)])
    sin, cos = reference.sin_cos(x)
    np.testing.assert_allclose(sin, np.sin(x), atol=1e-15, rtol=0)
    np.testing.assert_allclose(cos, np.cos(x), atol=1e-15, rtol=0)


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_embedding_of_a_packed_head(
    everywhere: Everywhere, rng: np.random.Generator, format: str, group: int
) -> None:
    table = make_matrix(rng.standard_normal((37, 70)).astype(np.float32), format, group)
    ids = np.array([36, 0, 16, 0], np.int32)
    expected = reference.embedding(ids, table)
    for got in everywhere(lambda: ops.embedding(ids, table)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_embedding_of_rows(everywhere: Everywhere, rng: np.random.Generator, dtype: Any) -> None:
    table = rng.standard_normal((9, 50)).astype(np.float32)
    rows = (
        (table.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == np.uint16
        else table.astype(dtype)
    )
    ids = np.array([8, 0, 3], np.int32)
    expected = reference.embedding(ids, rows)
    for got in everywhere(lambda: ops.embedding(ids, rows)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("bad", [-1, 9])
def test_embedding_refuses_ids_outside(bad: int) -> None:
    rows = np.ones((9, 8), np.float32)
    ids = np.array([1, bad], np.int32)
    with pytest.raises(ShapeError, match=f"id {bad} of token 1"):
        ops.embedding(ids, rows)
    with pytest.raises(ShapeError, match=f"id {bad} of token 1"):
        ops.embedding(ids, make_matrix(rows, "f32", 1))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (31, 4), (128, 8), (3, 3)])
def test_router(
    everywhere: Everywhere,
    rng: np.random.Generator,
    num_experts: int,
    top_k: int,
    renormalize: bool,
) -> None:
    weight = rng.standard_normal((num_experts, 40)).astype(np.float32) * np.float32(0.3)
    weight[num_experts // 2] = weight[0]  # a tie: the lower id wins
    matrix = make_matrix(weight, "f32", 1)
    x = rng.standard_normal((11, 40)).astype(np.float32)
    ids, weights = reference.router_topk(x, matrix, top_k=top_k, renormalize=renormalize)
    for got in everywhere(lambda: ops.router_topk(x, matrix, top_k=top_k, renormalize=renormalize)):
        assert_same_bits(got[0], ids)
        assert_same_bits(got[1], weights)
    assert (np.diff(weights, axis=1) <= 0).all()


def test_router_tie_goes_to_the_lower_id(everywhere: Everywhere) -> None:
    matrix = make_matrix(np.ones((20, 4), np.float32), "f32", 1)
    for ids, _ in everywhere(
        lambda: ops.router_topk(np.ones((2, 4), np.float32), matrix, top_k=5, renormalize=True)
    ):
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]] * 2)


def test_router_errors() -> None:
    matrix = make_matrix(np.ones((4, 8), np.float32), "f32", 1)
    x = np.ones((3, 8), np.float32)
    x[2, 1] = np.nan
    with pytest.raises(NumericError, match="token 2"):
        ops.router_topk(x, matrix, top_k=2, renormalize=True)
    for top_k in (0, 5):
        with pytest.raises(ShapeError, match="top_k out of range"):
            ops.router_topk(x[:1], matrix, top_k=top_k, renormalize=True)
    with pytest.raises(ShapeError, match="must be f32"):
        ops.router_topk(
            x[:1], make_matrix(np.ones((4, 8), np.float32), "bf16", 1), top_k=1, renormalize=True
        )


@pytest.mark.parametrize("shape", [(3,), (5, 33), (2, 3, 17), (4, 20000)])
def test_add_and_clamp(
    everywhere: Everywhere, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    y = rng.standard_normal(shape).astype(np.float32)
    x.flat[0] = np.nan
    for got in everywhere(lambda: (ops.add(x, y), ops.clamp(x, 0.5))):
        np.testing.assert_array_equal(got[0], reference.add(x, y))
        np.testing.assert_array_equal(got[1], reference.clamp(x, 0.5))
    with pytest.raises(ShapeError):
        ops.add(x, y[..., :-1])
    with pytest.raises(ShapeError, match="limit"):
        ops.clamp(x, 0.0)


def test_exp_over_its_whole_range(everywhere: Everywhere) -> None:
    """Through log_softmax's sum: rows of one value x below a maximum of 0 add exp(x)."""
    x = np.concatenate([np.linspace(-110, 0, 4001), [-87.3, -88.0, -103.9, -104.5, -1e30]])
    logits = np.stack([np.zeros_like(x), x], axis=1).astype(np.float32)
    expected = reference.log_softmax(logits)
    for got in everywhere(lambda: ops.log_softmax(logits)):
        assert_same_bits(got, expected)
    values = reference.exp(x.astype(np.float32)).astype(np.float64)
    exact = np.exp(x.astype(np.float32).astype(np.float64))
    normal = exact > 2.0**-126
    assert np.abs(values[normal] / exact[normal] - 1).max() < 1.5 * 2.0**-23
    assert np.abs(values - exact)[~normal].max() <= 2.0**-149


def test_results_come_from_the_pool() -> None:
    _core.pool_trim()
    x = np.ones((64, 1024), np.float32)
    for _ in range(3):
        ops.add(x, x)
    held = _core.pool_bytes()
    for _ in range(10):
        ops.add(x, x)
    assert _core.pool_bytes() == held > 0
    kept = ops.add(x, x)
    _core.pool_trim()
    assert 0 < _core.pool_bytes() <= held
    np.testing.assert_array_equal(kept, x + x)
