"""The search for a group's scale in plain NumPy: the specification of the native `_core.quantise`.

Plain packing (`quant.py`) takes the scale that the group's largest weight gives. Here several
scales are tried and the one with the smallest sum of weighed squared errors stays. Every step is
one operation of float32 in a fixed order, so that any instruction set finds the same bytes.

A squared error counts the importance of its input. Where that is not known it counts
sqrt(m + w * w), with w the weight and m the mean square of its group: a trained model's few large
inputs tend to meet its large weights.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import quant
from headrace.arrays import Bytes, Float32
from headrace.errors import CheckpointError, ConfigError

SEARCH_VERSION = 1
"""Raised with every change of the bytes that the search finds: a conversion that another version
began cannot be finished by this one.
"""
SEARCHED = ("q4", "q8", "mxfp4")
"""Formats whose scales are searched."""
Q4_DIVISORS = (-8.0, *(-t / 4 for t in range(24, 39) if t != 32))
"""Where the largest weight may land: on the format's last code first, then from -6 to -9.5."""
Q8_DIVISORS = (127.0, *(float(t) for t in range(120, 135) if t != 127))
NUM_REFITS = 2
LARGEST_F16 = 65504.0


def quantise(
    w: npt.NDArray[Any], format: str, group: int, importance: Float32 | None = None
) -> Bytes:
    """Pack weights with searched scales.

    Of equally good scales the earliest stays: the plain one, the others in ascending order, then
    the best of them fitted to its own codes, NUM_REFITS times.

    Args:
        w: [N, K] float32, float16, or uint16 holding bfloat16.
        format: q4, q8 or mxfp4.
        group: inputs per scale.
        importance: [K], each >= 0; what a squared error of that input counts. None:
            errors count by the size of their weights.

    Returns:
        uint8, laid out as `quant.pack` does.

    Raises:
        CheckpointError: a weight is NaN or infinite.
        ConfigError: the format has no search.
    """
    if format not in SEARCHED:
        raise ConfigError(f"no search for format `{format}`\nexpected q4, q8 or mxfp4")
    values = quant.widen(quant.pad(w, group))
    if not np.isfinite(values).all():
        raise CheckpointError("weight cannot be packed: it is not finite")
    groups = values.reshape(values.shape[0], -1, group)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        codes, scales = (_e2m1 if format == "mxfp4" else _integers)(
            groups, _counts(groups, importance), format
        )
    return quant.lay_out(codes.reshape(values.shape), scales, format, group)


def _integers(
    groups: Float32, counts: Float32, format: str
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    low, high = (-8.0, 7.0) if format == "q4" else (-127.0, 127.0)
    first = np.abs(groups).argmax(axis=2)[..., None]
    largest = np.take_along_axis(groups, first, axis=2)[..., 0]
    if format == "q8":
        largest = np.abs(largest)

    def codes_of(scales: Float32) -> Float32:
        quotient = groups * _inverse(scales)[..., None]
        rounded: Float32 = np.rint(_inside(quotient, low, high))
        return rounded

    divisors = Q4_DIVISORS if format == "q4" else Q8_DIVISORS
    tried = (_to_f16(largest / np.float32(divisor)) for divisor in divisors)
    best = next(tried)
    least = _error(groups, counts, codes_of(best), best)
    for _ in range(len(divisors) - 1 + NUM_REFITS):
        scales = next(tried, None)
        if scales is None:
            scales = _fitted(groups, counts, codes_of(best), best)
        error = _error(groups, counts, codes_of(scales), scales)
        best, least = np.where(error < least, scales, best), np.where(error < least, error, least)
    return codes_of(best).astype(np.int8), best.astype(np.float16)


def _e2m1(
    groups: Float32, counts: Float32, format: str
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
    largest = np.abs(groups).max(axis=2).astype(np.float64)
    _, exponent = np.frexp(largest)
    plain = np.where(largest == 0, -127, exponent - 3)

    def codes_of(exponents: Any) -> Any:
        # [N, groups, group] codes; of two equally near values the even code wins.
        inverse = np.ldexp(np.float32(1), -exponents)[..., None]
        scaled = np.minimum(np.abs(groups * inverse), np.float32(6)).astype(np.float64)
        penalty = np.arange(8) % 2 * 1e-12
        codes = (np.abs(scaled[..., None] - quant.E2M1) + penalty).argmin(axis=-1)
        return np.where((groups < 0) & (codes != 0), codes | 8, codes)

    def values_of(codes: Any) -> Float32:
        signs = np.where(codes >= 8, -1, 1).astype(np.float32)
        values: Float32 = signs * quant.E2M1[codes & 7].astype(np.float32)
        return values

    def error_of(exponents: Any) -> Float32:
        scales = np.ldexp(np.float32(1), exponents)
        return _error(groups, counts, values_of(codes_of(exponents)), scales)

    best = np.clip(plain, -127, 127)
    least = error_of(best)
    for step in (1, -1):
        exponents = np.clip(plain + step, -127, 127)
        error = error_of(exponents)
        better = error < least
        best, least = np.where(better, exponents, best), np.where(better, error, least)
    return codes_of(best).astype(np.int8), (best + 127).astype(np.uint8)


def _counts(groups: Float32, importance: Float32 | None) -> Float32:
    """What a squared error of each weight counts, [N, groups, group]."""
    if importance is not None:
        padded = np.ones(groups.shape[1:], np.float32)
        padded.reshape(-1)[: len(importance)] = importance
        return np.broadcast_to(padded, groups.shape)
    squares = np.zeros(groups.shape[:2], np.float32)
    for k in range(groups.shape[2]):
        squares = squares + groups[:, :, k] * groups[:, :, k]
    mean = squares / np.float32(groups.shape[2])
    counts: Float32 = np.sqrt(mean[..., None] + groups * groups)
    return counts


def _error(groups: Float32, counts: Float32, codes: Float32, scales: Float32) -> Float32:
    """Sum over a group, in the order of inputs, of counts times squared difference."""
    error = np.zeros(scales.shape, np.float32)
    for k in range(groups.shape[2]):
        difference = groups[:, :, k] - codes[:, :, k] * scales
        error = error + (counts[:, :, k] * difference) * difference
    return error


def _fitted(groups: Float32, counts: Float32, codes: Float32, scales: Float32) -> Float32:
    """The scale with the least error for these codes; the same one where all are zero."""
    products = squares = np.zeros(scales.shape, np.float32)
    for k in range(groups.shape[2]):
        part = counts[:, :, k] * codes[:, :, k]
        products = products + part * groups[:, :, k]
        squares = squares + part * codes[:, :, k]
    return _to_f16(np.where(squares > 0, products / squares, scales))


def _inverse(scales: Float32) -> Float32:
    one = np.float32(1)
    return np.where(scales != 0, one / np.where(scales != 0, scales, one), np.float32(0))


def _inside(values: Any, low: float, high: float) -> Any:
    """Into low..high; what does not compare is `high`, as the vector instructions have it."""
    values = np.where(values > np.float32(low), values, np.float32(low))
    return np.where(values < np.float32(high), values, np.float32(high))


def _to_f16(scales: Any) -> Float32:
    inside = _inside(scales, -LARGEST_F16, LARGEST_F16)
    rounded: Float32 = inside.astype(np.float16).astype(np.float32) + np.float32(0)
    return rounded
