"""Experts that a checkpoint keeps as one tensor per layer: seen as slices, one matrix per expert.

transformers holds the experts of a layer as `experts.gate_up_proj` [E, 2F, D], gate rows before up
rows, and `experts.down_proj` [E, D, F], and some files are saved that way. Each expert's matrices
are contiguous in them, so they are described as ranges; nothing is copied. Reads no data.

Source:
    modeling_qwen3_moe.py, modeling_olmoe.py and modeling_mixtral.py of transformers 5, classes
    *Experts; conversion_mapping.py for the names.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from headrace.checkpoint.records import FLOAT_FORMATS, ExpertNames, ExpertTensors
from headrace.checkpoint.safetensors import DTYPE_BITS, TensorEntry
from headrace.errors import CheckpointError, UnsupportedModelError

_FUSED = re.compile(
    r"(?P<block>model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.\w+\.)experts\."
    r"(?P<proj>gate_up_proj|down_proj)"
)


def split_fused(
    tensors: Mapping[str, TensorEntry], names: ExpertNames
) -> tuple[ExpertTensors, dict[str, TensorEntry]]:
    """Split fused tensors into the matrices of single experts.

    transformers calls every mixture block `mlp`; where the architecture's own files say otherwise
    (`block_sparse_moe`), the block's other tensors are given the name that those files have.

    Args:
        tensors: of all files, by name.
        names: how the architecture names its experts in files that keep them one by one.

    Returns:
        The experts of layers saved fused, and all other tensors.

    Raises:
        CheckpointError: a fused tensor lacks its other half or has another shape than that asks.
        UnsupportedModelError: its dtype is not bf16, f16 or f32.
    """
    found: dict[int, dict[str, TensorEntry]] = {}
    blocks: dict[str, str] = {}
    rest: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            rest[name] = entry
            continue
        layer = int(match["layer"])
        found.setdefault(layer, {})[match["proj"]] = entry
        blocks[match["block"]] = names.pattern.format(layer=layer, expert=0, proj="").split(
            "experts."
        )[0]
    experts = {layer: _split_layer(layer, pair) for layer, pair in sorted(found.items())}
    return experts, {_rename(name, blocks): entry for name, entry in rest.items()}


def _rename(name: str, blocks: Mapping[str, str]) -> str:
    block = ".".join(name.split(".", 4)[:4]) + "."  # model.layers.N.mlp.
    return blocks[block] + name.removeprefix(block) if block in blocks else name


def _split_layer(layer: int, pair: Mapping[str, TensorEntry]) -> dict[int, dict[str, TensorEntry]]:
    for proj in ("gate_up_proj", "down_proj"):
        if proj not in pair:
            present = next(iter(pair.values()))
            raise CheckpointError(
                f"tensor is missing: {proj} of the experts of layer {layer}\n"
                f"expected it beside {present.name}, file {present.path}"
            )
    both, down = pair["gate_up_proj"], pair["down_proj"]
    if both.dtype not in FLOAT_FORMATS:
        raise UnsupportedModelError(
            f"expert tensor has dtype {both.dtype}: {both.name}, file {both.path}\n"
            "expected BF16, F16 or F32"
        )
    if len(both.shape) != 3 or 0 in both.shape or both.shape[1] % 2:
        raise CheckpointError(
            f"tensor has the wrong shape: {both.name}, file {both.path}\n"
            f"expected [experts, 2 * inner, hidden], got {list(both.shape)}"
        )
    num_experts, inner, hidden = both.shape[0], both.shape[1] // 2, both.shape[2]
    if down.shape != (num_experts, hidden, inner) or down.dtype != both.dtype:
        raise CheckpointError(
            f"tensor has the wrong shape or dtype: {down.name}, file {down.path}\n"
            f"expected {both.dtype} {[num_experts, hidden, inner]} beside {both.name} "
            f"{list(both.shape)}, got {down.dtype} {list(down.shape)}"
        )
    return {
        expert: {
            "gate": _rows(both, expert, 0, inner),
            "up": _rows(both, expert, inner, inner),
            "down": _rows(down, expert, 0, hidden),
        }
        for expert in range(num_experts)
    }


def _rows(entry: TensorEntry, expert: int, first: int, count: int) -> TensorEntry:
    """Describe rows `first` to `first + count` of one expert's part of a fused tensor."""
    _, rows, cols = entry.shape
    row_bytes = cols * DTYPE_BITS[entry.dtype] // 8
    return replace(
        entry,
        name=f"{entry.name}[{expert}, {first}:{first + count}]",
        shape=(count, cols),
        offset=entry.offset + (expert * rows + first) * row_bytes,
        nbytes=count * row_bytes,
    )
