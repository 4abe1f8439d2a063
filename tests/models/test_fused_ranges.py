"""Experts fused over a layer: gpt-oss' MXFP4, and values that stand transposed.

No architecture here has such files yet; the source is tested by itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import NAMES
from coded_models import EXPERTS, LAYERS, Change
from safetensors_files import Tensors, write_safetensors
from stored_codes import E2M1

from headrace import _core
from headrace.checkpoint import HuggingFaceCheckpoint
from headrace.checkpoint.records import EXPERT_ROLES
from headrace.config import ExpertConfig
from headrace.convert.source import read_records
from headrace.errors import CheckpointError, ExpertReadError, UnsupportedModelError
from headrace.experts import ExpertStore
from headrace.experts.repack import measure_repack

HIDDEN, INNER = 96, 64
Values = dict[tuple[int, int, str], np.ndarray]


def _mxfp4(rng: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, ...]:
    """Blocks [E, rows, cols / 32, 16], scales and values [E, rows, cols], element by element."""
    codes = rng.integers(0, 16, (EXPERTS, rows, cols), np.uint8)
    scales = rng.integers(115, 124, (EXPERTS, rows, cols // 32), np.uint8)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(EXPERTS, rows, cols // 32, 16)
    values = np.zeros(codes.shape, np.float32)
    for at in np.ndindex(*codes.shape):
        code, power = int(codes[at]), 2.0 ** (int(scales[at[0], at[1], at[2] // 32]) - 127)
        values[at] = (-1 if code & 8 else 1) * E2M1[code & 7] * power
    return blocks, scales, values


def _write(
    folder: Path, case: str, change: Change = lambda *_: None, **settings: Any
) -> tuple[HuggingFaceCheckpoint, Values]:
    rng = np.random.default_rng(11)
    tensors: Tensors = {"model.norm.weight": np.ones(HIDDEN, np.float32)}
    dtypes: dict[str, str] = {}
    values: Values = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts."
        if case == "mxfp4":
            both = _mxfp4(rng, 2 * INNER, HIDDEN)
            down = _mxfp4(rng, HIDDEN, INNER)
            for proj, made in (("gate_up_proj", both), ("down_proj", down)):
                tensors[f"{prefix}{proj}_blocks"], tensors[f"{prefix}{proj}_scales"] = made[:2]
            gate_up, down_values = both[2], down[2]
            gate, up = gate_up[:, ::2], gate_up[:, 1::2]
        else:
            dtype = "<f2" if case == "halves" else "<f4"
            gate_up = rng.standard_normal((EXPERTS, HIDDEN, 2 * INNER)).astype(dtype)
            turned = rng.standard_normal((EXPERTS, INNER, HIDDEN)).astype(dtype)
            tensors[prefix + "gate_up_proj"], tensors[prefix + "down_proj"] = gate_up, turned
            down_values = turned.swapaxes(1, 2)
            gate, up = gate_up[:, :, ::2], gate_up[:, :, 1::2]
            if case == "halves":
                gate, up = gate_up[:, :, :INNER], gate_up[:, :, INNER:]
            gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
        for expert in range(EXPERTS):
            for role, matrices in (("gate", gate), ("up", up), ("down", down_values)):
                values[layer, expert, role] = matrices[expert].astype(np.float32)
    change(tensors, dtypes)
    write_safetensors(folder / "model.safetensors", tensors, dtypes)
    config: dict[str, Any] = {
        "num_local_experts": EXPERTS, "num_hidden_layers": LAYERS,
        "model_type": "llama4" if case == "halves" else "gpt_oss",
    }  # fmt: skip
    if case == "mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config | settings))
    return HuggingFaceCheckpoint(folder, NAMES), values


CASES = ("mxfp4", "halves", "columns")


@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_records_hold_the_values(case: str, block_bytes: int, tmp_path: Path) -> None:
    checkpoint, values = _write(tmp_path, case)
    table = checkpoint.records
    assert table is not None
    assert table.shape.gate.format == {"mxfp4": "mxfp4", "halves": "f16", "columns": "f32"}[case]
    assert (
        table.read_bytes
        == sum(e.nbytes for n, e in checkpoint.entries.items() if ".layers.0." in n) // EXPERTS
    )
    assert set(checkpoint.tensors) == {"model.norm.weight"}
    seen = 0
    readers = ExpertConfig(block_bytes=block_bytes)
    with ExpertStore(table, num_slots=2, readers=readers) as store:
        for layer in table.layers:
            for i, record in enumerate(read_records(store, layer)):
                for role, m in zip(EXPERT_ROLES, table.shape.matrices, strict=True):
                    aligned = _core.aligned_empty(m.nbytes)
                    aligned[:] = record[m.offset : m.offset + m.nbytes]
                    matrix = _core.Matrix(aligned, m.format, m.rows, m.cols, m.group)
                    expected = values[layer, i, role]
                    np.testing.assert_array_equal(_core.unpack(matrix), expected)
                    seen += 1
    assert seen == 3 * LAYERS * EXPERTS
    rate = measure_repack(table)
    assert rate is not None
    assert rate > 0


@pytest.mark.parametrize(
    ("case", "name", "index", "value", "where"),
    [
        ("mxfp4", "gate_up_proj_scales", (2, 5, 1), 255, r"matrix up.*\[5, 1\]"),
        ("mxfp4", "gate_up_proj_scales", (2, 4, 0), 255, r"matrix gate.*\[4, 0\]"),
        ("mxfp4", "down_proj_scales", (2, 5, 1), 255, r"matrix down.*\[5, 1\]"),
        ("halves", "gate_up_proj", (2, 7, INNER - 1), np.inf, r"matrix gate.*\[7, 63\]"),
        ("halves", "gate_up_proj", (2, 7, INNER), np.inf, r"matrix up.*\[7, 64\]"),
        ("columns", "gate_up_proj", (2, 7, 101), np.nan, r"matrix up.*\[7, 101\]"),
        ("columns", "gate_up_proj", (2, 7, 100), np.nan, r"matrix gate.*\[7, 100\]"),
        ("columns", "down_proj", (2, 7, 3), np.nan, r"matrix down.*\[7, 3\]"),
    ],
)
def test_a_bad_value_is_named_where_it_stands(
    case: str, name: str, index: tuple[int, ...], value: float, where: str, tmp_path: Path
) -> None:
    def spoil(tensors: Tensors, _: dict[str, str]) -> None:
        tensors["model.layers.1.mlp.experts." + name][index] = value

    table = _write(tmp_path, case, spoil)[0].records
    assert table is not None
    with (
        ExpertStore(table, num_slots=2, readers=ExpertConfig()) as store,
        store.acquire(1, np.array([[2]], np.int32)) as lease,
        pytest.raises(ExpertReadError, match="(?s)not finite: layer 1, expert 2, " + where),
    ):
        lease.next_ready()


L1 = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("case", "name", "array", "message"),
    [
        ("mxfp4", L1 + "gate_up_proj_scales", None, "missing: gate_up_proj_scales .* layer 1"),
        ("mxfp4", L1 + "down_proj_blocks", np.zeros((4, 96, 1, 16), np.uint8), "U8.*96, 2, 16"),
        ("mxfp4", L1 + "gate_up_proj_scales", np.zeros((4, 128, 3), np.int32), "got I32"),
        ("halves", L1 + "down_proj", np.zeros((4, 64, 96), np.float32), "F16 .*got F32"),
        ("halves", L1 + "down_proj", None, "tensor is missing: down_proj"),
    ],
)
def test_bad_headers_are_refused_by_name(
    case: str, name: str, array: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    def change(tensors: Tensors, _: dict[str, str]) -> None:
        del tensors[name]
        if array is not None:
            tensors[name] = array

    with pytest.raises(CheckpointError, match="(?s)" + message):
        _write(tmp_path, case, change)


def test_layers_of_two_layouts_are_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors, _: dict[str, str]) -> None:
        tensors[L1 + "gate_up_proj"] = np.zeros((EXPERTS, 2 * INNER, HIDDEN), np.float16)
        tensors[L1 + "down_proj"] = np.zeros((EXPERTS, HIDDEN, INNER), np.float16)

    with pytest.raises(UnsupportedModelError, match="values in layer 1 and fused in layer 0"):
        _write(tmp_path, "halves", change)
