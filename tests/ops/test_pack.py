"""The packed formats: native packing against quant.py, byte for byte."""

import ml_dtypes
import numpy as np
import pytest

from headrace import _core, quant
from headrace.errors import CheckpointError, ConfigError, ShapeError

from .conftest import ROUNDED, assert_same_bits, make_matrix

SHAPES = [(1, 1), (16, 64), (17, 65), (48, 33), (5, 200)]


@pytest.mark.parametrize(("format", "group"), ROUNDED)
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_equals_reference(
    rng: np.random.Generator, format: str, group: int, shape: tuple[int, int]
) -> None:
    w = rng.standard_normal(shape).astype(np.float32)
    w[0, 0] = 0.0
    packed = _core.pack(w, format, group)
    assert_same_bits(packed, quant.pack(w, format, group))
    size = quant.packed_bytes(format, *shape, group)
    assert packed.size == size == _core.packed_bytes(format, *shape, group)
    matrix = _core.Matrix(packed, format, *shape, group)
    assert matrix.nbytes == size
    assert_same_bits(_core.unpack(matrix), quant.unpack(packed, format, *shape, group))


@pytest.mark.parametrize(("format", "group"), ROUNDED)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_sources(rng: np.random.Generator, format: str, group: int, dtype: str) -> None:
    w = rng.standard_normal((20, 70)).astype(np.float32)
    source = w.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bf16" else w.astype("f2")
    assert_same_bits(_core.pack(source, format, group), quant.pack(source, format, group))
    exact = quant.widen(source)
    if format in (dtype, "f32"):
        assert_same_bits(_core.unpack(make_matrix(source, format, group)), exact)


def test_bf16_rounds_like_ml_dtypes(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 0x7F00_0000, (64, 64), dtype=np.uint32)
    w = bits.view(np.float32)
    expected = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(_core.unpack(make_matrix(w, "bf16", 1)), expected)


def test_f16_rounds_like_numpy() -> None:
    """Every half, the midpoints between neighbours, and both neighbours of each midpoint."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / np.float32(2)
    around = np.concatenate([halves, middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9)])
    w = np.concatenate([around, -around])
    w = np.pad(w, (0, -w.size % 64)).reshape(-1, 64).astype(np.float32)
    assert_same_bits(_core.unpack(make_matrix(w, "f16", 1)), w.astype("f2").astype("f4"))


def test_mxfp4_values_round_to_nearest_even() -> None:
    ticks = np.arange(0, 8.25, 0.25, dtype=np.float32)[:32]
    w = np.zeros((2, 32), np.float32)
    w[0], w[1] = ticks, -ticks
    w[:, 31] = 7.75  # fixes the shared exponent at 0; 7.75 itself saturates
    expected = ticks.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    got = _core.unpack(make_matrix(w, "mxfp4", 32))
    np.testing.assert_array_equal(got[0, :31], expected[:31])
    np.testing.assert_array_equal(got[1, :31], -expected[:31])
    assert got[0, 31] == 6.0


def test_extreme_lands_on_code_minus_eight() -> None:
    w = np.zeros((1, 32), np.float32)
    w[0, 3], w[0, 4] = 4.0, -3.5
    np.testing.assert_array_equal(_core.unpack(make_matrix(w, "q4", 32)), w)


def test_tiny_groups_and_e8m0_ends() -> None:
    w = np.full((1, 64), np.float32(2.0**-140))
    w[0, 32:] = 0.0
    for format in ("q8", "q4"):
        assert not _core.unpack(make_matrix(w, format, 32)).any()
    assert_same_bits(_core.pack(w, "mxfp4", 32), quant.pack(w, "mxfp4", 32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("format", "group"), ROUNDED)
def test_bad_weight_is_named(format: str, group: int, bad: float) -> None:
    w = np.ones((40, 70), np.float32)
    w[33, 65] = bad
    w[35, 2] = bad
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0, index \[33, 65\]"):
        _core.pack(w, format, group, "model.layers.0")


def test_scale_beyond_f16_is_an_error() -> None:
    w = np.full((1, 32), 1e9, np.float32)
    with pytest.raises(CheckpointError, match="scale fits float16"):
        _core.pack(w, "q4", 32)


def test_refused_arguments() -> None:
    w = np.ones((16, 32), np.float32)
    with pytest.raises(ConfigError, match="unknown weight format `q5`"):
        _core.pack(w, "q5", 32)
    with pytest.raises(ConfigError, match="no groups of 64"):
        _core.pack(w, "q8", 64)
    with pytest.raises(ConfigError, match="not rounded to format q8f"):
        _core.pack(w, "q8f", 32)
    with pytest.raises(ShapeError, match="got another dtype"):
        _core.pack(w.astype(np.float64), "q8", 32)
    with pytest.raises(ShapeError, match="C order"):
        _core.pack(w.T, "q8", 32)
    packed = _core.pack(w, "q8", 32)
    with pytest.raises(ShapeError, match="shape"):
        _core.Matrix(packed[:-1], "q8", 16, 32, 32)
    with pytest.raises(ShapeError, match="multiple of 64"):
        _core.Matrix(np.concatenate([packed, packed])[1 : packed.size + 1], "q8", 16, 32, 32)


def test_matrix_keeps_its_bytes_alive() -> None:
    matrix = make_matrix(np.eye(16, 32, dtype=np.float32), "f32", 1)
    trash = [_core.pack(np.ones((16, 32), np.float32), "f32") for _ in range(8)]
    del trash
    np.testing.assert_array_equal(_core.unpack(matrix), np.eye(16, 32))
    assert matrix.data.size == matrix.nbytes
