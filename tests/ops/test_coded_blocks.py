"""Blocks of types that share a packed format with others, from and back to packed matrices."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import _core
from headrace.checkpoint.gguf_blocks import (
    QUANTISED,
    blocks_of_packed,
    dequantize,
    is_held_type,
    packed_format,
    remembered_type,
)
from headrace.checkpoint.gguf_coded_blocks import ENCODERS
from headrace.checkpoint.gguf_header import BLOCK_TYPES
from headrace.errors import CheckpointError

TYPE_IDS = {type.name: id for id, type in BLOCK_TYPES.items()}
BLOCKS = {type.name: type for type in BLOCK_TYPES.values()}
ROWS, COLS = 21, 512


def random_rows(rng: np.random.Generator, type: str) -> np.ndarray:
    """Blocks of any codes, with a small scale and minimum."""
    block = BLOCKS[type]
    raw = rng.integers(0, 256, (ROWS * COLS // block.block, block.nbytes), np.uint8)
    numbers = rng.normal(0, 0.01, (len(raw), 2)).astype("<f2").view(np.uint8)
    wide = 4 if type in ("Q4_1", "Q5_1") else 2
    raw[:, :wide] = numbers[:, :wide]
    return raw.reshape(ROWS, -1)


def packed(rows: np.ndarray, type: str) -> np.ndarray:
    format, group = packed_format(type)
    data = _core.aligned_empty(_core.packed_bytes(format, ROWS, COLS, group))
    _core.repack_gguf(rows, TYPE_IDS[type], COLS, format, group, data)
    return data


@pytest.mark.parametrize("type", ENCODERS)
def test_blocks_come_back(type: str) -> None:
    rows = random_rows(np.random.default_rng(5), type)
    back = blocks_of_packed(packed(rows, type), packed_format(type)[0], ROWS, COLS, 32, type)
    if type == "IQ4_XS":  # several units may give the same scales: the values are what is kept
        np.testing.assert_array_equal(dequantize(back, type), dequantize(rows, type))
    else:
        np.testing.assert_array_equal(back, rows)


def test_scales_of_nothing_and_of_one_sign_come_back() -> None:
    """IQ4_XS: blocks whose scales are all 0, or whose largest multiple is not -32."""
    rows = random_rows(np.random.default_rng(6), "IQ4_XS").reshape(-1, 136)
    rows[0, 2:8] = [0xAA, 0xAA, 0, 0, 0, 0]  # all multiples are 0
    rows[1, :2] = 0  # the unit is
    rows[2, 2:8] = [0xAA, 0xAA, 0x11, 0x11, 0x11, 0x11]  # all are 1
    rows[3, 2:8] = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]  # all are 31
    rows = rows.reshape(ROWS, -1)
    back = blocks_of_packed(packed(rows, "IQ4_XS"), "q8f", ROWS, COLS, 32, "IQ4_XS")
    np.testing.assert_array_equal(dequantize(back, "IQ4_XS"), dequantize(rows, "IQ4_XS"))


@pytest.mark.parametrize(("held", "said"), [("Q5_0", "IQ4_NL"), ("IQ4_NL", "Q5_0")])
def test_codes_of_another_type_are_refused(held: str, said: str) -> None:
    data = packed(random_rows(np.random.default_rng(7), held), held)
    with pytest.raises(CheckpointError, match=f"not made of blocks of {said}"):
        blocks_of_packed(data, "q8f", ROWS, COLS, 32, said)


def test_a_format_tells_its_type_or_the_type_is_remembered() -> None:
    told = {packed_format(type) for type in QUANTISED if remembered_type(type) is None}
    assert len(told) == len(QUANTISED) - len(ENCODERS)
    for type in ENCODERS:
        assert packed_format(type) not in told
        assert is_held_type(type, *packed_format(type))
    assert not is_held_type("Q5_1", "q8f", 32)
    assert not is_held_type("Q8_0", "q8", 32)
    assert not is_held_type(7, "q8f", 32)
