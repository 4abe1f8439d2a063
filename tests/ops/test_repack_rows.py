"""Rows of floats become blocks of sixteen outputs, byte for byte."""

import numpy as np
import pytest

from headrace import _core
from headrace.errors import CheckpointError

TYPES = {"bf16": np.uint16, "f16": np.uint16, "f32": np.uint32}
INFINITY = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}


def _repack(bits: np.ndarray, format: str) -> np.ndarray:
    rows, cols = bits.shape
    packed = _core.aligned_empty(_core.packed_bytes(format, rows, cols, 1))
    packed[:] = 0xAA
    _core.repack_rows(bits.reshape(-1).view(np.uint8), format, rows, cols, packed)
    return packed.view(bits.dtype).reshape(-1, cols, 16)


@pytest.mark.parametrize("format", TYPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 19, 40])
@pytest.mark.parametrize("cols", [1, 3, 8, 15, 16, 31, 32, 33, 64, 100])
def test_every_item_has_its_place(format: str, rows: int, cols: int) -> None:
    bits = np.random.default_rng(rows * 1000 + cols).integers(
        0, INFINITY[format], (rows, cols), TYPES[format]
    )
    padded = np.zeros((-(-rows // 16) * 16, cols), bits.dtype)
    padded[:rows] = bits
    expected = padded.reshape(-1, 16, cols).transpose(0, 2, 1)
    np.testing.assert_array_equal(_repack(bits, format), expected)


@pytest.mark.parametrize("format", TYPES)
def test_an_infinity_is_named_by_its_index(format: str) -> None:
    bits = np.zeros((19, 33), TYPES[format])
    bits[17, 32] = INFINITY[format]
    with pytest.raises(CheckpointError, match=f"value {17 * 33 + 32}"):
        _repack(bits, format)
