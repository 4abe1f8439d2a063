"""Experts that a Hugging Face checkpoint stores in codes: a table of several ranges per matrix.

A matrix is two to four tensors (codes, scales, zero points, the order of its groups). The reader
takes each of them as it comes and lays it out in the packed record; see `native/kernels/coded.h`.
The number that all scales of an NVFP4 matrix share is read here, when the checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.arrays import Bytes, Float32
from headrace.checkpoint.hf_quant_config import FP8_TILE
from headrace.checkpoint.hf_quantised import Quantised
from headrace.checkpoint.records import (
    EXPERT_ROLES,
    ExpertNames,
    RecordTable,
    StoredTensor,
    expert_regex,
    make_record_layout,
    require_full_set,
)
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import read_range
from headrace.errors import CheckpointError, UnsupportedModelError

CodedExperts = dict[int, dict[int, dict[str, Quantised]]]
"""Layer -> expert -> role -> matrix."""
GAP_BYTES = 1 << 16
"""Numbers no further apart in a file are read together."""
_SCALES = {
    "BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E8M0": "e8m0", "U8": "e8m0", "F8_E4M3": "e4m3",
}  # fmt: skip
_KINDS = {
    "fp8": {"weight": "bytes", "weight_scale_inv": "scales_by_tile"},
    "pack": {
        "weight_packed": "nibbles_by_output", "weight_scale": "scales_by_output",
        "weight_zero_point": "zeros_by_output", "weight_g_idx": "group_of_input",
    },
    "nvfp4": {"weight_packed": "nibbles_by_output", "weight_scale": "scales_by_output"},
    "modelopt": {"weight": "nibbles_by_output", "weight_scale": "scales_by_output"},
    "mxfp4": {"weight_packed": "nibbles_by_output", "weight_scale": "scales_by_output"},
    "awq": {
        "qweight": "nibbles_interleaved", "scales": "scales_by_group", "qzeros": "zeros_interleaved"
    },
    "gptq": {
        "qweight": "nibbles_by_input", "scales": "scales_by_group", "qzeros": "zeros_by_group",
        "g_idx": "group_of_input",
    },
}  # fmt: skip
"""Family of methods -> tensors that a reader takes, and what native calls them."""


def split_coded(
    quantised: Mapping[str, Quantised], names: ExpertNames
) -> tuple[CodedExperts, dict[str, Quantised]]:
    """Split quantised matrices into those of experts and all others."""
    regex = expert_regex(names)
    roles = {names.gate: "gate", names.up: "up", names.down: "down"}
    experts: CodedExperts = {}
    rest = {}
    for name, matrix in quantised.items():
        match = regex.fullmatch(name)
        if match is None:
            rest[name] = matrix
            continue
        layer = experts.setdefault(int(match["layer"]), {})
        layer.setdefault(int(match["expert"]), {})[roles[match["proj"]]] = matrix
    return experts, rest


def make_coded_table(
    experts: CodedExperts, layers: Sequence[int], num_experts: int | None
) -> RecordTable:
    """Describe the experts of `layers`, some ranges for each matrix.

    Raises:
        CheckpointError: an expert or a matrix is missing or too many, or its shape differs.
        UnsupportedModelError: an expert is stored otherwise than the first.
    """
    first_layer = experts[layers[0]]
    first = first_layer[min(first_layer)]
    sample = next(iter(first.values()))
    num_experts = len(first_layer) if num_experts is None else num_experts
    for layer in layers:
        require_full_set(set(experts[layer]), num_experts, layer, _folder(sample))
    for role in EXPERT_ROLES:
        if role not in first:
            raise _missing(role, layers[0], min(first_layer), sample)
    inner, hidden = first["gate"].shape
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    # In the order of the roles: their ranges are read in it, and down comes last.
    chosen = [
        _checked(experts[layer][expert].get(role), first[role], shapes[role], (layer, expert, role))
        for layer in layers
        for expert in range(num_experts)
        for role in EXPERT_ROLES
    ]
    coded, suffixes = [], []
    for index, role in enumerate(EXPERT_ROLES):
        for suffix, kind in _ranges(first[role]).items():
            coded.append(_stored(index, kind, first[role]))
            suffixes.append((index, suffix))
    entries = [
        matrices[index].parts[suffix]
        for matrices in zip(*[iter(chosen)] * 3, strict=True)
        for index, suffix in suffixes
    ]
    paths = sorted({entry.path for entry in entries})
    place = {path: i for i, path in enumerate(paths)}
    shape = (len(layers), num_experts, len(coded))
    by_role = {role: (first[role].format, first[role].group) for role in EXPERT_ROLES}
    return RecordTable(
        files=tuple(paths),
        layers=tuple(layers),
        num_experts=num_experts,
        layouts=(make_record_layout(hidden, inner, *by_role["gate"], by_role),) * len(layers),
        repack=sample.method,
        file=np.array([place[e.path] for e in entries], np.int32).reshape(shape),
        offset=np.array([e.offset for e in entries], np.int64).reshape(shape),
        length=np.array([e.nbytes for e in entries], np.int64).reshape(shape),
        checksum=None,
        coded=tuple(coded),
        factors=_factors(chosen, (len(layers), num_experts, 3)),
    )


def _folder(matrix: Quantised) -> Path:
    return next(iter(matrix.parts.values())).path.parent


def _missing(role: str, layer: int, expert: int, sample: Quantised) -> CheckpointError:
    return CheckpointError(
        f"tensor is missing: {role} matrix of layer {layer}, expert {expert}\nin {_folder(sample)}"
    )


def _ranges(matrix: Quantised) -> dict[str, str]:
    """The tensors that a reader takes, and their kinds."""
    kinds = _KINDS[matrix.family]
    return {suffix: kind for suffix, kind in kinds.items() if suffix in matrix.parts}


def _stored(index: int, kind: str, matrix: Quantised) -> StoredTensor:
    is_scale = kind.startswith("scales")
    suffix = next(s for s, k in _ranges(matrix).items() if k == kind)
    return StoredTensor(
        matrix=index,
        kind=kind,
        scales=_SCALES[matrix.parts[suffix].dtype] if is_scale else "f32",
        factor=matrix.factor_use if is_scale else "none",
        group=FP8_TILE if matrix.method == "fp8" else matrix.stored_group,
        zero_offset=matrix.zero_offset,
    )


def _checked(
    matrix: Quantised | None, first: Quantised, shape: tuple[int, int], place: tuple[int, int, str]
) -> Quantised:
    layer, expert, role = place
    if matrix is None:
        raise _missing(role, layer, expert, first)
    entry = next(iter(matrix.parts.values()))
    if matrix.shape != shape:
        raise CheckpointError(
            f"matrix has the wrong shape: {matrix.name}, file {entry.path}\n"
            f"expected {list(shape)}, got {list(matrix.shape)}"
        )
    own, expected = _storage(matrix), _storage(first)
    if own != expected:
        raise UnsupportedModelError(
            f"experts are not stored alike: {matrix.name}, file {entry.path}\n"
            f"expected {expected} as {first.name} has, got {own}"
        )
    return matrix


def _storage(matrix: Quantised) -> str:
    dtypes = ", ".join(f"{s} {matrix.parts[s].dtype}" for s in _ranges(matrix))
    return f"groups of {matrix.stored_group} with {dtypes}"


def _factors(chosen: Sequence[Quantised], shape: tuple[int, int, int]) -> Float32 | None:
    """The numbers that all scales of a matrix share; None where there are none.

    A bad one is found by the reader, in the scales that it makes: of a model that is only planned
    there are headers and no data.
    """
    entries = [entry for matrix in chosen if (entry := matrix.factor_entry) is not None]
    if not entries:
        return None
    values: Float32 = np.empty(len(entries), np.float32)
    for run in _runs(entries):
        start = entries[run[0]].offset
        data: Bytes = np.empty(entries[run[-1]].offset + 4 - start, np.uint8)
        read_range(entries[run[0]].path, start, data)
        for i in run:
            at = entries[i].offset - start
            values[i] = data[at : at + 4].view("<f4")[0]
    return values.reshape(shape)


def _runs(entries: Sequence[TensorEntry]) -> Iterable[list[int]]:
    """Indices of entries that lie close together, in the order of their places."""
    run: list[int] = []
    for i in sorted(range(len(entries)), key=lambda i: (entries[i].path, entries[i].offset)):
        last = entries[run[-1]] if run else None
        if last is not None and (
            last.path != entries[i].path or entries[i].offset - last.offset > GAP_BYTES
        ):
            yield run
            run = []
        run.append(i)
    yield run
