"""Turns rows of GGUF blocks into the real numbers they stand for, and packed matrices into blocks.

A value is `scale * code` or `scale * code + minimum`. Scale times code fits float32's 24 bits in
every type below, so each value is rounded at most once and equals what ggml computes. Packed
matrices keep their codes and scales: nothing is rounded on the way to blocks.

Source:
    The block structures of ggml (`ggml-common.h`), described in words in the GGUF documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes, Float32
from headrace.errors import UnsupportedModelError


def dequantize(rows: Bytes, type_name: str) -> Float32:
    """Compute the values of whole rows.

    Args:
        rows: [R, row bytes] uint8, C-contiguous.
        type_name: tensor type, for example `Q4_1`.

    Returns:
        [R, K] float32.

    Raises:
        UnsupportedModelError: the type is not among `DEQUANTIZERS`.
    """
    if type_name not in DEQUANTIZERS:
        raise UnsupportedModelError(
            f"GGUF tensor type {type_name} is not supported\n"
            f"expected one of {', '.join(DEQUANTIZERS)}"
        )
    block_bytes, function = DEQUANTIZERS[type_name]
    return function(rows.reshape(-1, block_bytes)).reshape(len(rows), -1)


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
}
"""The tensor type that holds a packed format without loss."""
BLOCK_VALUES = 32
"""Values of a row that share a scale in the quantised types of `TYPE_OF_FORMAT`."""
_OUTPUTS = 16
_VALUE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def blocks_of_packed(packed: Bytes, format: str, rows: int, cols: int, group: int) -> Bytes:
    """Lay a packed matrix out as rows of GGUF blocks, code for code.

    A scale of 64 values is written twice.

    Args:
        packed: [n] uint8, as docs/format.md describes it.
        format: a key of `TYPE_OF_FORMAT`.
        rows: N.
        cols: K; in a quantised format a multiple of 32.
        group: inputs per scale.

    Returns:
        [N, row bytes] uint8.
    """
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


def _q4_0(blocks: Bytes) -> Float32:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Float32:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Float32:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Float32:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Float32:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _scales_and_minimums(blocks: Bytes) -> tuple[Float32, Float32]:
    """The eight 6-bit scales and minimums of Q4_K and Q5_K, times d and dmin: [n, 8, 1] each."""
    packed = blocks[:, 4:16]
    low, high = packed[:, 0:4], packed[:, 4:8]
    rest = packed[:, 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minimums)[:, :, None]


def _pairs_of_sub_blocks(packed: Bytes) -> Bytes:
    """Four chunks of 32 bytes, each two sub-blocks by nibble: [n, 128] -> [n, 8, 32]."""
    chunks = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Float32:
    scales, minimums = _scales_and_minimums(blocks)
    return scales * _pairs_of_sub_blocks(blocks[:, 16:]) - minimums


def _q5_k(blocks: Bytes) -> Float32:
    scales, minimums = _scales_and_minimums(blocks)
    bit = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> bit & 1) << 4
    return scales * (_pairs_of_sub_blocks(blocks[:, 48:]) | fifth) - minimums


def _q6_k(blocks: Bytes) -> Float32:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3) << 4
    codes = (low | high).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[:, :, None] * codes


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _mxfp4(blocks: Bytes) -> Float32:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    return scales * _E2M1[_nibbles(blocks[:, 1:])]


DEQUANTIZERS: Mapping[str, tuple[int, Callable[[Bytes], Float32]]] = {
    "F32": (4, _f32),
    "F16": (2, _f16),
    "BF16": (2, _bf16),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "MXFP4": (17, _mxfp4),
}
"""Bytes of a block, and the function from blocks [n, bytes] to values, in any shape of n rows."""
