"""Products with packed matrices: every format, odd tails, every machine, equal to the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import _core, ops
from headrace.errors import ConfigError, NumericError, ShapeError
from headrace.ops import reference

from .conftest import FLOATS, FORMATS, KEPT, assert_same_bits, make_matrix

Everywhere = Callable[[Callable[[], Any]], list[Any]]


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (37, 97), (130, 160)])
@pytest.mark.parametrize("num_rows", [1, 2, 13, 37])
def test_equals_reference_everywhere(
    rng: np.random.Generator,
    everywhere: Everywhere,
    format: str,
    group: int,
    shape: tuple[int, int],
    num_rows: int,
) -> None:
    w = make_matrix(rng.standard_normal(shape).astype(np.float32), format, group)
    x = rng.standard_normal((num_rows, shape[1])).astype(np.float32)
    x[0, : shape[1] // 2] = 0.0  # a group of zeros
    expected = reference.linear(x, w)
    for got in everywhere(lambda: ops.linear(x, w)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(
    rng: np.random.Generator, everywhere: Everywhere, format: str, group: int
) -> None:
    w = make_matrix(rng.standard_normal((83, 200)).astype(np.float32), format, group)
    x = rng.standard_normal((21, 200)).astype(np.float32)
    expected = np.concatenate([ops.linear(row[None], w) for row in x])
    for count in range(1, 22):
        for got in everywhere(lambda: ops.linear(x[:count], w)):  # noqa: B023
            assert_same_bits(got, expected[:count])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_random_shapes_equal_one_row_calls(
    everywhere: Everywhere, format: str, group: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_rows, outputs, inputs = (int(rng.integers(1, most)) for most in (71, 150, 400))
    w = make_matrix(rng.standard_normal((outputs, inputs)).astype(np.float32), format, group)
    x = rng.standard_normal((num_rows, inputs)).astype(np.float32)
    expected = np.concatenate([ops.linear(row[None], w) for row in x])
    for got in everywhere(lambda: ops.linear(x, w)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("format", ["q8", "q4", "mxfp4"])
def test_extreme_codes(everywhere: Everywhere, format: str) -> None:
    """The largest integers that can meet: no instruction set may saturate or overflow."""
    w = np.zeros((16, 64), np.float32)
    w[::2], w[1::2] = 8.0, -8.0
    matrix = make_matrix(w, format, 32)
    _multiply_by_ones(everywhere, matrix)


@pytest.mark.parametrize(("format", "group"), KEPT)
def test_extreme_codes_from_elsewhere(everywhere: Everywhere, format: str, group: int) -> None:
    lowest, highest = {"q4f": (-8, 7), "q4a": (0, 15), "f8": (0xFE, 0x7E)}.get(format, (-128, 127))
    codes = np.full((16, 64), highest, np.uint8 if format == "f8" else np.int8)
    codes[1::2] = lowest
    scales = np.full((16, -(-64 // group)), 0.75, np.float32)
    minimums = -scales if format in ("q8a", "q4a") else None
    packed = _core.pack_codes(codes, scales, minimums, format, group)
    _multiply_by_ones(everywhere, _core.Matrix(packed, format, 16, 64, group))


def _multiply_by_ones(everywhere: Everywhere, matrix: _core.Matrix) -> None:
    x = np.ones((18, 64), np.float32)
    x[1, ::2] = -1.0
    expected = reference.linear(x, matrix)
    for got in everywhere(lambda: ops.linear(x, matrix)):
        assert_same_bits(got, expected)


def test_q8_code_minus_128(everywhere: Everywhere, rng: np.random.Generator) -> None:
    """Our quantiser never makes it, but foreign 8-bit weights may hold it."""
    packed = _core.aligned_empty(_core.packed_bytes("q8", 16, 32, 32))
    packed[:512] = 0x80
    packed[512:] = np.full(16, 0.5, np.float16).view(np.uint8)
    matrix = _core.Matrix(packed, "q8", 16, 32, 32)
    x = rng.standard_normal((17, 32)).astype(np.float32)
    expected = reference.linear(x, matrix)
    for got in everywhere(lambda: ops.linear(x, matrix)):
        assert_same_bits(got, expected)


def test_every_e8m0_scale(everywhere: Everywhere, rng: np.random.Generator) -> None:
    packed = _core.aligned_empty(_core.packed_bytes("mxfp4", 16, 32 * 16, 32))
    groups = packed.reshape(16, 272)
    groups[:, :256] = rng.integers(0, 256, (16, 256), dtype=np.uint8)
    for start in (0, 254 - 15):  # the subnormal end and the large end
        groups[:, 256:] = start + np.arange(16, dtype=np.uint8)[:, None]
        matrix = _core.Matrix(packed, "mxfp4", 16, 512, 32)
        x = rng.standard_normal((18, 512)).astype(np.float32) * np.float32(0.01)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = reference.linear(x, matrix)
        for got in everywhere(lambda: ops.linear(x, matrix)):  # noqa: B023
            assert_same_bits(got, expected)


def test_tiny_activations(everywhere: Everywhere, rng: np.random.Generator) -> None:
    matrix = make_matrix(rng.standard_normal((16, 96)).astype(np.float32), "q8", 32)
    x = np.full((16, 96), 1e-30, np.float32)
    x[:, 32:64] = 1e-37  # below the least amax: counts as zero
    x[:, 64:] = 1e-45
    expected = reference.linear(x, matrix)
    for got in everywhere(lambda: ops.linear(x, matrix)):
        assert_same_bits(got, expected)


def test_linears_equal_linear(everywhere: Everywhere, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 128)).astype(np.float32)
    for first in range(0, len(FORMATS), 6):
        matrices = [
            make_matrix(rng.standard_normal((40, 128)).astype(np.float32), format, group)
            for format, group in FORMATS[first : first + 6]
        ]
        expected = [ops.linear(x, w) for w in matrices]
        for got in everywhere(lambda: ops.linears(x, matrices)):  # noqa: B023
            assert len(got) == len(expected)
            for a, b in zip(got, expected, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ["q8", "q4", "mxfp4"])
def test_not_finite_input_is_an_error(everywhere: Everywhere, format: str, bad: float) -> None:
    matrix = make_matrix(np.ones((16, 70), np.float32), format, 32)
    x = np.ones((6, 70), np.float32)
    x[4, 69] = bad

    def call() -> None:
        with pytest.raises(NumericError, match="row 4"):
            ops.linear(x, matrix)

    everywhere(call)


def test_refused_arguments() -> None:
    w = make_matrix(np.ones((16, 32), np.float32), "q8", 32)
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ShapeError, match="expected 32 inputs per row, got 16"):
        ops.linear(np.ones((2, 16), np.float32), w)
    with pytest.raises(ShapeError, match="dtype float32"):
        ops.linear(x.astype(np.float64), w)
    with pytest.raises(ShapeError, match="C order"):
        ops.linear(np.ones((2, 64), np.float32)[:, ::2], w)
    with pytest.raises(ShapeError, match="shape"):
        ops.linear(x[0], w)
    assert ops.linear(x[:0], w).shape == (0, 16)


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_quantised_product_is_near_the_real_one(
    rng: np.random.Generator, format: str, group: int
) -> None:
    """The contract is a good approximation: errors as the codes' step sizes explain them."""
    w = make_matrix(rng.standard_normal((64, 512)).astype(np.float32), format, group)
    x = rng.standard_normal((4, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ _core.unpack(w).astype(np.float64).T
    error = np.abs(ops.linear(x, w) - exact).max() / np.abs(exact).std()
    assert error < (1e-5 if format in FLOATS else 0.05)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("unit", ["float", "int8"])
def test_the_peak_of_a_unit_counts_operations(isa: str, unit: str) -> None:
    _core.set_isa(isa)
    once, twice = (_core.peak_operations(unit, rounds) for rounds in (16, 32))
    assert once > 0 and twice == 2 * once


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="float or int8, got tensor"):
        _core.peak_operations("tensor", 1)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("num_rows", [1, 6])
def test_fused_products_equal_reference(
    everywhere: Everywhere, rng: np.random.Generator, format: str, group: int, num_rows: int
) -> None:
    x = rng.standard_normal((num_rows, 70)).astype(np.float32)
    y = rng.standard_normal((num_rows, 50)).astype(np.float32)
    norm = rng.standard_normal(70).astype(np.float32)
    matrices = [
        make_matrix(rng.standard_normal((n, 70)).astype(np.float32), format, group)
        for n in (50, 33)
    ]
    normed = reference.norm_linears(x, norm, 1e-5, matrices)
    added = reference.linear_add(x, matrices[0], y)
    for got in everywhere(lambda: ops.norm_linears(x, norm, 1e-5, matrices)):
        for product, expected in zip(got, normed, strict=True):
            assert_same_bits(product, expected)
    for got in everywhere(lambda: ops.linear_add(x, matrices[0], y)):
        assert_same_bits(got, added)


def test_fused_products_refuse_other_shapes() -> None:
    x = np.ones((2, 32), np.float32)
    matrix = make_matrix(np.ones((4, 32), np.float32), "f32", 1)
    with pytest.raises(ShapeError, match="norm_linears: array `weight`"):
        ops.norm_linears(x, np.ones(31, np.float32), 1e-5, [matrix])
    with pytest.raises(ShapeError, match="linear_add: array `y`"):
        ops.linear_add(x, matrix, np.ones((2, 5), np.float32))
