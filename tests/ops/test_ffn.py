"""SwiGLU and the mixture of experts: arrival order, batching and machine never show."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import _core, ops
from headrace.errors import NumericError, ShapeError
from headrace.ops import reference

from .conftest import FORMATS, assert_same_bits, make_matrix

Everywhere = Callable[[Callable[[], Any]], list[Any]]


class Mixture:
    """Random experts as records in memory, and as matrices for the reference."""

    def __init__(
        self, rng: np.random.Generator, ids: list[int], hidden: int, inner: int, formats: Any
    ) -> None:
        shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
        self.layout = []
        offset = 0
        for (format, group), shape in zip(formats, shapes, strict=True):
            self.layout.append((format, *shape, group, offset))
            offset += -(-_core.packed_bytes(format, *shape, group) // 64) * 64
        self.records: dict[int, Any] = {}
        matrices = {}
        for expert in ids:
            record = _core.aligned_empty(offset)
            views = []
            for (format, rows, cols, group, start), shape in zip(self.layout, shapes, strict=True):
                w = rng.standard_normal(shape).astype(np.float32)
                packed = make_matrix(w, format, group).data
                record[start : start + packed.size] = packed
                views.append(
                    _core.Matrix(record[start : start + packed.size], format, rows, cols, group)
                )
            self.records[expert] = record
            matrices[expert] = (views[0], views[1], views[2])
        self.reference = reference.Experts(matrices)

    def source(self) -> _core.ResidentSource:
        gate, up, down = self.layout
        return _core.ResidentSource(gate, up, down, self.records)

    def feed(self, order: list[int] | None = None, step: int = 1) -> _core.ResidentFeed:
        gate, up, down = self.layout
        return _core.ResidentFeed(gate, up, down, self.records, order or [], step)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_swiglu(
    everywhere: Everywhere, rng: np.random.Generator, format: str, group: int, num_rows: int
) -> None:
    gate, up = (
        make_matrix(rng.standard_normal((50, 70)).astype(np.float32), format, group)
        for _ in range(2)
    )
    down = make_matrix(rng.standard_normal((70, 50)).astype(np.float32), format, group)
    x = rng.standard_normal((num_rows, 70)).astype(np.float32)
    expected = reference.swiglu_ffn(x, gate, up, down)
    for got in everywhere(lambda: ops.swiglu_ffn(x, gate, up, down)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize(
    "formats",
    [
        [("q4", 32)] * 3,
        [("q4", 64)] * 3,
        [("q8", 32)] * 3,
        [("mxfp4", 32)] * 3,
        [("bf16", 1)] * 3,
        [("q4", 64), ("q4", 32), ("f32", 1)],
        [("f16", 1), ("q8", 32), ("q4", 64)],
        [("q8f", 16)] * 3,
        [("f8", 128)] * 3,
        [("q4a", 32), ("q4a", 32), ("q8f", 16)],  # a GGUF file of Q4_K and Q6_K
        [("q4f", 64), ("q8a", 16), ("f8", 32)],
        [("q4k", 32), ("q4k", 32), ("q6k", 16)],
        [("q5k", 32), ("q5k", 32), ("q6ka", 16)],
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_moe_equals_reference(
    everywhere: Everywhere, rng: np.random.Generator, formats: Any, num_tokens: int
) -> None:
    mixture = Mixture(rng, [2, 3, 7, 11, 40], hidden=80, inner=48, formats=formats)
    x = rng.standard_normal((num_tokens, 80)).astype(np.float32)
    ids = np.stack([rng.permutation([2, 3, 7, 11, 40])[:3] for _ in range(num_tokens)])
    ids = ids.astype(np.int32)
    weights = rng.random((num_tokens, 3), np.float32)
    expected = reference.moe_ffn(x, ids, weights, mixture.reference)
    for got in everywhere(lambda: ops.moe_ffn(x, ids, weights, mixture.feed())):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routed_equals_reference(
    everywhere: Everywhere, rng: np.random.Generator, num_tokens: int, renormalize: bool
) -> None:
    mixture = Mixture(rng, list(range(12)), hidden=80, inner=48, formats=[("q4", 32)] * 3)
    router = make_matrix(rng.standard_normal((12, 80)).astype(np.float32), "f32", 1)
    x = rng.standard_normal((num_tokens, 80)).astype(np.float32)
    options: Any = {"top_k": 3, "renormalize": renormalize}
    expected = reference.routed_ffn(x, router, mixture.reference, **options)
    for got in everywhere(lambda: ops.routed_ffn(x, router, mixture.source(), 0, **options)):
        assert_same_bits(got, expected)


def test_routed_errors(rng: np.random.Generator) -> None:
    mixture = Mixture(rng, [0, 1], hidden=64, inner=32, formats=[("q8", 32)] * 3)
    router = make_matrix(np.zeros((3, 64), np.float32), "f32", 1)
    x = np.ones((2, 64), np.float32)

    def routed(matrix: _core.Matrix = router, layer: int = 0, top_k: int = 2) -> None:
        ops.routed_ffn(x, matrix, mixture.source(), layer, top_k=top_k, renormalize=True)

    routed()
    with pytest.raises(ShapeError, match="no record of layer 0, expert 2"):
        routed(top_k=3)
    with pytest.raises(ShapeError, match="no record of layer 1"):
        routed(layer=1)
    with pytest.raises(ShapeError, match="expected 1 to 3, got 4"):
        routed(top_k=4)
    with pytest.raises(ShapeError, match="the router must be f32, got q8"):
        routed(make_matrix(np.zeros((3, 64), np.float32), "q8", 32))
    with pytest.raises(ShapeError, match="expected 32 inputs per row"):
        routed(make_matrix(np.zeros((3, 32), np.float32), "f32", 1))
    x[1, 3] = np.inf
    with pytest.raises(NumericError, match="router logits of token 1"):
        routed()


def test_arrival_order_does_not_show(everywhere: Everywhere, rng: np.random.Generator) -> None:
    mixture = Mixture(rng, list(range(6)), hidden=64, inner=32, formats=[("q4", 32)] * 3)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    ids = np.stack([rng.permutation(6)[:4] for _ in range(4)]).astype(np.int32)
    weights = rng.random((4, 4), np.float32)
    expected = ops.moe_ffn(x, ids, weights, mixture.feed())
    orders = [list(rng.permutation(6)) for _ in range(4)]

    def shuffled() -> list[Any]:
        return [
            ops.moe_ffn(x, ids, weights, mixture.feed([int(i) for i in order], step))
            for order in orders
            for step in (1, 2, 6)
        ]

    for results in everywhere(shuffled):
        for got in results:
            assert_same_bits(got, expected)


def test_tokens_do_not_depend_on_each_other(rng: np.random.Generator) -> None:
    mixture = Mixture(rng, list(range(8)), hidden=64, inner=32, formats=[("q8", 32)] * 3)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(40)]).astype(np.int32)
    weights = rng.random((40, 2), np.float32)
    together = ops.moe_ffn(x, ids, weights, mixture.feed())
    for t in range(40):
        one = slice(t, t + 1)
        assert_same_bits(
            ops.moe_ffn(x[one], ids[one], weights[one], mixture.feed())[0], together[t]
        )


def test_every_record_is_given_back(rng: np.random.Generator) -> None:
    mixture = Mixture(rng, [0, 1, 5], hidden=64, inner=32, formats=[("q8", 32)] * 3)
    feed = mixture.feed()
    x = np.ones((1, 64), np.float32)
    ops.moe_ffn(x, np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32), feed)
    assert feed.rewind()  # expert 5, which no token chose, included
    assert not feed.rewind()


def test_moe_errors(rng: np.random.Generator) -> None:
    mixture = Mixture(rng, [0, 1], hidden=64, inner=32, formats=[("q8", 32)] * 3)
    x = np.ones((2, 64), np.float32)
    ids = np.array([[0, 1], [1, 9]], np.int32)
    weights = np.ones((2, 2), np.float32)
    with pytest.raises(ShapeError, match="expert 9 of token 1 is not in the lease"):
        ops.moe_ffn(x, ids, weights, mixture.feed())
    ids[1, 1] = 0
    with pytest.raises(ShapeError, match="weights"):
        ops.moe_ffn(x, ids, weights[:, :1], mixture.feed())
    with pytest.raises(ShapeError, match="expected 64 inputs per row"):
        ops.moe_ffn(x[:, :32].copy(), ids, weights, mixture.feed())
    x[1, 3] = np.nan
    with pytest.raises(NumericError, match="moe_ffn: NaN or infinity in row 1"):
        ops.moe_ffn(x, ids, weights, mixture.feed())
    gate, up, down = mixture.layout
    with pytest.raises(ShapeError, match="does not lie in its record"):
        _core.ResidentFeed(gate, up, (*down[:4], down[4] + 64), mixture.records)


def test_overflowing_activation_is_an_error(rng: np.random.Generator) -> None:
    mixture = Mixture(rng, [0], hidden=64, inner=32, formats=[("q8", 32)] * 3)
    x = np.full((1, 64), 1e38, np.float32)
    with pytest.raises(NumericError, match="the activation of an expert"):
        ops.moe_ffn(x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), mixture.feed())
