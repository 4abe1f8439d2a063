"""The packed weight formats in plain NumPy: quantise, pack, lay foreign codes out, read back.

The specification and oracle of the native `_core.pack` and `_core.pack_codes`; slow, and used by
tests and reference ops only. The layout is defined in native/kernels/format.h; the tests demand
equal bytes from both.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes, Float32
from headrace.errors import CheckpointError, ConfigError

BLOCK_OUTPUTS = 16
FLOATING = {"f32": 4, "f16": 2, "bf16": 2}
NIBBLES = ("q4", "mxfp4", "q4f", "q4a")
"""Formats of which two codes share a byte."""
WITH_MINIMUM = ("q8a", "q4a")
SUPER_INPUTS = 256


@dataclass(frozen=True)
class Multiples:
    """A format whose scales are int8 multiples of a float16 unit of 256 inputs."""

    low_bits: int
    """Of a code; they lie apart from the others."""
    high_bits: int
    offset: int
    """What a code has too much."""
    group: int
    has_minimum: bool


MULTIPLES = {
    "q2k": Multiples(2, 0, 0, 16, True),
    "q3k": Multiples(2, 1, 4, 16, False),
    "q4k": Multiples(4, 0, 0, 32, True),
    "q5k": Multiples(4, 1, 0, 32, True),
    "q6k": Multiples(4, 2, 32, 16, False),
    "q6ka": Multiples(4, 2, 32, 16, True),
}

# Bytes of the scales, and minimums, of 16 outputs.
_SCALE_BYTES = {
    "q8": 32, "q4": 32, "mxfp4": 16, "q8f": 64, "q8a": 128, "q4f": 64, "q4a": 128, "f8": 64,
}  # fmt: skip

# e2m1 values by code; the integer kernels use their doubles with half the scale.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True)
class SuperCodes:
    """A matrix [N, K] as a format of `MULTIPLES` holds it, K a multiple of 256.

    Real value = (codes - offset) * (units * multiples) + minimum_units * minimum_multiples.
    """

    codes: Bytes
    """[N, K]"""
    multiples: npt.NDArray[np.int8]
    """[N, K / group]"""
    units: npt.NDArray[np.float16]
    """[N, K / 256]"""
    minimum_multiples: npt.NDArray[np.int8] | None
    minimum_units: npt.NDArray[np.float16] | None


@dataclass(frozen=True)
class Codes:
    """A quantised matrix as integers: real value = codes * scales + minimums, by group."""

    codes: npt.NDArray[
        np.int8
    ]  # [N, Kp], Kp = K padded to whole groups; mxfp4: doubled e2m1 values
    scales: Float32  # [N, Kp / group]
    group: int
    minimums: Float32 | None = None  # [N, Kp / group]

    @property
    def values(self) -> Float32:
        """[N, Kp] float32, rounded after the product and after the sum."""
        scales = np.repeat(self.scales, self.group, axis=1)
        products = self.codes.astype(np.float32) * scales
        if self.minimums is None:
            return products
        return products + np.repeat(self.minimums, self.group, axis=1)


def bf16_to_float(bits: npt.NDArray[np.uint16]) -> Float32:
    """Widen bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """Round finite float32 to bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(w: npt.NDArray[Any]) -> Float32:
    """Float32 values of float32, float16, or uint16 holding bfloat16."""
    return bf16_to_float(w) if w.dtype == np.uint16 else w.astype(np.float32)


def group_bytes(format: str, group: int) -> int:
    """Bytes of one group of 16 outputs."""
    if format in FLOATING:
        return BLOCK_OUTPUTS * FLOATING[format]
    if format not in _SCALE_BYTES:
        raise ConfigError(f"unknown weight format `{format}`")
    return _code_bytes(format, group) + _SCALE_BYTES[format]


def _code_bytes(format: str, group: int) -> int:
    return group * BLOCK_OUTPUTS // (2 if format in NIBBLES else 1)


def packed_bytes(format: str, rows: int, cols: int, group: int) -> int:
    """Bytes of a packed matrix [rows, cols]."""
    group = 1 if format in FLOATING else group
    blocks = -(-rows // BLOCK_OUTPUTS)
    if format in MULTIPLES:
        return blocks * -(-cols // SUPER_INPUTS) * _super_bytes(MULTIPLES[format])
    return blocks * -(-cols // group) * group_bytes(format, group)


def quantise(w: npt.NDArray[Any], format: str, group: int) -> tuple[npt.NDArray[np.int8], Any]:
    """Round weights to codes and scales.

    Args:
        w: [N, K], K a multiple of group.
        format: q8, q4 or mxfp4.
        group: inputs that share a scale.

    Returns:
        Codes [N, K] int8 (mxfp4: the e2m1 code, 0..15) and scales [N, K/group], float16 or uint8.

    Raises:
        CheckpointError: a weight is NaN or infinite.

    Source:
        OCP Microscaling Formats v1.0, section 6.3, for mxfp4.
    """
    values = widen(w)
    if not np.isfinite(values).all():
        raise CheckpointError("weight cannot be packed: it is not finite")
    groups = values.reshape(values.shape[0], -1, group)
    if format == "mxfp4":
        return _quantise_mxfp4(groups)
    if format == "q4":
        first = np.abs(groups).argmax(axis=2, keepdims=True)
        scales = (np.take_along_axis(groups, first, axis=2) / np.float32(-8)).astype(np.float16)
        low, high = -8.0, 7.0
    else:
        largest = np.abs(groups).max(axis=2, keepdims=True)
        scales = (largest / np.float32(127)).astype(np.float16)
        low, high = -127.0, 127.0
    wide = scales.astype(np.float32)
    quotient = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
    codes = np.rint(np.clip(quotient, np.float32(low), np.float32(high))).astype(np.int8)
    return codes.reshape(values.shape), scales[:, :, 0]


def _quantise_mxfp4(groups: Float32) -> tuple[npt.NDArray[np.int8], Bytes]:
    largest = np.abs(groups).max(axis=2).astype(np.float64)
    _, exponent = np.frexp(largest)  # largest = m * 2^exponent, m in [0.5, 1)
    exponent = np.where(largest == 0, -127, np.clip(exponent - 1 - 2, -127, 127))
    scaled = np.ldexp(np.abs(groups).astype(np.float64), -exponent[:, :, None])
    # Distance to every value; of two equally near ones the even code wins.
    penalty = np.arange(8) % 2 * 1e-12
    codes = (np.abs(np.minimum(scaled, 6.0)[..., None] - E2M1) + penalty).argmin(axis=-1)
    codes = np.where((groups < 0) & (codes != 0), codes | 8, codes)
    flat = codes.reshape(groups.shape[0], -1).astype(np.int8)
    return flat, (exponent + 127).astype(np.uint8)


def e4m3_to_float(bits: Bytes) -> Float32:
    """Widen e4m3 numbers without infinities, exactly.

    The bits in the places of a float16's are a 256th of the number, subnormal numbers included. The
    codes of NaN, which no packed matrix holds, come out as +-480.

    Source:
        OCP 8-bit Floating Point Specification (OFP8), revision 1.0.
    """
    halves = (bits.view(np.int8).astype(np.int16) << 7) & np.int16(-0x4001)
    return halves.view(np.float16).astype(np.float32) * np.float32(256)


def pad(w: npt.NDArray[Any], group: int) -> npt.NDArray[Any]:
    """Fill weights up with zeros to whole blocks of outputs and whole groups of inputs."""
    rows, cols = w.shape
    return np.pad(w, ((0, -rows % BLOCK_OUTPUTS), (0, -cols % group)))


def pack(w: npt.NDArray[Any], format: str, group: int) -> Bytes:
    """Lay weights [N, K] out as the kernels read them; quantised formats round them first."""
    if format in FLOATING:
        values = widen(pad(w, 1))
        narrow = {
            "f32": lambda v: v,
            "f16": lambda v: v.astype(np.float16),
            "bf16": float_to_bf16,
        }[format](values)
        blocks = narrow.reshape(-1, BLOCK_OUTPUTS, narrow.shape[1]).transpose(0, 2, 1)
        return np.frombuffer(blocks.tobytes(), np.uint8)
    codes, scales = quantise(pad(w, group), format, group)
    return lay_out(codes, scales, format, group)


def lay_out(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], format: str, group: int
) -> Bytes:
    """Put codes [N, K] and scales [N, K/group], both padded, where the kernels read them."""
    return _join(_place(codes, format, group), [scales])


def pack_codes(
    codes: npt.NDArray[Any], scales: Float32, minimums: Float32 | None, format: str, group: int
) -> Bytes:
    """Lay codes out that come from elsewhere; nothing is rounded.

    Args:
        codes: [N, K] one byte each. q8, q8f and q8a: -128..127; q4 and q4f: -8..7; q4a: 0..15;
            mxfp4: the e2m1 code, 0..15; f8: an e4m3 number's bits.
        scales: [N, ceil(K / group)], such as the format holds exactly.
        minimums: the same, of q8a and q4a; None for the others.
        format: of the packed matrix.
        group: inputs that share a scale.

    Returns:
        The packed bytes.

    Raises:
        CheckpointError: a code or a scale that the format does not hold.
    """
    _check_codes(codes, format)
    rows = -codes.shape[0] % BLOCK_OUTPUTS
    no_scale = 2.0**-127 if format == "mxfp4" else 0.0
    scales = np.pad(scales, ((0, rows), (0, 0)), constant_values=np.float32(no_scale))
    with np.errstate(all="ignore"):
        if format in ("q8", "q4"):
            stored: npt.NDArray[Any] = scales.astype(np.float16)
            is_held = np.isfinite(scales) & (stored.astype(np.float32) == scales)
        elif format == "mxfp4":
            mantissa, exponent = np.frexp(scales)
            stored = (exponent + 126).astype(np.uint8)
            is_held = (mantissa == 0.5) & (exponent >= -126)
        else:
            stored = scales
            is_held = np.isfinite(scales) & ((np.abs(scales) < 2.0**119) | (format != "f8"))
    tails = [stored]
    if minimums is not None:
        is_held &= np.isfinite(np.pad(minimums, ((0, rows), (0, 0))))
        tails.append(np.pad(minimums, ((0, rows), (0, 0))))
    if not is_held.all():
        raise CheckpointError(f"scale cannot be packed: format {format} does not hold it")
    return _join(_place(pad(codes, group), format, group), tails)


def pack_multiples(source: SuperCodes, format: str) -> Bytes:
    """Lay out what a format of `MULTIPLES` holds; nothing is rounded."""
    kind = MULTIPLES[format]
    rows = -source.codes.shape[0] % BLOCK_OUTPUTS

    num_supers = source.units.shape[1]

    def by_output(numbers: npt.NDArray[Any]) -> Bytes:
        """[N, S * n], S the super-groups of a row, to [block, S, bytes], outputs innermost."""
        padded = np.pad(numbers, ((0, rows), (0, 0)))
        supers = padded.reshape(-1, BLOCK_OUTPUTS, num_supers, padded.shape[1] // num_supers)
        laid_out = np.ascontiguousarray(supers.transpose(0, 2, 3, 1))
        return laid_out.view(np.uint8).reshape(len(supers), num_supers, -1)

    no_units = np.zeros_like(source.units)
    parts = [
        by_output(source.units),
        by_output(no_units if source.minimum_units is None else source.minimum_units),
        by_output(source.multiples),
    ]
    if source.minimum_multiples is not None:
        parts.append(by_output(source.minimum_multiples))
    vectors = _place(np.pad(source.codes, ((0, rows), (0, 0))), "q8", SUPER_INPUTS)
    parts.append(_join_bits(vectors, kind.low_bits))
    parts.append(_join_bits(vectors >> np.uint8(kind.low_bits), kind.high_bits))
    return np.concatenate(parts, axis=2).reshape(-1)


def _join_bits(vectors: Bytes, bits: int) -> Bytes:
    """The low bits of bytes of vectors [block, super-group, byte], 8 / bits vectors together."""
    if bits == 0:
        return vectors[:, :, :0]
    together = vectors.reshape(*vectors.shape[:2], -1, 8 // bits, 64) & np.uint8((1 << bits) - 1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    joined: Bytes = np.bitwise_or.reduce(together << shifts, axis=3)
    return joined.reshape(*vectors.shape[:2], -1)


def _split_bits(plane: Bytes, bits: int) -> Bytes:
    """Undo `_join_bits`."""
    if bits == 0:
        return np.zeros((*plane.shape[:2], SUPER_INPUTS * BLOCK_OUTPUTS), np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    apart = plane.reshape(*plane.shape[:2], -1, 1, 64) >> shifts
    vectors: Bytes = apart & np.uint8((1 << bits) - 1)
    return vectors.reshape(*plane.shape[:2], -1)


def _super_bytes(kind: Multiples) -> int:
    numbers = SUPER_INPUTS // kind.group * (2 if kind.has_minimum else 1)
    bits = kind.low_bits + kind.high_bits
    return BLOCK_OUTPUTS * (4 + numbers + SUPER_INPUTS * bits // 8)


def super_codes(packed: Bytes, format: str, rows: int, cols: int) -> SuperCodes:
    """What a packed matrix [rows, cols] of a format of `MULTIPLES` holds, with padding columns."""
    kind = MULTIPLES[format]
    num_blocks, num_supers = -(-rows // BLOCK_OUTPUTS), -(-cols // SUPER_INPUTS)
    parts = packed.reshape(num_blocks, num_supers, -1)
    groups = SUPER_INPUTS // kind.group
    sizes = [32, 32, groups * 16, groups * 16 * kind.has_minimum]
    sizes.append(SUPER_INPUTS * 2 * kind.low_bits)
    units, minimum_units, multiples, minimum_multiples, low, high = (
        np.ascontiguousarray(part) for part in np.split(parts, np.cumsum(sizes), axis=2)
    )

    def by_row(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[block, super-group, n * 16], outputs innermost, to [N, super-groups * n]."""
        split = numbers.reshape(num_blocks, num_supers, -1, BLOCK_OUTPUTS)
        return split.transpose(0, 3, 1, 2).reshape(num_blocks * BLOCK_OUTPUTS, -1)[:rows]

    joined = _split_bits(high, kind.high_bits) << np.uint8(kind.low_bits)
    joined |= _split_bits(low, kind.low_bits)
    vectors = joined.reshape(num_blocks, num_supers, SUPER_INPUTS // 4, BLOCK_OUTPUTS, 4)
    integers = vectors.transpose(0, 3, 1, 2, 4).reshape(num_blocks * BLOCK_OUTPUTS, -1)[:rows]
    return SuperCodes(
        integers,
        by_row(multiples.view(np.int8)),
        by_row(units.view(np.float16)),
        by_row(minimum_multiples.view(np.int8)) if kind.has_minimum else None,
        by_row(minimum_units.view(np.float16)) if kind.has_minimum else None,
    )


def _multiple_codes(packed: Bytes, format: str, rows: int, cols: int) -> Codes:
    """`codes` of a format of `MULTIPLES`."""
    kind = MULTIPLES[format]
    held = super_codes(packed, format, rows, cols)
    groups = SUPER_INPUTS // kind.group

    def numbers(units: npt.NDArray[np.float16], multiples: npt.NDArray[np.int8]) -> Float32:
        products: Float32 = np.repeat(units.astype(np.float32), groups, axis=1) * multiples
        return products

    minimums = None
    if held.minimum_units is not None and held.minimum_multiples is not None:
        minimums = numbers(held.minimum_units, held.minimum_multiples)
    integers = held.codes.astype(np.int8) - np.int8(kind.offset)
    return Codes(integers, numbers(held.units, held.multiples), kind.group, minimums)


def _check_codes(codes: npt.NDArray[Any], format: str) -> None:
    wide = codes.view(np.int8)
    low, high = {"q4": (-8, 7), "q4f": (-8, 7), "q4a": (0, 15), "mxfp4": (0, 15)}.get(
        format, (-128, 127)
    )
    is_held = (wide >= low) & (wide <= high)
    if format == "f8":
        is_held = (codes.view(np.uint8) & 0x7F) != 0x7F
    if not is_held.all():
        raise CheckpointError(f"code cannot be packed: format {format} does not hold it")


def _place(codes: npt.NDArray[Any], format: str, group: int) -> Bytes:
    """The code bytes of [N, Kp] codes: [block, group, byte]."""
    num_blocks = codes.shape[0] // BLOCK_OUTPUTS
    if format == "f8":
        numbers = codes.view(np.uint8).reshape(num_blocks, BLOCK_OUTPUTS, -1, group)
        return numbers.transpose(0, 2, 3, 1).reshape(num_blocks, -1, group * BLOCK_OUTPUTS)
    # [block, group, vector, output, input of four]
    vectors = codes.reshape(num_blocks, BLOCK_OUTPUTS, -1, group // 4, 4).transpose(0, 2, 3, 1, 4)
    if format in NIBBLES:
        offset = 8 if format in ("q4", "q4f") else 0
        nibbles = (vectors + offset).astype(np.uint8)
        body: npt.NDArray[Any] = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4
    else:
        body = vectors.astype(np.int8).view(np.uint8)
    return body.reshape(*body.shape[:2], -1)


def _join(body: Bytes, tails: list[npt.NDArray[Any]]) -> Bytes:
    """Groups of code bytes, each followed by what `tails` [N, Kp / group] hold for it."""
    num_blocks, num_groups = body.shape[:2]
    parts = [body]
    for tail in tails:
        by_group = tail.reshape(num_blocks, BLOCK_OUTPUTS, -1).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(by_group).view(np.uint8))
    joined = np.concatenate([p.reshape(num_blocks, num_groups, -1) for p in parts], axis=2)
    return np.ascontiguousarray(joined).reshape(-1)


def codes(packed: Bytes, format: str, rows: int, cols: int, group: int) -> Codes:
    """Read a packed quantised matrix back as integers and scales, padding columns included."""
    if format in MULTIPLES:
        return _multiple_codes(packed, format, rows, cols)
    num_blocks = -(-rows // BLOCK_OUTPUTS)
    num_groups = -(-cols // group)
    parts = packed.reshape(num_blocks, num_groups, -1)
    num_code_bytes = _code_bytes(format, group)
    body = parts[:, :, :num_code_bytes]
    tail = np.ascontiguousarray(parts[:, :, num_code_bytes:])
    if format in NIBBLES:
        halves = body.reshape(num_blocks, num_groups, -1, 1, 64)
        nibbles = np.concatenate([halves & 15, halves >> 4], axis=3)
        if format == "mxfp4":
            vectors: npt.NDArray[Any] = _E2M1_DOUBLED[nibbles]
        else:
            vectors = nibbles.astype(np.int8) - (0 if format == "q4a" else 8)
    else:
        vectors = np.ascontiguousarray(body).view(np.int8)
    vectors = vectors.astype(np.int8).reshape(num_blocks, num_groups, group // 4, 16, 4)
    integers = vectors.transpose(0, 3, 1, 2, 4).reshape(num_blocks * 16, -1)
    if format == "mxfp4":
        scales = np.ldexp(np.float32(1), tail.astype(np.int32) - 128)
    elif format in ("q8", "q4"):
        scales = tail.view(np.float16).astype(np.float32)
    else:
        scales = tail.view(np.float32)

    def by_output(numbers: Float32) -> Float32:
        flat = numbers.transpose(0, 2, 1).reshape(num_blocks * 16, num_groups)
        return flat[:rows].astype(np.float32)

    minimums = by_output(scales[:, :, 16:]) if format in WITH_MINIMUM else None
    return Codes(integers[:rows].copy(), by_output(scales[:, :, :16]), group, minimums)


def _unpack_f8(packed: Bytes, rows: int, cols: int, group: int) -> Float32:
    num_blocks, num_groups = -(-rows // BLOCK_OUTPUTS), -(-cols // group)
    parts = packed.reshape(num_blocks, num_groups, -1)
    bits = np.ascontiguousarray(parts[:, :, : group * BLOCK_OUTPUTS])
    numbers = e4m3_to_float(bits).reshape(num_blocks, num_groups, group, BLOCK_OUTPUTS)
    scales = np.ascontiguousarray(parts[:, :, group * BLOCK_OUTPUTS :]).view(np.float32)
    values = (numbers * scales[:, :, None, :]).transpose(0, 3, 1, 2)
    return values.reshape(num_blocks * BLOCK_OUTPUTS, -1)[:rows, :cols].copy()


def unpack(packed: Bytes, format: str, rows: int, cols: int, group: int) -> Float32:
    """Real values [rows, cols] of a packed matrix."""
    if format in FLOATING:
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[format]
        blocks = packed.view(dtype).reshape(-1, cols, BLOCK_OUTPUTS).transpose(0, 2, 1)
        return widen(np.ascontiguousarray(blocks).reshape(-1, cols)[:rows])
    if format == "f8":
        return _unpack_f8(packed, rows, cols, group)
    return codes(packed, format, rows, cols, group).values[:, :cols].copy()
