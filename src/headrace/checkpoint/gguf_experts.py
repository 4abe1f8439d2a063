"""Where the experts of a GGUF model lie: one tensor [E, N, K] for each matrix of a layer.

An expert's matrix is a run of whole rows within it, which the reader takes apart and packs. Files
mix tensor types between layers and between matrices; so the records of each layer have a layout of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.checkpoint.base import config_num_experts
from headrace.checkpoint.gguf_blocks import (
    QUANTISED,
    packed_format,
    remembered_type,
    require_readable,
)
from headrace.checkpoint.gguf_header import BLOCK_TYPES, GgufTensor
from headrace.checkpoint.gguf_names import EXPERT_ROLES
from headrace.checkpoint.gguf_split import GgufModel
from headrace.checkpoint.records import PLAIN_ROWS, RecordLayout, RecordTable, make_record_layout
from headrace.errors import CheckpointError, UnsupportedModelError

_EXPERT = re.compile(
    r"blk\.(0|[1-9][0-9]{0,5})\.(" + "|".join(map(re.escape, EXPERT_ROLES.values())) + ")"
)
_SINGLE = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down)\.[0-9]+\.weight")
_TYPE_IDS = {type.name: id for id, type in BLOCK_TYPES.items()}


def is_expert(name: str) -> bool:
    """Whether a tensor holds experts of a layer."""
    return _EXPERT.fullmatch(name) is not None


def expert_table(model: GgufModel, config: Mapping[str, Any]) -> RecordTable:
    """Describe the experts of every layer, checked against each other and the config.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
        UnsupportedModelError: a tensor type that is not read.
    """
    roles = {name: role for role, name in EXPERT_ROLES.items()}
    found: dict[int, dict[str, GgufTensor]] = {}
    for name, tensor in model.tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), {})[roles[match[2]]] = tensor
        elif _SINGLE.fullmatch(name):
            raise UnsupportedModelError(
                f"a tensor of a single expert, as old GGUF files have them: {name}, "
                f"file {tensor.path}\nexpected the experts of a layer merged\n"
                "hint: convert the model again with a newer tool"
            )
    num_experts = config_num_experts(config)
    assert num_experts, "a model without experts has no table"
    hidden = config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    layers = sorted(found)
    if not layers:
        raise CheckpointError(f"no experts: {model.path}\nexpected blk.0.{EXPERT_ROLES['gate']}")
    for layer in layers:
        for role, (rows, cols) in shapes.items():
            _check(found[layer].get(role), (num_experts, rows, cols), layer, role, model)
    layouts = tuple(_layout(found[layer], hidden, inner) for layer in layers)
    paths = sorted({t.path for by_role in found.values() for t in by_role.values()})
    index = {path: i for i, path in enumerate(paths)}
    tensors = [[found[layer][role] for role in EXPERT_ROLES] for layer in layers]
    shape = (len(layers), num_experts, 3)
    stride = np.array([[t.nbytes // num_experts for t in row] for row in tensors], np.int64)
    start = np.array([[t.offset for t in row] for row in tensors], np.int64)
    file = np.array([[index[t.path] for t in row] for row in tensors], np.int32)
    experts = np.arange(num_experts, dtype=np.int64)[None, :, None]
    encoding = [
        [_TYPE_IDS[t.type.name] if t.type.name in QUANTISED else PLAIN_ROWS for t in row]
        for row in tensors
    ]
    return RecordTable(
        files=tuple(paths),
        layers=tuple(layers),
        num_experts=num_experts,
        layouts=layouts,
        repack="gguf",
        file=np.broadcast_to(file[:, None, :], shape).copy(),
        offset=start[:, None, :] + experts * stride[:, None, :],
        length=np.broadcast_to(stride[:, None, :], shape).copy(),
        checksum=None,
        encoding=np.array(encoding, np.int32),
    )


def _layout(by_role: Mapping[str, GgufTensor], hidden: int, inner: int) -> RecordLayout:
    """How the records of a layer lie: each matrix in the format of its own type."""
    formats = {role: packed_format(tensor.type.name) for role, tensor in by_role.items()}
    types = {role: remembered_type(tensor.type.name) for role, tensor in by_role.items()}
    return make_record_layout(hidden, inner, *formats["gate"], formats, types)


def _check(
    tensor: GgufTensor | None,
    shape: tuple[int, int, int],
    layer: int,
    role: str,
    model: GgufModel,
) -> None:
    name = f"blk.{layer}.{EXPERT_ROLES[role]}"
    if tensor is None:
        raise CheckpointError(f"tensor is missing: {name}, file {model.path}")
    require_readable(tensor.type.name, f"{name}, file {tensor.path}")
    if tensor.shape != shape:
        raise CheckpointError(
            f"tensor has the wrong shape: {name}, file {tensor.path}\n"
            f"expected {list(shape)}, got {list(tensor.shape)}"
        )
