"""Formats that hold foreign codes: laid out as quant.py says, every code and scale kept."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace import _core, ops, quant
from headrace.errors import CheckpointError, ConfigError, ShapeError
from headrace.ops import reference

from .conftest import KEPT, Coded, assert_same_bits, make_codes

Everywhere = Callable[[Callable[[], Any]], list[Any]]
RANGES = {"q4": (-8, 8), "q4f": (-8, 8), "q4a": (0, 16), "mxfp4": (0, 16)}
HELD = [*KEPT, ("q8", 32), ("q4", 32), ("q4", 64), ("mxfp4", 32)]
SHAPES = [(1, 1), (16, 128), (17, 65), (48, 33), (5, 400)]


def random_codes(
    rng: np.random.Generator, shape: tuple[int, int], format: str, group: int
) -> Coded:
    """Any code, any scale that the format holds."""
    low, high = RANGES.get(format, (-128, 128))
    codes = rng.integers(low, high, shape).astype(np.int8)
    if format == "f8":
        codes[(codes & 0x7F) == 0x7F] = 0
    groups = (shape[0], -(-shape[1] // group))
    scales = rng.standard_normal(groups).astype(np.float32)
    if format in ("q8", "q4"):
        scales = scales.astype(np.float16).astype(np.float32)
    if format == "mxfp4":
        scales = np.ldexp(np.float32(1), rng.integers(-127, 125, groups)).astype(np.float32)
    has_minimum = format in quant.WITH_MINIMUM
    minimums = rng.standard_normal(groups).astype(np.float32) if has_minimum else None
    return Coded(codes, scales, minimums)


@pytest.mark.parametrize(("format", "group"), HELD)
@pytest.mark.parametrize("shape", SHAPES)
def test_layout_equals_reference(
    rng: np.random.Generator, format: str, group: int, shape: tuple[int, int]
) -> None:
    coded = random_codes(rng, shape, format, group)
    arguments = (coded.codes, coded.scales, coded.minimums, format, group)
    packed = _core.pack_codes(*arguments)
    assert_same_bits(packed, quant.pack_codes(*arguments))
    assert packed.size == quant.packed_bytes(format, *shape, group)
    assert packed.size == _core.packed_bytes(format, *shape, group)
    matrix = _core.Matrix(packed, format, *shape, group)
    assert_same_bits(_core.unpack(matrix), quant.unpack(packed, format, *shape, group))


@pytest.mark.parametrize(("format", "group"), HELD)
def test_every_code_and_scale_comes_back(rng: np.random.Generator, format: str, group: int) -> None:
    shape = (21, 300)
    coded = random_codes(rng, shape, format, group)
    packed = _core.pack_codes(coded.codes, coded.scales, coded.minimums, format, group)
    values = _core.unpack(_core.Matrix(packed, format, *shape, group))
    scales = np.repeat(coded.scales, group, axis=1)[:, :300]
    if format == "f8":
        numbers = coded.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif format == "mxfp4":
        numbers = coded.codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        numbers = coded.codes.astype(np.float32)
    expected = numbers * scales
    if coded.minimums is not None:
        expected += np.repeat(coded.minimums, group, axis=1)[:, :300]
    np.testing.assert_array_equal(values, expected)
    if format not in ("f8", "mxfp4"):
        kept = quant.codes(packed, format, *shape, group)
        np.testing.assert_array_equal(kept.codes[:, :300], coded.codes)
        assert_same_bits(kept.scales, coded.scales)


def test_packing_again_gives_the_bytes_of_pack(rng: np.random.Generator) -> None:
    """One layout, whoever found the codes."""
    w = rng.standard_normal((48, 200)).astype(np.float32)
    for format, group in (("q8", 32), ("q4", 32), ("q4", 64)):
        packed = _core.pack(w, format, group)
        kept = quant.codes(packed, format, 48, 200, group)
        codes = np.ascontiguousarray(kept.codes[:, :200])
        assert_same_bits(_core.pack_codes(codes, kept.scales, None, format, group), packed)


def test_every_e4m3_number(everywhere: Everywhere) -> None:
    """All codes but NaN's, subnormal ones included, under scales of all magnitudes."""
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes[:, 127] = 0
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for scale in (1.0, -0.3, 1e-42, 3e-39, 2.0**-127, 1e30):
        scales = np.full((2, 1), scale, np.float32)
        packed = _core.pack_codes(codes, scales, None, "f8", 128)
        matrix = _core.Matrix(packed, "f8", 2, 128, 128)
        assert_same_bits(_core.unpack(matrix), exact * np.float32(scale))
        for x in (np.eye(128, dtype=np.float32), np.ones((5, 128), np.float32)):
            expected = reference.linear(x, matrix)
            for got in everywhere(lambda: ops.linear(x, matrix)):  # noqa: B023
                assert_same_bits(got, expected)


@pytest.mark.parametrize("format", ["q8a", "q4a"])
def test_a_minimum_is_added_to_every_weight(format: str, everywhere: Everywhere) -> None:
    """Codes of zero: the product is the minimum times the sum of the inputs."""
    minimums = np.array([[1.0, -2.0, 0.5]], np.float32)
    codes = np.zeros((1, 96), np.int8)
    packed = _core.pack_codes(codes, np.ones((1, 3), np.float32), minimums, format, 32)
    matrix = _core.Matrix(packed, format, 1, 96, 32)
    x = np.repeat(np.array([[127.0, 254.0, -127.0]], np.float32), 32, axis=1)
    for got in everywhere(lambda: ops.linear(x, matrix)):
        assert got[0, 0] == 32 * (127.0 - 2 * 254.0 - 0.5 * 127.0)


@pytest.mark.parametrize(("format", "code", "expected"), [
    ("q4f", 8, "-8 to 7 in format q4f, got 8"),
    ("q4f", -9, "got -9"),
    ("q4a", -1, "0 to 15 in format q4a, got 255"),
    ("q4a", 16, "got 16"),
    ("mxfp4", 16, "got 16"),
    ("f8", 0x7F, "got NaN"),
    ("f8", -1, "got NaN"),
])  # fmt: skip
def test_a_code_out_of_range_is_named(format: str, code: int, expected: str) -> None:
    group = 128 if format == "f8" else 32
    codes = np.zeros((20, 150), np.int8)
    codes[18, 140] = code
    scales = np.ones((20, -(-150 // group)), np.float32)
    minimums = scales if format == "q4a" else None
    with pytest.raises(CheckpointError, match=rf"tensor w, index \[18, 140\]\n.*{expected}"):
        _core.pack_codes(codes, scales, minimums, format, group, "w")
    with pytest.raises(CheckpointError, match="code"):
        quant.pack_codes(codes, scales, minimums, format, group)


@pytest.mark.parametrize(("format", "scale"), [
    ("q8f", np.nan), ("q8a", np.inf), ("q4f", -np.inf), ("q4a", np.nan), ("f8", np.nan),
    ("f8", 2.0**119), ("f8", -(2.0**120)), ("q8", 1.0001), ("q4", 1e6), ("mxfp4", 3.0),
    ("mxfp4", 0.0), ("mxfp4", -2.0), ("mxfp4", 2.0**-128), ("mxfp4", np.inf),
])  # fmt: skip
def test_a_scale_that_would_be_rounded_is_refused(format: str, scale: float) -> None:
    group = 128 if format == "f8" else 32
    codes = np.zeros((20, 300), np.int8)
    scales = np.ones((20, -(-300 // group)), np.float32)
    minimums = scales.copy() if format in quant.WITH_MINIMUM else None
    scales[17, 1] = scale
    with pytest.raises(CheckpointError, match=rf"tensor w, index \[17, {group}\]"):
        _core.pack_codes(codes, scales, minimums, format, group, "w")
    with pytest.raises(CheckpointError, match="scale"):
        quant.pack_codes(codes, scales, minimums, format, group)


def test_a_minimum_that_is_not_finite_is_refused() -> None:
    minimums = np.zeros((3, 2), np.float32)
    minimums[2, 1] = np.nan
    arguments = (np.zeros((3, 64), np.int8), np.ones((3, 2), np.float32), minimums, "q4a", 32)
    for call in (_core.pack_codes, quant.pack_codes):
        with pytest.raises(CheckpointError, match="scale cannot be packed"):
            call(*arguments)


def test_refused_arguments() -> None:
    codes, scales = np.zeros((16, 64), np.int8), np.ones((16, 2), np.float32)
    with pytest.raises(ConfigError, match="f16 holds no codes"):
        _core.pack_codes(codes, np.ones((16, 64), np.float32), None, "f16", 1)
    with pytest.raises(ConfigError, match="no groups of 16\nexpected 32 or 64"):
        _core.pack_codes(codes, scales, None, "q4f", 16)
    with pytest.raises(ShapeError, match="minimums"):
        _core.pack_codes(codes, scales, None, "q8a", 32)
    with pytest.raises(ShapeError, match="minimums"):
        _core.pack_codes(codes, scales, scales, "q8f", 32)
    with pytest.raises(ShapeError, match="scales"):
        _core.pack_codes(codes, scales[:, :1].copy(), None, "q8f", 32)
    with pytest.raises(ShapeError, match="codes"):
        _core.pack_codes(codes.astype(np.int16), scales, None, "q8f", 32)
    with pytest.raises(ShapeError, match="C order"):
        _core.pack_codes(codes[:, ::2], scales[:, :1].copy(), None, "q8f", 32)


def test_the_rounding_used_by_other_tests_is_near(rng: np.random.Generator) -> None:
    w = rng.standard_normal((20, 200)).astype(np.float32)
    for format, group in KEPT:
        coded = make_codes(w, format, group)
        packed = _core.pack_codes(coded.codes, coded.scales, coded.minimums, format, group)
        got = _core.unpack(_core.Matrix(packed, format, 20, 200, group))
        assert np.abs(got - w).max() < (0.4 if format in ("q4f", "q4a", "f8") else 0.03)
