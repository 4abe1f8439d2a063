"""Formats with multiples (docs/format.md) laid out as GGUF's blocks of 256 values, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes
from headrace.errors import CheckpointError
from headrace.quant import SUPER_INPUTS, SuperCodes, super_codes

SUPER_TYPES: Mapping[str, str] = {
    "q2k": "Q2_K",
    "q3k": "Q3_K",
    "q4k": "Q4_K",
    "q5k": "Q5_K",
    "q6k": "Q6_K",
}
"""The tensor type that each format was made for."""
_MULTIPLES = {"q2k": (0, 15), "q3k": (-32, 31), "q4k": (0, 63), "q5k": (0, 63), "q6k": (-128, 127)}
"""The least and the largest multiple that a block has bits for."""


def super_blocks_of_packed(packed: Bytes, format: str, rows: int, cols: int) -> Bytes:
    """Lay a packed matrix out as rows of blocks.

    Args:
        packed: [n] uint8, as docs/format.md describes it.
        format: a key of `SUPER_TYPES`.
        rows: N.
        cols: K, a multiple of 256.

    Returns:
        [N, row bytes] uint8.

    Raises:
        CheckpointError: a multiple that the type's blocks do not hold.
    """
    if cols % SUPER_INPUTS:
        raise AssertionError(f"no {SUPER_TYPES[format]} of rows of {cols} values")
    held = super_codes(packed, format, rows, cols)
    for multiples in (held.multiples, held.minimum_multiples):
        if multiples is not None:
            _check_multiples(multiples, format)
    return _ENCODERS[format](held).reshape(rows, -1)


def _check_multiples(multiples: npt.NDArray[np.int8], format: str) -> None:
    least, largest = _MULTIPLES[format]
    outside = multiples[(multiples < least) | (multiples > largest)]
    if outside.size:
        raise CheckpointError(
            f"a multiple of a scale that no block of {SUPER_TYPES[format]} holds\n"
            f"expected {least} to {largest}, got {outside[0]}"
        )


def _halves(units: npt.NDArray[np.float16] | None) -> Bytes:
    """[N, blocks] to the bytes of each block's unit, [n, 2]."""
    assert units is not None
    return np.ascontiguousarray(units).astype("<f2").view(np.uint8).reshape(-1, 2)


def _negative(units: npt.NDArray[np.float16] | None) -> Bytes:
    """The same of minimums, which the file subtracts."""
    assert units is not None
    return _halves(np.negative(units))


def _whole(multiples: npt.NDArray[np.int8] | None, count: int) -> Bytes:
    """[N, groups] to those of each block, [n, count]."""
    assert multiples is not None
    return np.ascontiguousarray(multiples).view(np.uint8).reshape(-1, count)


def _bits(parts: npt.NDArray[Any], bits: int) -> Bytes:
    """Join small numbers [n, 8 / bits, m] in bytes [n, m], the first in the lowest bits."""
    joined = np.zeros((len(parts), parts.shape[2]), np.uint8)
    for i in range(8 // bits):
        joined |= parts[:, i] << np.uint8(i * bits)
    return joined


def _six_bits(held: SuperCodes) -> Bytes:
    """Eight multiples of scales and of minimums, six bits each: [n, 12]."""
    scales, minimums = _whole(held.multiples, 8), _whole(held.minimum_multiples, 8)
    return np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            minimums[:, :4] | (minimums[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4,
        ],
        axis=1,
    )


def _nibble_pairs(codes: Bytes) -> Bytes:
    """Four chunks of two runs of 32 codes, a run in the low nibbles of 32 bytes: [n, 128]."""
    low = (codes & 15).reshape(-1, 4, 2, 32)
    pairs: Bytes = (low[:, :, 0] | low[:, :, 1] << 4).astype(np.uint8)
    return pairs.reshape(-1, 128)


def _crumbs(codes: Bytes) -> Bytes:
    """The lowest two bits of 256 codes, those of inputs i + 32 j of each half together: [n, 64]."""
    quarters = (codes & 3).reshape(-1, 4, 32)
    return _bits(quarters, 2).reshape(-1, 64)


def _q2_k(held: SuperCodes) -> Bytes:
    multiples = _whole(held.multiples, 16) | _whole(held.minimum_multiples, 16) << 4
    codes = _crumbs(held.codes)
    return np.concatenate(
        [multiples, codes, _halves(held.units), _negative(held.minimum_units)], axis=1
    )


def _q3_k(held: SuperCodes) -> Bytes:
    scales = _whole(held.multiples, 16) + np.uint8(32)
    low = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    high = _bits((scales >> 4).reshape(-1, 4, 4), 2)
    third = _bits((held.codes >> 2).reshape(-1, 8, 32), 1)
    return np.concatenate([third, _crumbs(held.codes), low, high, _halves(held.units)], axis=1)


def _q4_k(held: SuperCodes) -> Bytes:
    units = [_halves(held.units), _negative(held.minimum_units)]
    return np.concatenate([*units, _six_bits(held), _nibble_pairs(held.codes)], axis=1)


def _q5_k(held: SuperCodes) -> Bytes:
    units = [_halves(held.units), _negative(held.minimum_units)]
    fifth = _bits((held.codes >> 4).reshape(-1, 8, 32), 1)
    return np.concatenate([*units, _six_bits(held), fifth, _nibble_pairs(held.codes)], axis=1)


def _q6_k(held: SuperCodes) -> Bytes:
    quarters = held.codes.reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    high = _bits((quarters >> 4).reshape(-1, 4, 32), 2)
    scales = _whole(held.multiples, 16)
    return np.concatenate(
        [low.reshape(-1, 128), high.reshape(-1, 64), scales, _halves(held.units)], axis=1
    )


_ENCODERS: Mapping[str, Callable[[SuperCodes], Bytes]] = {
    "q2k": _q2_k,
    "q3k": _q3_k,
    "q4k": _q4_k,
    "q5k": _q5_k,
    "q6k": _q6_k,
}
