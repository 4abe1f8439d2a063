"""Matrices in codes as other tools store them, with the values their public definitions give.

The values are computed element by element, without a function of the reader.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors_files import Tensors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Stored = tuple[Tensors, dict[str, str], np.ndarray]
"""Tensors by suffix, their dtypes where NumPy has none, and the values [N, K] float32."""


def _e4m3(bits: int) -> float:
    sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, int(bits) >> 3 & 15, int(bits) & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def _words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack eight codes of the last axis into a word; nibble i holds code order[i]."""
    groups = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(groups.shape[:-1], np.uint32)
    for i, column in enumerate(order):
        words |= groups[..., column] << np.uint32(4 * i)
    return words.view(np.int32)


def _fp8(rng: np.random.Generator, n: int, k: int, e8m0: bool = False) -> Stored:
    bits = rng.integers(0, 256, (n, k), np.uint8)
    bits[(bits & 127) == 127] = 0  # NaN
    tiles = (-(-n // 128), -(-k // 128))
    exponents = rng.integers(118, 122, tiles, np.uint8)
    scales = (0.01 * rng.random(tiles)).astype(np.float32)
    if e8m0:
        scales = (2.0 ** (exponents.astype(np.float64) - 127)).astype(np.float32)
    values = np.array([_e4m3(b) for b in bits.reshape(-1)], np.float32).reshape(n, k)
    for i in range(n):
        for j in range(0, k, 128):
            values[i, j : j + 128] *= scales[i // 128, j // 128]
    stored = {"weight": bits, "weight_scale_inv": exponents if e8m0 else scales}
    dtypes = {"weight": "F8_E4M3"} | ({"weight_scale_inv": "F8_E8M0"} if e8m0 else {})
    return stored, dtypes, values


def _int4(
    rng: np.random.Generator, n: int, k: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = rng.integers(0, 16, (n, k), np.uint8)
    zeros = rng.integers(0, 16, (n, k // group), np.uint8)
    return codes, zeros, (0.02 * rng.random((n, k // group)) + 0.001).astype(np.float16)


def _affine(codes: np.ndarray, zeros: Any, scales: np.ndarray, group: int) -> np.ndarray:
    wide = np.repeat(scales.astype(np.float64), group, axis=1)
    shifted = codes.astype(np.float64) - np.repeat(np.broadcast_to(zeros, scales.shape), group, 1)
    return shifted * wide


def _packed(rng: np.random.Generator, n: int, k: int, group: int, symmetric: bool) -> Stored:
    codes, zeros, scales = _int4(rng, n, k, group)
    stored = {
        "weight_packed": _words(codes), "weight_scale": scales,
        "weight_shape": np.array([n, k], np.int64),
    }  # fmt: skip
    if not symmetric:
        stored["weight_zero_point"] = np.ascontiguousarray(_words(zeros.T).T)
    return stored, {}, _affine(codes, 8 if symmetric else zeros, scales, group)


def _awq(rng: np.random.Generator, n: int, k: int, group: int) -> Stored:
    codes, zeros, scales = _int4(rng, n, k, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": _words(np.ascontiguousarray(codes.T), order),
        "qzeros": _words(np.ascontiguousarray(zeros.T), order),
        "scales": np.ascontiguousarray(scales.T),
    }
    return stored, {}, _affine(codes, zeros, scales, group)


def _gptq(rng: np.random.Generator, n: int, k: int, group: int, offset: int) -> Stored:
    codes, zeros, scales = _int4(rng, n, k, group)
    stored = {
        "qweight": np.ascontiguousarray(_words(codes).T),
        "qzeros": _words(np.ascontiguousarray(zeros.T)),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(k) // group).astype(np.int32),
    }
    return stored, {}, _affine(codes, zeros.astype(np.float64) + offset, scales, group)


def _modelopt(rng: np.random.Generator, n: int, k: int) -> Stored:
    codes, bits = (
        rng.integers(0, 16, (n, k), np.uint8),
        rng.integers(1, 126, (n, k // 16), np.uint8),
    )
    scales = np.array([_e4m3(b) for b in bits.reshape(-1)], np.float32).reshape(bits.shape)
    whole = np.array(rng.random() / 100 + 0.001, np.float32)
    values = np.array([_e2m1(c) for c in codes.reshape(-1)], np.float32).reshape(n, k)
    stored = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": bits,
        "weight_scale_2": whole, "input_scale": np.array(0.5, np.float32),
    }  # fmt: skip
    return stored, {"weight_scale": "F8_E4M3"}, values * np.repeat(scales * whole, 16, 1)


def _fp4(rng: np.random.Generator, n: int, k: int, is_nv: bool) -> Stored:
    codes = rng.integers(0, 16, (n, k), np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    values = np.array([_e2m1(c) for c in codes.reshape(-1)], np.float32).reshape(n, k)
    group = 16 if is_nv else 32
    if is_nv:
        bits = rng.integers(1, 126, (n, k // group), np.uint8)
        whole = np.array([30 + 20 * rng.random()], np.float32)
        scales = np.array([_e4m3(b) for b in bits.reshape(-1)], np.float32).reshape(bits.shape)
        stored = {"weight_packed": packed, "weight_scale": bits, "weight_global_scale": whole}
        return stored, {"weight_scale": "F8_E4M3"}, values * np.repeat(scales / whole, group, 1)
    bits = rng.integers(115, 124, (n, k // group), np.uint8)
    bits[0, 0] = 0  # 2^-127, which float32 holds as a subnormal number
    scales = (2.0 ** (bits.astype(np.float64) - 127)).astype(np.float32)
    return {"weight_packed": packed, "weight_scale": bits}, {}, values * np.repeat(scales, group, 1)


def compressed(format: str) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
Make = Callable[[np.random.Generator, int, int], Stored]
CASES: dict[str, tuple[dict[str, Any], Make, str, int]] = {
    "fp8": (FP8, _fp8, "f8", 128),
    "fp8-e8m0": (FP8, lambda r, n, k: _fp8(r, n, k, e8m0=True), "f8", 128),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _modelopt, "q8f", 16),
    "nvfp4": (
        compressed("nvfp4-pack-quantized"), lambda r, n, k: _fp4(r, n, k, True), "q8f", 16
    ),
    "mxfp4": (
        compressed("mxfp4-pack-quantized"), lambda r, n, k: _fp4(r, n, k, False), "mxfp4", 32
    ),
    "gptq_v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"}, lambda r, n, k: _gptq(r, n, k, 32, 0), "q4a", 32
    ),
}  # fmt: skip
for _group in (32, 64, 128):
    _memory = min(_group, 64)
    for _symmetric in (True, False):
        CASES[f"packed-{'sym' if _symmetric else 'asym'}-{_group}"] = (
            compressed("pack-quantized"),
            lambda r, n, k, g=_group, s=_symmetric: _packed(r, n, k, g, s),
            "q4f" if _symmetric else "q4a",
            _memory,
        )
    CASES[f"awq-{_group}"] = (AWQ, lambda r, n, k, g=_group: _awq(r, n, k, g), "q4a", _memory)
    CASES[f"gptq-{_group}"] = (GPTQ, lambda r, n, k, g=_group: _gptq(r, n, k, g, 1), "q4a", _memory)
