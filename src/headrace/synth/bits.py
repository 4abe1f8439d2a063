"""Random weights made as bits, without a detour over float32: a gigabyte in about a second.

Weights have zero mean. Codes come from one pool of random bytes, read at a random place for each
matrix: two matrices share values at a shift, which neither arithmetic nor drives can tell.
"""

from collections.abc import Callable

import numpy as np

from headrace.arrays import Bytes, UInt16

POOL_BYTES = 16 << 20
Q4_CODE_STD = 4.18
"""Of codes uniform over -7..7 with 0 twice as likely."""
Q8_CODE_STD = 73.3
"""Of codes uniform over -127..127."""
E2M1_CODE_STD = 2.92
"""Of the sixteen e2m1 values, each equally likely."""
BF16_STD = 1.2
"""Of values with a random sign, one of two exponents and a random mantissa: 0.5..2 in magnitude."""
PIECE_BYTES = 1 << 18
_SCALE_JITTER = 0.25


def generator(*key: int) -> np.random.Generator:
    """Return a generator that depends on the numbers of `key` only."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))


class BitSource:
    """Random packed matrices; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        """Fill the pools."""
        raw = np.random.SFC64(np.random.SeedSequence([seed, 1])).random_raw(POOL_BYTES // 8)
        pool = raw.view(np.uint8)
        self._bytes = pool
        self._q4 = _table(lambda b: (b & 15 or 8) | (b >> 4 or 8) << 4)[pool]
        self._q8 = _table(lambda b: b if b != 0x80 else 0)[pool]
        values = raw.view(np.uint16)
        self._bf16 = (values & 0x807F) | (126 + (values >> 7 & 1) << 7).astype(np.uint16)
        jitter = generator(seed, 2).uniform(1 - _SCALE_JITTER, 1 + _SCALE_JITTER, 1 << 20)
        self._jitter = jitter.astype(np.float32).view(np.uint8)

    def _take(self, pool: Bytes, rng: np.random.Generator, out: Bytes) -> None:
        """Fill `out` [..., n] with pieces of a pool, each from a random place.

        One long run would repeat the pool, and equal rows of a head make equal scores.
        """
        flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, np.uint8)
        for at in range(0, len(flat), PIECE_BYTES):
            num = min(PIECE_BYTES, len(flat) - at)
            begin = int(rng.integers((len(pool) - num) // 16 + 1)) * 16
            flat[at : at + num] = pool[begin : begin + num]
        if not out.flags.c_contiguous:
            out[...] = flat.reshape(out.shape)

    def packed(
        self, rng: np.random.Generator, format: str, group: int, rows: int, cols: int, std: float
    ) -> Bytes:
        """Make a packed matrix.

        Args:
            rng: decides which part of the pools is used.
            format: "q4", "q8", "mxfp4", "bf16" or "f32".
            group: inputs per scale; 1 for bf16 and f32.
            rows: a multiple of 16.
            cols: a multiple of `group`.
            std: standard deviation of the weights; mxfp4 and floats take the nearest power of two.

        Returns:
            [rows / 16, cols / group, bytes of a group] uint8.
        """
        if rows % 16 or cols % group:
            raise AssertionError(f"no packed matrix of [{rows}, {cols}] with group {group}")
        shape = (rows // 16, cols // group)
        if format == "bf16":
            return self.rows(rng, rows, cols, std).view(np.uint8).reshape(*shape, 32)
        if format == "f32":
            wide = self.rows(rng, rows, cols, std).astype(np.uint32) << np.uint32(16)
            return wide.view(np.uint8).reshape(*shape, 64)
        code_bytes = group * 16 if format == "q8" else group * 8
        scale_bytes = 16 if format == "mxfp4" else 32
        out = np.empty((*shape, code_bytes + scale_bytes), np.uint8)
        pool = {"q4": self._q4, "q8": self._q8, "mxfp4": self._bytes}[format]
        self._take(pool, rng, out[..., :code_bytes])
        if format == "mxfp4":
            out[..., code_bytes:] = 127 + round(np.log2(std / E2M1_CODE_STD))
            return out
        jitter = np.empty((*shape, 64), np.uint8)
        self._take(self._jitter, rng, jitter)
        base = std / (Q4_CODE_STD if format == "q4" else Q8_CODE_STD)
        scales = (jitter.view(np.float32) * np.float32(base)).astype(np.float16)
        out[..., code_bytes:] = scales.view(np.uint8)
        return out

    def rows(self, rng: np.random.Generator, rows: int, cols: int, std: float) -> UInt16:
        """Make a row-major bf16 matrix; `std` is rounded to BF16_STD times a power of two.

        Returns:
            [rows, cols] uint16, bit patterns of bfloat16.
        """
        out = np.empty(rows * cols * 2, np.uint8)
        self._take(self._bf16.view(np.uint8), rng, out)
        # A power of two moves the exponent and leaves every other bit.
        shift = round(np.log2(std / BF16_STD))
        bits = out.view(np.uint16)
        bits += np.uint16(shift << 7 & 0xFFFF)
        return bits.reshape(rows, cols)


def _table(change: Callable[[int], int]) -> Bytes:
    return np.array([change(b) for b in range(256)], np.uint8)
