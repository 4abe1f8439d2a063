"""Turns rows of GGUF blocks into the real numbers they stand for, and packed matrices into blocks.

A value is `scale * code` or `scale * code + minimum`. Scale times code fits float32's 24 bits in
every type below, so each value is rounded at most once and equals what ggml computes. Packed
matrices keep their codes and scales: nothing is rounded on the way to blocks.

Source:
    The block structures of ggml (`ggml-common.h`), described in words in the GGUF documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes, Float32
from headrace.checkpoint.gguf_coded_blocks import ENCODERS, NON_LINEAR, blocks_of_codes
from headrace.checkpoint.gguf_super_blocks import SUPER_TYPES, super_blocks_of_packed
from headrace.checkpoint.records import FLOAT_FORMATS
from headrace.errors import UnsupportedModelError
from headrace.quant import SUPER_INPUTS


@dataclass(frozen=True)
class BlockCodes:
    """Rows of blocks as integers: value = codes * scales + minimums, of the code's group."""

    codes: npt.NDArray[np.int8]
    """[R, K]; of MXFP4 twice the e2m1 value."""
    scales: Float32
    """[R, K / group]; of MXFP4 half the scale."""
    minimums: Float32 | None
    """[R, K / group]; None where a type has none."""

    @property
    def values(self) -> Float32:
        """[R, K]."""
        groups = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        values = groups * self.scales[:, :, None]
        if self.minimums is not None:
            values = values + self.minimums[:, :, None]
        return values.reshape(self.codes.shape)


def block_codes(rows: Bytes, type_name: str) -> BlockCodes:
    """Take whole rows of blocks apart; the specification of the native decoders.

    Args:
        rows: [R, row bytes] uint8, C-contiguous.
        type_name: a key of `QUANTISED`.
    """
    type = QUANTISED[type_name]
    parts = type.decode(rows.reshape(-1, type.nbytes))
    minimums = None if parts.minimums is None else parts.minimums.reshape(len(rows), -1)
    return BlockCodes(
        parts.codes.astype(np.int8).reshape(len(rows), -1),
        parts.scales.astype(np.float32).reshape(len(rows), -1),
        minimums,
    )


def dequantize(rows: Bytes, type_name: str) -> Float32:
    """Compute the values of whole rows.

    Args:
        rows: [R, row bytes] uint8, C-contiguous.
        type_name: tensor type, for example `Q4_1`.

    Returns:
        [R, K] float32.

    Raises:
        UnsupportedModelError: a type that is not read here; lists those that are.
    """
    require_readable(type_name, "values")
    if type_name in QUANTISED:
        return block_codes(rows, type_name).values
    return FLOATING[type_name](rows)


def require_readable(type_name: str, what: str) -> None:
    """Raise UnsupportedModelError for a tensor type that is not read; `what` names the tensor."""
    if type_name not in QUANTISED and type_name not in FLOATING:
        raise UnsupportedModelError(
            f"GGUF type {type_name} is not supported: {what}\n"
            f"expected {', '.join((*FLOATING, *QUANTISED))}"
        )


def _half(blocks: Bytes, at: int) -> Float32:
    """The float16 at byte `at` of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles of all bytes, then high nibbles: [n, b] -> [n, 2b]."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32-bit word at byte `at`, as 16 or 0: [n, 32]."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return np.left_shift(bits, np.uint8(4))


TYPE_OF_FORMAT: Mapping[str, str] = {
    "q4": "Q4_0",
    "q8": "Q8_0",
    "mxfp4": "MXFP4",
    "bf16": "BF16",
    "f16": "F16",
    "f32": "F32",
    **SUPER_TYPES,
}
"""The tensor type that holds a packed format without loss."""
BLOCK_VALUES = 32
"""Values of a block in the quantised types that weights are rounded to."""
_OUTPUTS = 16
_VALUE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def block_values(format: str, type_name: str | None = None) -> int:
    """Values of a block of a type (None: that of `TYPE_OF_FORMAT`); a row is whole blocks."""
    if type_name in ENCODERS:
        return SUPER_INPUTS if type_name == "IQ4_XS" else BLOCK_VALUES
    if format in _VALUE_BYTES:
        return 1
    return SUPER_INPUTS if format in SUPER_TYPES else BLOCK_VALUES


def blocks_of_packed(
    packed: Bytes, format: str, rows: int, cols: int, group: int, type_name: str | None = None
) -> Bytes:
    """Lay a packed matrix out as rows of GGUF blocks, code for code.

    A scale of 64 values is written twice.

    Args:
        packed: [n] uint8, as docs/format.md describes it.
        format: a key of `TYPE_OF_FORMAT`, or one that holds `type_name`.
        rows: N.
        cols: K; a multiple of `block_values`.
        group: inputs per scale.
        type_name: the type that the codes came from, as `remembered_type` tells it.

    Returns:
        [N, row bytes] uint8.

    Raises:
        CheckpointError: codes or scales that no block of the type holds.
    """
    if type_name is not None and type_name in ENCODERS:
        return blocks_of_codes(packed, type_name, format, rows, cols)
    if format in SUPER_TYPES:
        return super_blocks_of_packed(packed, format, rows, cols)
    num_blocks = -(-rows // _OUTPUTS)
    if format in _VALUE_BYTES:
        values = packed.view(f"u{_VALUE_BYTES[format]}").reshape(num_blocks, cols, _OUTPUTS)
        plain = np.ascontiguousarray(values.transpose(0, 2, 1))
        return plain.view(np.uint8).reshape(num_blocks * _OUTPUTS, -1)[:rows]
    if cols % BLOCK_VALUES:
        raise AssertionError(f"no {TYPE_OF_FORMAT[format]} of rows of {cols} values")
    parts = packed.reshape(num_blocks, -(-cols // group), -1)
    num_code_bytes = group * _OUTPUTS // (1 if format == "q8" else 2)
    # Words of four inputs of one output: [block, run of 32 inputs, vector, output].
    words = np.ascontiguousarray(parts[:, :, :num_code_bytes]).view("<u4")
    words = words.reshape(num_blocks, -1, 8 if format == "q8" else 4, _OUTPUTS)
    codes = words if format == "q8" else _halves_apart(words)
    scales = np.ascontiguousarray(parts[:, :, num_code_bytes:])
    scales = scales.reshape(num_blocks, parts.shape[1], _OUTPUTS, -1)
    scales = np.repeat(scales, group // BLOCK_VALUES, axis=1)
    joined = np.concatenate(
        [
            scales.transpose(0, 2, 1, 3),
            np.ascontiguousarray(codes.transpose(0, 3, 1, 2)).view(np.uint8),
        ],
        axis=3,
    )[:, :, : cols // BLOCK_VALUES]
    return np.ascontiguousarray(joined).reshape(num_blocks * _OUTPUTS, -1)[:rows]


def _halves_apart(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Pair input i with input i + 16 in a byte, where a packed byte pairs i with i + 4.

    Args:
        words: [..., 4, 16], word v of inputs 8v.. in low nibbles and 8v + 4.. in high ones.

    Returns:
        [..., 4, 16], word w of inputs 4w.. in low nibbles and 4w + 16.. in high ones.
    """
    first, second = words[..., :2, :], words[..., 2:, :]
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    out = np.empty_like(words)
    out[..., 0::2, :] = (first & low) | (second & low) << 4
    out[..., 1::2, :] = (first & high) >> 4 | (second & high)
    return out


def _f32(blocks: Bytes) -> Float32:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Float32:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Float32:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0), None)


def _q4_1(blocks: Bytes) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 4:]).view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> BlockCodes:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return BlockCodes(codes.view(np.int8) - np.int8(16), _half(blocks, 0), None)


def _q5_1(blocks: Bytes) -> BlockCodes:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return BlockCodes(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> BlockCodes:
    return BlockCodes(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None)


def _two_bits(packed: Bytes) -> Bytes:
    """Element 128n + 32j + i is bits 2j of byte 32n + i: [n, 64] -> [n, 256]."""
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: Bytes = (packed.reshape(-1, 2, 1, 32) >> shift & np.uint8(3)).reshape(-1, 256)
    return codes


def _q2_k(blocks: Bytes) -> BlockCodes:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15)
    minimums = -(_half(blocks, 82) * (blocks[:, :16] >> 4))
    return BlockCodes(_two_bits(blocks[:, 16:80]).view(np.int8), scales, minimums)


def _q3_k(blocks: Bytes) -> BlockCodes:
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (packed[:, None, 8:] >> shift & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    bit = np.arange(8, dtype=np.uint8)[:, None]
    is_set = (blocks[:, None, :32] >> bit & 1).reshape(-1, 256).view(np.int8)
    codes = _two_bits(blocks[:, 32:96]).view(np.int8) - np.int8(4) * (1 - is_set)
    return BlockCodes(codes, _half(blocks, 108) * scales, None)


def _scales_and_minimums(blocks: Bytes) -> tuple[Float32, Float32]:
    """The eight 6-bit scales and minimums of Q4_K and Q5_K, times d and -dmin: [n, 8] each."""
    packed = blocks[:, 4:16]
    low, high = packed[:, 0:4], packed[:, 4:8]
    rest = packed[:, 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _pairs_of_sub_blocks(packed: Bytes) -> Bytes:
    """Four chunks of 32 bytes, each two sub-blocks by nibble: [n, 128] -> [n, 8, 32]."""
    chunks = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> BlockCodes:
    codes = _pairs_of_sub_blocks(np.ascontiguousarray(blocks[:, 16:]))
    return BlockCodes(codes.view(np.int8), *_scales_and_minimums(blocks))


def _q5_k(blocks: Bytes) -> BlockCodes:
    bit = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> bit & 1) << 4
    codes = _pairs_of_sub_blocks(np.ascontiguousarray(blocks[:, 48:])) | fifth
    return BlockCodes(codes.view(np.int8), *_scales_and_minimums(blocks))


def _q6_k(blocks: Bytes) -> BlockCodes:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3) << 4
    codes = (low | high).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return BlockCodes(codes, _half(blocks, 208) * scales, None)


_DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _iq4_nl(blocks: Bytes) -> BlockCodes:
    return BlockCodes(NON_LINEAR[_nibbles(blocks[:, 2:])], _half(blocks, 0), None)


def _iq4_xs(blocks: Bytes) -> BlockCodes:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = (high >> (2 * np.arange(8, dtype=np.uint16)) & 3) << 4
    scales = (low | high).astype(np.float32) - 32
    codes = NON_LINEAR[_nibbles(np.ascontiguousarray(blocks[:, 8:]).reshape(-1, 16))]
    return BlockCodes(codes, _half(blocks, 0) * scales, None)


def _mxfp4(blocks: Bytes) -> BlockCodes:
    with np.errstate(over="ignore"):  # 255 stands for NaN and is refused by its infinite scale
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    scales[blocks[:, :1] == 255] = np.inf
    return BlockCodes(_DOUBLED_E2M1[_nibbles(blocks[:, 1:])], scales, None)


@dataclass(frozen=True)
class QuantisedType:
    """How a quantised tensor type is read, and what holds it without loss.

    Attributes:
        nbytes: of a block.
        decode: blocks [n, nbytes] to codes, scales and minimums, in any shape of n rows.
        format: the smallest packed format that holds it.
        group: values that share a scale.
    """

    nbytes: int
    decode: Callable[[Bytes], BlockCodes]
    format: str
    group: int


QUANTISED: Mapping[str, QuantisedType] = {
    "Q4_0": QuantisedType(18, _q4_0, "q4", 32),
    "Q4_1": QuantisedType(20, _q4_1, "q4a", 32),
    "Q5_0": QuantisedType(22, _q5_0, "q8f", 32),
    "Q5_1": QuantisedType(24, _q5_1, "q8a", 32),
    "Q8_0": QuantisedType(34, _q8_0, "q8", 32),
    "Q2_K": QuantisedType(84, _q2_k, "q2k", 16),
    "Q3_K": QuantisedType(110, _q3_k, "q3k", 16),
    "Q4_K": QuantisedType(144, _q4_k, "q4k", 32),
    "Q5_K": QuantisedType(176, _q5_k, "q5k", 32),
    "Q6_K": QuantisedType(210, _q6_k, "q6k", 16),
    "IQ4_NL": QuantisedType(18, _iq4_nl, "q8f", 32),
    "IQ4_XS": QuantisedType(136, _iq4_xs, "q8f", 32),
    "MXFP4": QuantisedType(17, _mxfp4, "mxfp4", 32),
}
FLOATING: Mapping[str, Callable[[Bytes], Float32]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}


def packed_format(type_name: str) -> tuple[str, int]:
    """The smallest packed format that holds a readable tensor type without loss, and its group."""
    if type_name in FLOAT_FORMATS:
        return FLOAT_FORMATS[type_name], 1
    type = QUANTISED[type_name]
    return type.format, type.group


def remembered_type(type_name: str) -> str | None:
    """The type itself if its packed format holds other types too, and so does not tell it."""
    return type_name if type_name in ENCODERS else None


def is_held_type(type_name: object, format: str, group: int) -> bool:
    """Whether a format with a group may hold the codes of a type of `remembered_type`."""
    known = isinstance(type_name, str) and type_name in ENCODERS
    return known and packed_format(str(type_name)) == (format, group)
