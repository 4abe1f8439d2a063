"""Quantised matrices of Hugging Face checkpoints, as integer codes with their scales.

A matrix `X.weight` [N, K] is stored as several tensors. `find_quantised` says from headers which
matrices those are and which packed format holds them without loss; `Quantised.decode` gives the
codes. What is quantised is told by the tensors, not by the config's list of exceptions; the config
says only how to read them.

Source:
    The FP8 blocks of DeepSeek-V3's published weights; the packing of compressed-tensors, AutoAWQ's
    GEMM kernels and GPTQ's version 1 and 2 files; the unified checkpoints of TensorRT Model
    Optimizer; the OCP microscaling formats, version 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace import _core
from headrace.arrays import Bytes, Float32
from headrace.checkpoint.base import Matrix, TensorInfo, to_float32
from headrace.checkpoint.hf_quant_config import FP8_TILE, read_method, require_known
from headrace.checkpoint.records import FLOAT_FORMATS
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import check_finite, read_range
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.quant import e4m3_to_float

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word, lowest first, is this one of the word's eight outputs."""
_PACKED_GROUPS = {"q4f": (32, 64), "q4a": (32, 64), "q8f": (16,), "mxfp4": (32,), "f8": (128,)}
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_SUFFIXES = {
    "fp8": ("weight", "weight_scale_inv"),
    "pack-quantized": ("weight_packed", "weight_scale"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mxfp4-pack-quantized": ("weight_packed", "weight_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
}
"""Method -> tensors that a quantised matrix always has, the one that names it last."""
_OTHERS = (
    "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale",
    "activation_scale",
)  # fmt: skip
_FACTORS = {
    "nvfp4": ("weight_global_scale", "divides"),
    "modelopt": ("weight_scale_2", "multiplies"),
}
"""Family of methods -> the number that all scales of a matrix share, and what it does to them."""
_CODE_TYPES = ("F8_E4M3", "U8")
"""No weight is of these without scales."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Quantised:
    """A matrix in codes, and the packed format that it becomes."""

    name: str
    method: str
    parts: Mapping[str, TensorEntry]
    """By the last part of their names."""
    shape: tuple[int, int]
    format: str
    group: int
    stored_group: int
    """Inputs that share a scale in the file."""
    zero_offset: int = 0
    """Added to a stored zero point."""

    @property
    def family(self) -> str:
        """The method without what its name says of the packing."""
        return self.method.split("-")[0]

    @property
    def factor_entry(self) -> TensorEntry | None:
        """Where the number lies that all scales share, if there is one."""
        return self.parts[_FACTORS[self.family][0]] if self.family in _FACTORS else None

    @property
    def factor_use(self) -> str:
        """What that number does to scales: "multiplies" or "divides"; else "none"."""
        return _FACTORS[self.family][1] if self.family in _FACTORS else "none"

    def info(self) -> TensorInfo:
        """Describe the matrix in memory."""
        nbytes = _core.packed_bytes(self.format, *self.shape, self.group)
        return TensorInfo(self.format, self.group, self.shape, nbytes)

    def load(self) -> Matrix:
        """Read and pack the matrix.

        Raises:
            CheckpointError: a file is short, a scale is NaN or infinite, or groups are permuted.
        """
        codes, scales, minimums = self.decode({n: _read(e) for n, e in self.parts.items()})
        data = _core.pack_codes(codes, scales, minimums, self.format, self.group, self.name)
        return Matrix(data, self.format, *self.shape, self.group)

    def values(self) -> Float32:
        """Read the real numbers, [N, K] float32; as `load`."""
        return _core.unpack(self.load())

    def decode(self, arrays: Arrays) -> tuple[np.ndarray, Float32, Float32 | None]:
        """Return codes [N, K] and, per group of the packed format, scales and minimums.

        Args:
            arrays: the stored tensors; floating ones as float32, e4m3 as its bits.
        """
        with np.errstate(all="ignore"):  # packing refuses the NaN or infinity that comes of it
            codes, scales, zeros = getattr(self, "_" + self.family)(arrays)
        scales = self._spread(scales)
        minimums = None if zeros is None else -self._spread(zeros) * scales
        return np.ascontiguousarray(codes[:, : self.shape[1]]), scales, minimums

    def _spread(self, values: np.ndarray) -> Float32:
        """Repeat values of the file's groups for the packed format's smaller ones."""
        num_groups = -(-self.shape[1] // self.group)
        wide = np.repeat(values, self.stored_group // self.group, axis=1)[:, :num_groups]
        return np.ascontiguousarray(wide, np.float32)

    def _fp8(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, None]:
        scales = np.repeat(arrays["weight_scale_inv"], FP8_TILE, axis=0)[: self.shape[0]]
        return arrays["weight"], scales, None

    def _pack(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        self._require_plain_order(arrays.get("weight_g_idx"))
        codes, scales = _nibbles(arrays["weight_packed"]), arrays["weight_scale"]
        if "weight_zero_point" not in arrays:
            return codes.view(np.int8) - np.int8(8), scales, None
        zeros = _nibbles(arrays["weight_zero_point"].T).T[: self.shape[0]]
        return codes, scales, zeros

    def _nvfp4(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, None]:
        scales = e4m3_to_float(arrays["weight_scale"]) / arrays["weight_global_scale"].reshape(())
        return _TWICE_E2M1[_nibbles(arrays["weight_packed"])], scales * np.float32(0.5), None

    def _modelopt(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, None]:
        scales = e4m3_to_float(arrays["weight_scale"]) * arrays["weight_scale_2"].reshape(())
        return _TWICE_E2M1[_nibbles(arrays["weight"])], scales * np.float32(0.5), None

    def _mxfp4(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, None]:
        return _nibbles(arrays["weight_packed"]), _powers(arrays["weight_scale"]), None

    def _awq(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes, zeros = _awq_columns(arrays["qweight"]), _awq_columns(arrays["qzeros"])
        return codes.T, arrays["scales"].T, zeros.T

    def _gptq(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._require_plain_order(arrays["g_idx"])
        codes = _nibbles(arrays["qweight"].T)
        zeros = _nibbles(arrays["qzeros"]).T.astype(np.float32) + self.zero_offset
        return codes, arrays["scales"].T, zeros

    def _require_plain_order(self, group_of_input: np.ndarray | None) -> None:
        if group_of_input is None:
            return
        expected = np.arange(self.shape[1]) // self.stored_group
        if not np.array_equal(group_of_input.reshape(-1), expected):
            raise UnsupportedModelError(
                f"inputs are not in the order of their groups (act-order): g_idx of {self.name}\n"
                f"expected input j in group j // {self.stored_group}\n"
                "hint: use a checkpoint that was quantised without desc_act"
            )


def find_quantised(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    experts: re.Pattern[str] | None = None,
) -> tuple[dict[str, Quantised], dict[str, TensorEntry]]:
    """Split a checkpoint's tensors into quantised matrices and plain tensors.

    Args:
        config: of the checkpoint; without `quantization_config` nothing is quantised.
        tensors: of all files.
        experts: matches the weights of experts. Of these nothing but headers is read: they are
            many, and their shapes are held against each other.

    Returns:
        Matrices by the name of their weight, and all tensors that belong to none.

    Raises:
        UnsupportedModelError: a method, or an option of it, that is not read.
        CheckpointError: a matrix lacks a part, or a part has another shape than the rest asks.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return {}, dict(tensors)
    if isinstance(settings, dict) and settings.get("quant_method") == "mxfp4":
        require_known(settings, "mxfp4")
        return {}, dict(tensors)  # only fused experts are in codes (`hf_fused_ranges`): gpt-oss
    method, zero_offset = read_method(settings)
    needed = _SUFFIXES[method]
    key = needed[0] if method in ("awq", "gptq") else needed[1]
    modules = {n.removesuffix("." + key) for n in tensors if n.endswith("." + key)}
    found, rest = {}, {}
    for module in sorted(modules):
        parts = {s: tensors[n] for s in {*needed, *_OTHERS} if (n := f"{module}.{s}") in tensors}
        for suffix in needed:
            if suffix not in parts:
                raise CheckpointError(
                    f"tensor is missing: {module}.{suffix}\n"
                    f"expected it beside {parts[key].name}, file {parts[key].path}"
                )
        name = module + ".weight"
        is_expert = experts is not None and experts.fullmatch(name) is not None
        stated = None if is_expert else _stated_cols(parts)
        found[name] = _describe(name, method, parts, zero_offset, stated)
    taken = {entry.name for matrix in found.values() for entry in matrix.parts.values()}
    rest = {name: entry for name, entry in tensors.items() if name not in taken}
    for name, entry in rest.items():
        if name.endswith(".weight") and entry.dtype in _CODE_TYPES:
            raise CheckpointError(
                f"tensor is missing: {name.removesuffix('weight')}{needed[1]}\n"
                f"expected it beside {name}, which is {entry.dtype}, file {entry.path}"
            )
    return found, rest


def _stated_cols(parts: Mapping[str, TensorEntry]) -> int | None:
    """The inputs that a matrix states beside its codes, which may pad them; None if it does not."""
    if "weight_shape" not in parts:
        return None
    codes, entry = parts["weight_packed"], parts["weight_shape"]
    stated = tuple(int(n) for n in _read(entry))
    if not any(stated):
        return None  # a model that is only planned: headers and no data
    rows, cols = codes.shape if len(codes.shape) == 2 else (0, 0)
    if len(stated) != 2 or stated[0] != rows or not 8 * cols - 8 < stated[1] <= 8 * cols:
        raise CheckpointError(
            f"stated shape does not fit the codes: {entry.name}, file {codes.path}\n"
            f"expected [{rows}, {8 * cols}], got {list(stated)}"
        )
    return stated[1]


def _describe(
    name: str,
    method: str,
    parts: Mapping[str, TensorEntry],
    zero_offset: int,
    stated_cols: int | None,
) -> Quantised:
    codes = parts[_SUFFIXES[method][0]]
    _require_type(
        codes,
        {"fp8": "F8_E4M3", "modelopt": "U8"}.get(method) or ("U8" if "fp4" in method else "I32"),
    )
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise CheckpointError(
            f"tensor has the wrong shape: {codes.name}, file {codes.path}\n"
            f"expected two non-zero dimensions, got {list(codes.shape)}"
        )
    scale = parts["scales" if method in ("awq", "gptq") else _SUFFIXES[method][1]]
    rows, cols = codes.shape
    num_groups = scale.shape[-1] if scale.shape else 0
    shape, format = (rows, cols), "f8"
    if method in ("awq", "gptq"):
        shape = (8 * cols, rows) if method == "awq" else (cols, 8 * rows)
        num_groups, format = (scale.shape or (0,))[0], "q4a"
    elif method == "pack-quantized":
        shape = rows, stated_cols or 8 * cols
        format = "q4a" if "weight_zero_point" in parts else "q4f"
    elif method != "fp8":
        shape, format = (rows, 2 * cols), "q8f" if "mxfp4" not in method else "mxfp4"
    stored = FP8_TILE if method == "fp8" else shape[1] // max(num_groups, 1)
    group = max((g for g in _PACKED_GROUPS[format] if stored and stored % g == 0), default=0)
    if not group or (method != "fp8" and stored * num_groups != shape[1]):
        raise UnsupportedModelError(
            f"groups of {shape[1]} / {num_groups} inputs are not supported: {scale.name}, file "
            f"{scale.path}\nexpected multiples of {_PACKED_GROUPS[format][0]}"
        )
    matrix = Quantised(name, method, parts, shape, format, group, stored, zero_offset)
    _check_shapes(matrix, -(-shape[1] // stored))
    return matrix


def _check_shapes(matrix: Quantised, num_groups: int) -> None:
    rows, cols = matrix.shape
    expected: dict[str, tuple[tuple[int, ...], ...]] = {
        "weight_scale": ((rows, num_groups),),
        "weight_scale_inv": ((-(-rows // FP8_TILE), num_groups),),
        "weight_zero_point": ((-(-rows // 8), num_groups),),
        "weight_global_scale": ((1,), ()),
        "weight_scale_2": ((1,), ()),
        "weight_g_idx": ((cols,),),
        "g_idx": ((cols,),),
        "scales": ((num_groups, rows),),
        "qzeros": ((num_groups, rows // 8),),
    }
    coded = {"nvfp4": "F8_E4M3", "modelopt": "F8_E4M3", "mxfp4": "U8"}
    types = {"weight_scale": coded.get(matrix.family, "float"),
             "weight_scale_inv": "scale", "weight_zero_point": "I32", "weight_g_idx": "I32",
             "g_idx": "I32", "qzeros": "I32", "scales": "float", "weight_global_scale": "F32",
             "weight_scale_2": "F32"}  # fmt: skip
    for suffix, shapes in expected.items():
        entry = matrix.parts.get(suffix)
        if entry is None:
            continue
        if entry.shape not in shapes:
            raise CheckpointError(
                f"tensor has the wrong shape: {entry.name}, file {entry.path}\n"
                f"expected {list(shapes[0])} for a matrix [{rows}, {cols}], got "
                f"{list(entry.shape)}"
            )
        _require_type(entry, types[suffix])


def _require_type(entry: TensorEntry, expected: str) -> None:
    allowed = {"float": tuple(FLOAT_FORMATS), "scale": (*FLOAT_FORMATS, "F8_E8M0", "U8")}
    if entry.dtype not in allowed.get(expected, (expected,)):
        raise UnsupportedModelError(
            f"tensor has dtype {entry.dtype}: {entry.name}, file {entry.path}\n"
            f"expected {' or '.join(allowed.get(expected, (expected,)))}"
        )


def _read(entry: TensorEntry) -> np.ndarray:
    data: Bytes = np.empty(entry.nbytes, np.uint8)
    read_range(entry.path, entry.offset, data)
    if entry.dtype in FLOAT_FORMATS:
        check_finite(data, FLOAT_FORMATS[entry.dtype], entry.name, entry.path)
        return to_float32(data, FLOAT_FORMATS[entry.dtype]).reshape(entry.shape)
    if entry.name.endswith("weight_scale_inv"):
        return _powers(data).reshape(entry.shape)
    types = {"I32": "<u4", "I64": "<i8"}
    return data.view(types.get(entry.dtype, "u1")).reshape(entry.shape)


def _powers(exponents: np.ndarray) -> Float32:
    """E8M0: the power of two, and NaN for 255, which packing refuses."""
    bits = np.where(exponents == 0, 1 << 22, exponents.astype(np.uint32) << 23)
    return np.where(exponents == 255, 0x7FC00000, bits).astype(np.uint32).view(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The codes of each row, low nibble first: [R, bytes] or words -> [R, K] uint8."""
    data = np.ascontiguousarray(packed).view(np.uint8)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def _awq_columns(packed: np.ndarray) -> np.ndarray:
    nibbles = _nibbles(packed).reshape(len(packed), -1, 8)
    columns = np.empty_like(nibbles)
    columns[:, :, AWQ_COLUMNS] = nibbles
    return columns.reshape(len(packed), -1)
