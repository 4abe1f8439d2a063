"""Formats that hold the codes of several tensor types, laid out as the blocks of the one they came
from, bit for bit.

A packed matrix of such a format holds values, not blocks: whoever wants blocks says of which type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes, Float32
from headrace.errors import CheckpointError
from headrace.quant import Codes, codes

NON_LINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""What the nibbles of IQ4_NL and IQ4_XS stand for."""
RUN = 32
"""Inputs that share a scale in all of these types."""
_INDEX = np.full(256, 255, np.uint8)
_INDEX[NON_LINEAR.view(np.uint8)] = np.arange(16)
_LEAST_MULTIPLE, _RUNS = -32, 8
_MULTIPLES = sorted(range(_LEAST_MULTIPLE, 32), key=lambda n: (-abs(n), n))
"""Of IQ4_XS, the largest first: encoders give the run of the largest scale -32."""


def blocks_of_codes(packed: Bytes, type_name: str, format: str, rows: int, cols: int) -> Bytes:
    """Lay a packed matrix out as rows of blocks of a type that its codes came from.

    Args:
        packed: [n] uint8, as docs/format.md describes it, in groups of 32.
        type_name: a key of `ENCODERS`.
        format: that holds the type.
        rows: N.
        cols: K, a multiple of the type's block.

    Returns:
        [N, row bytes] uint8. Of IQ4_XS the values always come back; the bytes, too, where some run
        of each block has the multiple -32, as encoders make them.

    Raises:
        CheckpointError: codes or scales that no block of the type holds.
    """
    held = codes(packed, format, rows, cols, RUN)
    runs = Codes(
        held.codes.reshape(-1, RUN),
        held.scales.reshape(-1, 1),
        RUN,
        None if held.minimums is None else held.minimums.reshape(-1, 1),
    )
    return ENCODERS[type_name](runs, type_name).reshape(rows, -1)


def _require(is_held: npt.NDArray[np.bool_], values: npt.NDArray[np.generic], name: str) -> None:
    if not is_held.all():
        raise CheckpointError(
            f"a matrix was not made of blocks of {name}\n"
            f"expected codes and scales that they hold, got {values[~is_held][0]}"
        )


def _halves(values: Float32, name: str) -> Bytes:
    """[n, 1] float32 as float16: [n, 2]."""
    with np.errstate(over="ignore"):
        stored = values.astype("<f2")
    _require(stored.astype(np.float32) == values, values, name)
    return stored.view(np.uint8)


def _unsigned(held: Codes, offset: int, bits: int, name: str) -> Bytes:
    """Codes plus an offset, [n, 32], in 0 .. 2 ** bits - 1."""
    shifted = held.codes.astype(np.int16) + offset
    _require((shifted >= 0) & (shifted < 1 << bits), held.codes, name)
    return shifted.astype(np.uint8)


def _nibbles(values: Bytes) -> Bytes:
    """Low four bits, of value i with those of value i + 16: [n, 32] -> [n, 16]."""
    low, high = values[:, :16] & np.uint8(15), values[:, 16:] & np.uint8(15)
    joined: Bytes = np.bitwise_or(low, np.left_shift(high, np.uint8(4)))
    return joined


def _fifth_bits(values: Bytes) -> Bytes:
    return np.packbits(values >> 4 & 1, axis=1, bitorder="little")


def _minimums(held: Codes) -> Float32:
    assert held.minimums is not None, "formats of types with a minimum have one"
    return held.minimums


def _q4_1(held: Codes, name: str) -> Bytes:
    numbers = [_halves(held.scales, name), _halves(_minimums(held), name)]
    return np.concatenate([*numbers, _nibbles(_unsigned(held, 0, 4, name))], axis=1)


def _q5_0(held: Codes, name: str) -> Bytes:
    values = _unsigned(held, 16, 5, name)
    return np.concatenate(
        [_halves(held.scales, name), _fifth_bits(values), _nibbles(values)], axis=1
    )


def _q5_1(held: Codes, name: str) -> Bytes:
    values = _unsigned(held, 0, 5, name)
    numbers = [_halves(held.scales, name), _halves(_minimums(held), name)]
    return np.concatenate([*numbers, _fifth_bits(values), _nibbles(values)], axis=1)


def _non_linear(held: Codes, name: str) -> Bytes:
    index: Bytes = _INDEX[held.codes.view(np.uint8)]
    _require(index < 16, held.codes, name)
    return _nibbles(index)


def _iq4_nl(held: Codes, name: str) -> Bytes:
    return np.concatenate([_halves(held.scales, name), _non_linear(held, name)], axis=1)


def _iq4_xs(held: Codes, name: str) -> Bytes:
    products = held.scales.reshape(-1, _RUNS)
    unit, multiples = _units(products)
    _require(unit * multiples == products, products, name)
    shifted = (multiples.astype(np.int32) - _LEAST_MULTIPLE).astype(np.uint16)
    high = (shifted >> 4 << 2 * np.arange(_RUNS, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    low = (shifted[:, 0::2] & 15 | (shifted[:, 1::2] & 15) << 4).astype(np.uint8)
    return np.concatenate(
        [
            _halves(unit, name),
            high.astype("<u2")[:, None].view(np.uint8),
            low,
            _non_linear(held, name).reshape(len(products), -1),
        ],
        axis=1,
    )


def _units(products: Float32) -> tuple[Float32, Float32]:
    """Take apart eight scales into a float16 number and a multiple of each, -32..31.

    Args:
        products: [n, 8].

    Returns:
        [n, 1] and [n, 8]; their product differs where there are no such numbers.
    """
    largest = np.take_along_axis(products, np.abs(products).argmax(axis=1)[:, None], axis=1)
    units, multiples = largest.copy(), np.zeros_like(products)  # of blocks whose scales are all 0
    left = np.flatnonzero(largest[:, 0] != 0)
    for multiple in _MULTIPLES:
        if multiple == 0 or not len(left):
            break
        with np.errstate(all="ignore"):
            unit = (largest[left] / np.float32(multiple)).astype(np.float16).astype(np.float32)
            found = np.nan_to_num(np.rint(products[left] / unit))
            fits = (found >= _LEAST_MULTIPLE) & (found < -_LEAST_MULTIPLE)
            fits &= unit * found == products[left]
        is_found = fits.all(axis=1)
        units[left[is_found]], multiples[left[is_found]] = unit[is_found], found[is_found]
        left = left[~is_found]
    return units, multiples


ENCODERS: Mapping[str, Callable[[Codes, str], Bytes]] = {
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""By type: runs [n, 32] to blocks."""
