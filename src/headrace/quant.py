"""The packed weight formats in plain NumPy: quantise, pack, read back.

The specification and oracle of the native `_core.pack`; slow, and used by tests and reference ops
only. The layout is defined in native/kernels/format.h; the tests demand equal bytes from both.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes, Float32
from headrace.errors import CheckpointError, ConfigError

BLOCK_OUTPUTS = 16
QUANTISED = ("q8", "q4", "mxfp4")
FLOATING = {"f32": 4, "f16": 2, "bf16": 2}

# e2m1 values by code; the integer kernels use their doubles with half the scale.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True)
class Codes:
    """A quantised matrix as integers: real value = codes * scales of the code's group."""

    codes: npt.NDArray[
        np.int8
    ]  # [N, Kp], Kp = K padded to whole groups; mxfp4: doubled e2m1 values
    scales: Float32  # [N, Kp / group]
    group: int

    @property
    def values(self) -> Float32:
        """[N, Kp] float32, rounded once."""
        scales = np.repeat(self.scales, self.group, axis=1)
        return self.codes.astype(np.float32) * scales


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
    sizes = {"q8": group * 16 + 32, "q4": group * 8 + 32, "mxfp4": group * 8 + 16}
    if format not in sizes:
        raise ConfigError(f"unknown weight format `{format}`")
    return sizes[format]


def packed_bytes(format: str, rows: int, cols: int, group: int) -> int:
    """Bytes of a packed matrix [rows, cols]."""
    group = 1 if format in FLOATING else group
    blocks = -(-rows // BLOCK_OUTPUTS)
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
    shape = (codes.shape[0] // BLOCK_OUTPUTS, BLOCK_OUTPUTS, -1, group // 4, 4)
    # [block, group, vector, output, input of four]
    vectors = codes.reshape(shape).transpose(0, 2, 3, 1, 4)
    if format == "q8":
        body: npt.NDArray[Any] = vectors.astype(np.int8).view(np.uint8)
    else:
        nibbles = (vectors + 8 if format == "q4" else vectors).astype(np.uint8)
        body = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4
    body = body.reshape(*body.shape[:2], -1)
    tail = scales.reshape(shape[0], BLOCK_OUTPUTS, -1).transpose(0, 2, 1)
    tail = np.ascontiguousarray(tail).view(np.uint8).reshape(*body.shape[:2], -1)
    return np.ascontiguousarray(np.concatenate([body, tail], axis=2)).reshape(-1)


def codes(packed: Bytes, format: str, rows: int, cols: int, group: int) -> Codes:
    """Read a packed quantised matrix back as integers and scales, padding columns included."""
    num_blocks = -(-rows // BLOCK_OUTPUTS)
    num_groups = -(-cols // group)
    parts = packed.reshape(num_blocks, num_groups, -1)
    body_bytes = group * BLOCK_OUTPUTS if format == "q8" else group * BLOCK_OUTPUTS // 2
    body, tail = parts[:, :, :body_bytes], np.ascontiguousarray(parts[:, :, body_bytes:])
    if format == "q8":
        vectors: npt.NDArray[Any] = np.ascontiguousarray(body).view(np.int8)
    else:
        halves = body.reshape(num_blocks, num_groups, -1, 1, 64)
        nibbles = np.concatenate([halves & 15, halves >> 4], axis=3)
        vectors = _E2M1_DOUBLED[nibbles] if format == "mxfp4" else nibbles.astype(np.int8) - 8
    vectors = vectors.astype(np.int8).reshape(num_blocks, num_groups, group // 4, 16, 4)
    integers = vectors.transpose(0, 3, 1, 2, 4).reshape(num_blocks * 16, -1)
    if format == "mxfp4":
        scales = np.ldexp(np.float32(1), tail.astype(np.int32) - 128)
    else:
        scales = tail.view(np.float16).astype(np.float32)
    scales = scales.transpose(0, 2, 1).reshape(num_blocks * 16, num_groups)
    return Codes(integers[:rows].copy(), scales[:rows].astype(np.float32), group)


def unpack(packed: Bytes, format: str, rows: int, cols: int, group: int) -> Float32:
    """Real values [rows, cols] of a packed matrix."""
    if format in FLOATING:
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[format]
        blocks = packed.view(dtype).reshape(-1, cols, BLOCK_OUTPUTS).transpose(0, 2, 1)
        return widen(np.ascontiguousarray(blocks).reshape(-1, cols)[:rows])
    return codes(packed, format, rows, cols, group).values[:, :cols].copy()
