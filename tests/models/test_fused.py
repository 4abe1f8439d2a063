"""Experts saved as one tensor per layer, as transformers holds them: the same model to the bit."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import read_tensors, write_safetensors
from tiny_models import make_case, open_model, open_store, read_expected, run

from headrace.checkpoint.layout import Recipe
from headrace.convert import convert
from headrace.errors import CheckpointError, UnsupportedModelError

BLOCKS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
Tensors = dict[str, np.ndarray]


def _fuse(tensors: Tensors, name: str) -> Tensors:
    """As modeling_*.py of transformers 5 hold them: gate rows before up rows, block called mlp."""
    block, gate, up, down = BLOCKS[name]
    fused = {n.replace(block, "mlp"): t for n, t in tensors.items() if ".experts." not in n}
    for layer in {n.split(".")[2] for n in tensors if ".experts." in n}:
        prefix = f"model.layers.{layer}.{block}.experts."
        count = len({n.split(".")[5] for n in tensors if n.startswith(prefix)})

        def stack(proj: str, prefix: str = prefix, count: int = count) -> np.ndarray:
            return np.stack([tensors[f"{prefix}{e}.{proj}.weight"] for e in range(count)])

        target = f"model.layers.{layer}.mlp.experts."
        fused[target + "gate_up_proj"] = np.concatenate([stack(gate), stack(up)], axis=1)
        fused[target + "down_proj"] = stack(down)
    return fused


def _write(
    name: str, folder: Path, change: Callable[[Tensors], None] = lambda _: None, shards: int = 1
) -> Path:
    make_case(name, "default", folder)
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors*")):
        if path.suffix == ".safetensors":
            tensors.update(read_tensors(path))
        path.unlink()
    fused = _fuse(tensors, name)
    change(fused)
    names = sorted(fused)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", fused)
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {n: fused[n] for n in names[i::shards]})
        weight_map.update(dict.fromkeys(names[i::shards], file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("num_slots", [None, 4], ids=["resident", "streamed"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_fused_experts_give_the_same_bits(
    name: str, shards: int, num_slots: int | None, tmp_path: Path
) -> None:
    ids = read_expected(name, "default")["ids"].tolist()
    logits = []
    for folder in (
        make_case(name, "default", tmp_path / "single"),
        _write(name, tmp_path / "fused", shards=shards),
    ):
        model, checkpoint = open_model(folder)
        with open_store(checkpoint, num_slots) as store:
            logits.append(run(model, store, ids[:12], [6, 6]))
    np.testing.assert_array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))


def test_convert_writes_the_same_records(tmp_path: Path) -> None:
    folders = [
        make_case("qwen3_moe", "default", tmp_path / "single"),
        _write("qwen3_moe", tmp_path / "fused"),
    ]
    made = []
    for folder in folders:
        dest = folder.with_suffix(".hr")
        convert(folder, dest, Recipe())
        made.append({p.name: p.read_bytes() for p in dest.glob("*.safetensors")})
    assert made[0] == made[1]


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def _swap_axes(tensors: Tensors) -> None:
    tensors[GATE_UP] = np.ascontiguousarray(tensors[GATE_UP].transpose(0, 2, 1))


def _add_single(tensors: Tensors) -> None:
    for proj in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.0.mlp.experts.0.{proj}.weight"] = np.zeros((4, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(DOWN), CheckpointError, "down_proj of the experts of layer 0"),
        (lambda t: t.pop(GATE_UP), CheckpointError, "gate_up_proj of the experts of layer 0"),
        (_swap_axes, CheckpointError, f"wrong shape or dtype: {DOWN}"),
        (_add_single, CheckpointError, "experts of layer 0 are there twice"),
        (
            lambda t: t.update({GATE_UP: np.zeros((2, 3, 4), np.float32)}),
            CheckpointError,
            rf"wrong shape: {GATE_UP}.*\n.*got \[2, 3, 4\]",
        ),
        (
            lambda t: t.update({GATE_UP: np.zeros((2, 4, 4), np.int32)}),
            UnsupportedModelError,
            f"dtype I32: {GATE_UP}",
        ),
    ],
)
def test_what_is_wrong_is_named(
    change: Callable[[Tensors], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = _write("qwen3_moe", tmp_path / "bad", change)
    with pytest.raises(error, match=message):
        open_model(folder)
