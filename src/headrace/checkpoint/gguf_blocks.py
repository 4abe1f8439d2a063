"""Turns rows of GGUF blocks into the real numbers they stand for, in float32.

A value is `scale * code` or `scale * code + minimum`. Scale times code fits float32's 24 bits in
every type below, so each value is rounded at most once and equals what ggml computes.

Source:
    The block structures of ggml (`ggml-common.h`), described in words in the GGUF documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

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
}
"""Bytes of a block, and the function from blocks [n, bytes] to values, in any shape of n rows."""
