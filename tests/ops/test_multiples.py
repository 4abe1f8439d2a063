"""Formats whose scales are multiples: bytes as quant.py says, sums of the wider formats."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import _core, ops, quant
from headrace.checkpoint.gguf_blocks import QUANTISED, block_codes, blocks_of_packed
from headrace.checkpoint.gguf_header import BLOCK_TYPES
from headrace.errors import CheckpointError, ConfigError, ShapeError
from headrace.ops import reference

from .conftest import MULTIPLES, assert_same_bits

Everywhere = Callable[[Callable[[], Any]], list[Any]]
TYPE_IDS = {type.name: id for id, type in BLOCK_TYPES.items()}
# The file's type, its units' places in a block, and the format with a float32 scale for each group.
TYPES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "q2k": ("Q2_K", (80, 82), "q8a"),
    "q3k": ("Q3_K", (108,), "q8f"),
    "q4k": ("Q4_K", (0, 2), "q8a"),
    "q5k": ("Q5_K", (0, 2), "q8a"),
    "q6k": ("Q6_K", (208,), "q8f"),
}
OWN = [(format, quant.MULTIPLES[format].group) for format in TYPES]
HOLDING_MORE = [("q4k", "q5k", 32), *((format, "q6ka", 16) for format in TYPES)]
"""Of each a format, another that holds the same blocks, and that one's group."""


def random_blocks(rng: np.random.Generator, format: str, shape: tuple[int, int]) -> np.ndarray:
    """Rows of blocks of any bytes; units of both signs, some zero or below the normal float16."""
    type, places, _ = TYPES[format]
    rows, cols = shape
    blocks = rng.integers(0, 256, (rows, cols // 256, QUANTISED[type].nbytes), np.uint8)
    for at in places:
        units = rng.standard_normal((rows, cols // 256)).astype(np.float16)
        units[rng.random(units.shape) < 0.1] = 0.0
        units[rng.random(units.shape) < 0.1] = 6e-8
        blocks[:, :, at : at + 2] = units.view(np.uint8).reshape(rows, -1, 2)
    return blocks.reshape(rows, -1)


def repacked(blocks: np.ndarray, format: str, into: str, cols: int) -> _core.Matrix:
    group = quant.MULTIPLES[format].group
    packed = _core.aligned_empty(_core.packed_bytes(into, len(blocks), cols, group))
    _core.repack_gguf(blocks, TYPE_IDS[TYPES[format][0]], cols, into, group, packed)
    return _core.Matrix(packed, into, len(blocks), cols, group)


@pytest.mark.parametrize(("format", "group"), OWN)
@pytest.mark.parametrize("shape", [(1, 256), (16, 512), (37, 768)])
def test_blocks_become_the_bytes_that_quant_lays_out(
    rng: np.random.Generator, format: str, group: int, shape: tuple[int, int]
) -> None:
    kind = quant.MULTIPLES[format]
    blocks = random_blocks(rng, format, shape)
    matrix = repacked(blocks, format, format, shape[1])
    assert matrix.data.size == quant.packed_bytes(format, *shape, group)
    found = quant.codes(matrix.data, format, *shape, group)
    wanted = block_codes(blocks, TYPES[format][0])
    np.testing.assert_array_equal(found.codes, wanted.codes)
    assert_same_bits(found.scales, wanted.scales)
    if kind.has_minimum:
        assert wanted.minimums is not None
        assert_same_bits(found.minimums, wanted.minimums)
    assert_same_bits(_core.unpack(matrix), found.values)
    assert_same_bits(quant.pack_multiples(_super_codes(matrix), format), matrix.data)


def _super_codes(matrix: _core.Matrix) -> quant.SuperCodes:
    """Read the numbers of a packed matrix from the places that docs/format.md names, one by one."""
    kind = quant.MULTIPLES[matrix.format]
    groups, supers = 256 // matrix.group, matrix.cols // 256
    bits = kind.low_bits + kind.high_bits
    minimums_at = 64 + 16 * groups
    low_at = minimums_at + 16 * groups * kind.has_minimum
    high_at = low_at + 512 * kind.low_bits
    data = matrix.data.reshape(-1, supers, high_at + 512 * kind.high_bits)

    def plane(at: int, width: int, o: int, k: int) -> np.ndarray:
        j, together = k // 4, 8 // width
        byte = data[:, :, at + j // together * 64 + 4 * o + k % 4]
        return byte >> np.uint8(j % together * width) & np.uint8((1 << width) - 1)

    codes = np.zeros((len(data), 16, supers, 256), np.uint8)
    for o in range(16):
        for k in range(256):
            codes[:, o, :, k] = plane(low_at, kind.low_bits, o, k)
            if bits > kind.low_bits:
                high = plane(high_at, kind.high_bits, o, k)
                codes[:, o, :, k] |= high << np.uint8(kind.low_bits)

    def numbers(at: int, count: int, dtype: Any) -> np.ndarray:
        size = np.dtype(dtype).itemsize * 16 * count
        part = np.ascontiguousarray(data[:, :, at : at + size]).view(dtype)
        by_output = part.reshape(len(data), supers, count, 16).transpose(0, 3, 1, 2)
        return by_output.reshape(len(data) * 16, -1)[: matrix.rows]

    return quant.SuperCodes(
        codes.reshape(len(data) * 16, -1)[: matrix.rows],
        numbers(64, groups, np.int8),
        numbers(0, 1, np.float16),
        numbers(minimums_at, groups, np.int8) if kind.has_minimum else None,
        numbers(32, 1, np.float16) if kind.has_minimum else None,
    )


@pytest.mark.parametrize(("format", "into", "group"), HOLDING_MORE)
def test_blocks_fit_formats_that_hold_more(
    rng: np.random.Generator, everywhere: Everywhere, format: str, into: str, group: int
) -> None:
    blocks = random_blocks(rng, format, (37, 768))
    packed = _core.aligned_empty(_core.packed_bytes(into, 37, 768, group))
    _core.repack_gguf(blocks, TYPE_IDS[TYPES[format][0]], 768, into, group, packed)
    matrix = _core.Matrix(packed, into, 37, 768, group)
    np.testing.assert_array_equal(
        _core.unpack(matrix), _core.unpack(repacked(blocks, format, format, 768))
    )
    assert_same_bits(quant.pack_multiples(_super_codes(matrix), into), matrix.data)
    x = rng.standard_normal((9, 768)).astype(np.float32)
    expected = reference.linear(x, matrix)
    for got in everywhere(lambda: ops.linear(x, matrix)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize(("format", "group"), OWN)
def test_blocks_come_back(rng: np.random.Generator, format: str, group: int) -> None:
    for rows in (1, 37):
        blocks = random_blocks(rng, format, (rows, 768))
        matrix = repacked(blocks, format, format, 768)
        back = blocks_of_packed(matrix.data, format, rows, 768, group)
        np.testing.assert_array_equal(back, blocks)


@pytest.mark.parametrize(("format", "multiple"), [("q2k", 16), ("q3k", 32), ("q4k", -1)])
def test_a_multiple_that_no_block_holds_is_refused(format: str, multiple: int) -> None:
    group = quant.MULTIPLES[format].group
    packed = np.zeros(_core.packed_bytes(format, 16, 256, group), np.uint8)
    packed[64] = multiple % 256
    with pytest.raises(CheckpointError, match=f"expected .* to .*, got {multiple}"):
        blocks_of_packed(packed, format, 16, 256, group)


@pytest.mark.parametrize(("format", "group"), OWN)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 13, 16, 30])
def test_products_are_those_of_the_wider_format(
    rng: np.random.Generator, everywhere: Everywhere, format: str, group: int, num_rows: int
) -> None:
    blocks = random_blocks(rng, format, (37, 768))
    narrow = repacked(blocks, format, format, 768)
    wide = repacked(blocks, format, TYPES[format][2], 768)
    assert narrow.group == wide.group == group
    assert narrow.data.size < 0.7 * wide.data.size
    assert_same_bits(_core.unpack(narrow), _core.unpack(wide))
    x = rng.standard_normal((num_rows, 768)).astype(np.float32)
    expected = reference.linear(x, narrow)
    for got, from_wide in everywhere(lambda: (ops.linear(x, narrow), ops.linear(x, wide))):
        assert_same_bits(got, expected)
        assert_same_bits(from_wide, expected)


@pytest.mark.parametrize(("format", "group"), MULTIPLES)
@pytest.mark.parametrize("fill", [0, 255])
def test_extreme_codes_and_multiples(
    everywhere: Everywhere, format: str, group: int, fill: int
) -> None:
    """The largest integers that can meet: no instruction set may saturate or overflow."""
    packed = _core.aligned_empty(_core.packed_bytes(format, 16, 256, group))
    packed[:] = fill
    packed[64 : 64 + 16 * 256 // group] = 128  # a multiple of -128
    packed[:64] = np.full(32, 0.75, np.float16).view(np.uint8)
    matrix = _core.Matrix(packed, format, 16, 256, group)
    x = np.ones((18, 256), np.float32)
    x[1, ::2] = -1.0
    expected = reference.linear(x, matrix)
    for got in everywhere(lambda: ops.linear(x, matrix)):
        assert_same_bits(got, expected)


@pytest.mark.parametrize(("format", "group"), OWN)
@pytest.mark.parametrize("unit", [np.inf, -np.inf, np.nan])
def test_a_unit_that_is_no_number_is_named(
    rng: np.random.Generator, format: str, group: int, unit: float
) -> None:
    type, places, wide = TYPES[format]
    for at in places:
        blocks = random_blocks(rng, format, (20, 512))
        start = QUANTISED[type].nbytes + at
        blocks[18, start : start + 2] = np.array([unit], np.float16).view(np.uint8)
        for into in (format, wide):
            packed = _core.aligned_empty(_core.packed_bytes(into, 20, 512, group))
            with pytest.raises(CheckpointError, match=r"index \[18, 256\]"):
                _core.repack_gguf(blocks, TYPE_IDS[type], 512, into, group, packed)
            with pytest.raises(ShapeError, match=f"expected {packed.size} bytes to fill"):
                _core.repack_gguf(blocks, TYPE_IDS[type], 512, into, group, packed[:-1])


@pytest.mark.parametrize(("format", "group"), MULTIPLES)
def test_nothing_is_rounded_to_them(rng: np.random.Generator, format: str, group: int) -> None:
    w = rng.standard_normal((16, 256)).astype(np.float32)
    with pytest.raises(ConfigError, match=f"not rounded to format {format}"):
        _core.pack(w, format, group)
    numbers = w[:, : 256 // group].copy()
    minimums = numbers if quant.MULTIPLES[format].has_minimum else None
    with pytest.raises(ConfigError, match=f"{format} holds no codes with a float scale"):
        _core.pack_codes(np.zeros((16, 256), np.int8), numbers, minimums, format, group)
    with pytest.raises(ConfigError, match="no groups of 64"):
        _core.packed_bytes(format, 16, 256, 64)
