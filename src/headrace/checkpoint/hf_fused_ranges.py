"""Experts fused over a layer whose gate and up are not runs of rows of one tensor.

Two layouts: MXFP4 as gpt-oss stores it, where rows of gate and up alternate, and values that stand
transposed, an input's outputs side by side. An expert is one range of each tensor; the reader takes
gate and up apart. Reads no data.

Source:
    The published files of gpt-oss; modeling_gpt_oss.py and modeling_llama4.py of transformers 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.checkpoint.records import (
    FLOAT_FORMATS,
    GATE_UP_COLUMNS,
    GATE_UP_HALVES,
    GATE_UP_ROWS,
    RecordTable,
    StoredTensor,
    make_record_layout,
)
from headrace.checkpoint.safetensors import TensorEntry
from headrace.errors import CheckpointError, UnsupportedModelError

_BLOCKS = re.compile(
    r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.\w+\.experts\."
    r"(?P<part>(?:gate_up|down)_proj_(?:blocks|scales))"
)
_VALUES = re.compile(
    r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.\w+\.experts\.(?P<part>gate_up_proj|down_proj)"
)
_BLOCK_PARTS = (
    "gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"
)  # fmt: skip
_VALUE_PARTS = ("gate_up_proj", "down_proj")
GROUP = 32
"""Values that share a scale in MXFP4."""
FusedLayers = dict[int, dict[str, TensorEntry]]
"""Layer -> part of the name -> tensor [E, ...]."""


def split_ranges(
    tensors: Mapping[str, TensorEntry],
) -> tuple[FusedLayers, dict[str, TensorEntry]]:
    """Split tensors into those of the two layouts, by layer, and all others."""
    found: FusedLayers = {}
    for pattern in (_BLOCKS, _VALUES):
        for name, entry in tensors.items():
            match = pattern.fullmatch(name)
            if match is not None:
                found.setdefault(int(match["layer"]), {})[match["part"]] = entry
    layers = {n: parts for n, parts in sorted(found.items()) if _is_ours(parts)}
    taken = {entry.name for parts in layers.values() for entry in parts.values()}
    return layers, {name: entry for name, entry in tensors.items() if name not in taken}


def _is_ours(parts: Mapping[str, TensorEntry]) -> bool:
    """Whether tensors are in codes, or transposed: [E, D, 2F] and [E, F, D]."""
    if not set(parts) <= set(_VALUE_PARTS):
        return True
    shapes = [parts[part].shape for part in _VALUE_PARTS if part in parts]
    if len(shapes) != 2 or any(len(shape) != 3 for shape in shapes):
        return False  # said by who reads rows
    both, down = shapes
    return both[1] == down[2] and both[2] == 2 * down[1]


def make_fused_table(
    fused: FusedLayers, layers: Sequence[int], num_experts: int | None, columns_alternate: bool
) -> RecordTable:
    """Describe the experts of `layers`.

    Args:
        fused: what `split_ranges` found.
        layers: of the table, ascending.
        num_experts: as the config says, or None to take the first layer's number.
        columns_alternate: of transposed values: gate and up alternate, and do not follow one
            another, within an input's outputs.

    Raises:
        CheckpointError: a tensor is missing, or its shape or dtype is not what the first layer's
            tensors ask.
        UnsupportedModelError: values that are not bf16, f16 or f32.
    """
    first = fused[layers[0]]
    is_coded = _BLOCK_PARTS[0] in first or _BLOCK_PARTS[2] in first
    names = _BLOCK_PARTS if is_coded else _VALUE_PARTS
    for layer in layers:
        for name in names:
            if name not in fused[layer]:
                sample = next(iter(fused[layer].values()))
                raise CheckpointError(
                    f"tensor is missing: {name} of the experts of layer {layer}\n"
                    f"expected it beside {sample.name}, file {sample.path}"
                )
    num_experts, hidden, inner, dtype = _sizes(first, is_coded, num_experts)
    shapes = _shapes(num_experts, hidden, inner, is_coded)
    for layer in layers:
        for name in names:
            _check(fused[layer][name], shapes[name], dtype)
    format, group = ("mxfp4", GROUP) if is_coded else (FLOAT_FORMATS[dtype], 1)
    entries = [fused[layer][name] for layer in layers for name in names]
    paths = sorted({entry.path for entry in entries})
    grid = (len(layers), 1, len(names))
    shape = (len(layers), num_experts, len(names))
    length = np.array([e.nbytes // num_experts for e in entries], np.int64).reshape(grid)
    start = np.array([e.offset for e in entries], np.int64).reshape(grid)
    file = np.array([paths.index(e.path) for e in entries], np.int32).reshape(grid)
    experts = np.arange(num_experts, dtype=np.int64)[None, :, None]
    return RecordTable(
        files=tuple(paths),
        layers=tuple(layers),
        num_experts=num_experts,
        layouts=(make_record_layout(hidden, inner, format, group),) * len(layers),
        repack="mxfp4" if is_coded else "transposed",
        file=np.broadcast_to(file, shape).copy(),
        offset=start + experts * length,
        length=np.broadcast_to(length, shape).copy(),
        checksum=None,
        coded=_stored(is_coded, columns_alternate),
    )


def _stored(is_coded: bool, columns_alternate: bool) -> tuple[StoredTensor, ...]:
    both, group = GATE_UP_ROWS, GROUP
    kinds = {"nibbles_by_output": "f32", "scales_by_output": "e8m0"}
    if not is_coded:
        both = GATE_UP_COLUMNS if columns_alternate else GATE_UP_HALVES
        kinds, group = {"values_by_input": "f32"}, 1
    return tuple(
        StoredTensor(matrix, kind, scales, "none", group, 0)
        for matrix in (both, 2)
        for kind, scales in kinds.items()
    )


def _sizes(
    first: Mapping[str, TensorEntry], is_coded: bool, num_experts: int | None
) -> tuple[int, int, int, str]:
    """Experts, hidden and inner size, and dtype, as the tensor of gate and up has them."""
    both = first[_BLOCK_PARTS[0] if is_coded else _VALUE_PARTS[0]]
    if len(both.shape) != (4 if is_coded else 3) or 0 in both.shape:
        expected = "[experts, 2 * inner, hidden / 32, 16]"
        raise CheckpointError(
            f"tensor has the wrong shape: {both.name}, file {both.path}\n"
            f"expected {expected if is_coded else '[experts, hidden, 2 * inner]'}, "
            f"got {list(both.shape)}"
        )
    if not is_coded and both.dtype not in FLOAT_FORMATS:
        raise UnsupportedModelError(
            f"expert tensor has dtype {both.dtype}: {both.name}, file {both.path}\n"
            "expected BF16, F16 or F32"
        )
    num = both.shape[0] if num_experts is None else num_experts
    if is_coded:
        return num, GROUP * both.shape[2], both.shape[1] // 2, "U8"
    return num, both.shape[1], both.shape[2] // 2, both.dtype


def _shapes(num: int, hidden: int, inner: int, is_coded: bool) -> dict[str, tuple[int, ...]]:
    if not is_coded:
        return {"gate_up_proj": (num, hidden, 2 * inner), "down_proj": (num, inner, hidden)}
    return {
        "gate_up_proj_blocks": (num, 2 * inner, hidden // GROUP, GROUP // 2),
        "gate_up_proj_scales": (num, 2 * inner, hidden // GROUP),
        "down_proj_blocks": (num, hidden, inner // GROUP, GROUP // 2),
        "down_proj_scales": (num, hidden, inner // GROUP),
    }


def _check(entry: TensorEntry, shape: tuple[int, ...], dtype: str) -> None:
    if entry.shape != shape or entry.dtype != dtype:
        raise CheckpointError(
            f"tensor has the wrong shape or dtype: {entry.name}, file {entry.path}\n"
            f"expected {dtype} {list(shape)}, got {entry.dtype} {list(entry.shape)}"
        )
