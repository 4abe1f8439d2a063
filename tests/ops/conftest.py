"""Op tests run under each instruction set that this processor has, on one thread and on three."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace import _core, quant

ROUNDED = [("f32", 1), ("f16", 1), ("bf16", 1), ("q8", 32), ("q4", 32), ("q4", 64), ("mxfp4", 32)]
"""Formats that weights are rounded to, with their groups."""
KEPT = [
    ("q8f", 16), ("q8f", 32), ("q8a", 16), ("q8a", 32), ("q4f", 32), ("q4f", 64),
    ("q4a", 32), ("q4a", 64), ("f8", 32), ("f8", 128),
]  # fmt: skip
"""Formats that hold codes from elsewhere."""
MULTIPLES = [(name, kind.group) for name, kind in quant.MULTIPLES.items()]
"""Formats whose scales are multiples of a unit of 256 inputs."""
FORMATS = ROUNDED + KEPT + MULTIPLES
FLOATS = ("f32", "f16", "bf16", "f8")
MACHINES = [(isa, threads) for isa in _core.available_isas() for threads in (1, 3)]


@pytest.fixture(autouse=True)
def restored_machine() -> Iterator[None]:
    isa, threads = _core.isa(), _core.num_threads()
    yield
    _core.set_isa(isa)
    _core.set_threads(threads)


@pytest.fixture
def everywhere() -> Callable[[Callable[[], Any]], list[Any]]:
    """Calls a function under every instruction set and thread count; returns the results."""

    def run(call: Callable[[], Any]) -> list[Any]:
        results = []
        for isa, threads in MACHINES:
            _core.set_isa(isa)
            _core.set_threads(threads)
            assert _core.isa() == isa
            assert _core.num_threads() == threads
            results.append(call())
        return results

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261202)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal to the bit, the sign of zero included."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == np.float32:
        actual, expected = actual.view(np.uint32), expected.view(np.uint32)
    np.testing.assert_array_equal(actual, expected)


@dataclass(frozen=True)
class Coded:
    """Codes [N, K], scales and minimums [N, ceil(K / group)], as foreign checkpoints have them."""

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None


_CODES = {"q8f": (-128, 127), "q8a": (-128, 127), "q4f": (-8, 7), "q4a": (0, 15)}


def make_codes(w: np.ndarray, format: str, group: int) -> Coded:
    """Round weights to one of `KEPT` in the simplest way: to whole steps between the ends."""
    rows, cols = w.shape
    padded = np.zeros((rows, -(-cols // group) * group), np.float32)
    padded[:, :cols] = w
    groups = padded.reshape(rows, -1, group)
    if format == "f8":
        scales = np.abs(groups).max(axis=2) / np.float32(448) + np.float32(1e-9)
        codes = (groups / scales[:, :, None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return Coded(_rows_of(codes, cols), scales, None)
    low, high = _CODES[format]
    if format in ("q8a", "q4a"):
        least, most = groups.min(axis=2), groups.max(axis=2)
        scales = (most - least) / np.float32(high - low)
        minimums = least - scales * np.float32(low)
    else:
        scales = np.abs(groups).max(axis=2) / np.float32(high)
        minimums = np.zeros_like(scales)
    steps = np.where(scales == 0, np.float32(1), scales)[:, :, None]
    codes = np.rint((groups - minimums[:, :, None]) / steps).clip(low, high).astype(np.int8)
    return Coded(_rows_of(codes, cols), scales, minimums if format in ("q8a", "q4a") else None)


def _rows_of(codes: np.ndarray, cols: int) -> np.ndarray:
    return np.ascontiguousarray(codes.reshape(codes.shape[0], -1)[:, :cols])


def make_multiples(w: np.ndarray, format: str) -> quant.SuperCodes:
    """Round weights to a format with multiples in a simple way, which loses much."""
    kind = quant.MULTIPLES[format]
    padded = np.pad(w, ((0, 0), (0, -w.shape[1] % 256)))
    num_codes = 1 << (kind.low_bits + kind.high_bits)
    # With an offset and minimums, an odd middle: else the minimums would be nothing.
    half = np.float32(num_codes // 2 - (8 if kind.has_minimum and kind.offset else 0))
    groups = padded.reshape(len(w), -1, 256 // kind.group, kind.group)
    largest = np.abs(groups).max(axis=3)
    most = np.maximum(largest.max(axis=2, keepdims=True), np.float32(1e-6))
    multiples = np.ceil(largest / most * 31)
    units = (most / half / 31).astype(np.float16)
    scales = np.maximum(units.astype(np.float32) * multiples, np.float32(1e-9))[..., None]
    codes = np.rint(groups / scales + half).clip(0, num_codes - 1).astype(np.uint8)
    whole = multiples.astype(np.int8).reshape(len(w), -1)
    minimum_units = None
    if kind.has_minimum:
        minimum_units = (units[:, :, 0] * (kind.offset - half)).astype(np.float16)
    return quant.SuperCodes(
        codes.reshape(padded.shape),
        whole,
        units[:, :, 0],
        whole if kind.has_minimum else None,
        minimum_units,
    )


def make_matrix(w: np.ndarray, format: str, group: int) -> _core.Matrix:
    if format in quant.MULTIPLES:
        packed = _core.aligned_empty(_core.packed_bytes(format, *w.shape, group))
        packed[:] = quant.pack_multiples(make_multiples(w, format), format)
    elif (format, group) in KEPT:
        coded = make_codes(w, format, group)
        packed = _core.pack_codes(coded.codes, coded.scales, coded.minimums, format, group)
    else:
        packed = _core.pack(w, format, group)
    return _core.Matrix(packed, format, *w.shape, group)
