"""Checkpoints with routed experts in codes, converted: the same numbers, in every listed format."""

from pathlib import Path

import numpy as np
import pytest
from byte_level import put_tokenizer
from coded_models import (
    EXPERT_FORMATS,
    EXPERTS,
    LAYERS,
    MIXTURES,
    Change,
    expert_module,
    tiny_config,
    write_coded_model,
)
from safetensors_files import Tensors
from stored_codes import CASES
from tiny_models import require_same_logits

from headrace.checkpoint import ContainerCheckpoint, GgufCheckpoint, open_checkpoint
from headrace.checkpoint.gguf_blocks import dequantize
from headrace.checkpoint.gguf_names import EXPERT_ROLES
from headrace.checkpoint.layout import Rule
from headrace.convert import GgufRecipe, Recipe, convert, convert_to_gguf
from headrace.convert.recipe import KEPT_WHOLE, default_for
from headrace.convert.source import open_source
from headrace.errors import ExpertReadError, UnsupportedModelError


def _write(
    folder: Path, model: str, case: str, change: Change = lambda *_: None
) -> dict[str, np.ndarray]:
    settings, make, *_ = CASES[case]
    config = tiny_config(model) | {"quantization_config": settings}
    return write_coded_model(folder, config, make, lambda name: ".experts." in name, change, 2)


@pytest.mark.parametrize("case", EXPERT_FORMATS)
@pytest.mark.parametrize("model", MIXTURES)
def test_the_container_gives_the_checkpoints_logits(model: str, case: str, tmp_path: Path) -> None:
    _write(tmp_path / "model", model, case)
    source = open_source(tmp_path / "model").checkpoint
    assert default_for(source) == KEPT_WHOLE
    report = convert(tmp_path / "model", tmp_path / "out", default_for(source))
    assert not report.losses
    assert not report.requantised
    made = open_checkpoint(tmp_path / "out", None)
    assert made.records is not None and source.records is not None
    assert made.records.layouts == source.records.layouts
    assert (made.records.shape.gate.format, made.records.shape.gate.group) == CASES[case][2:]
    require_same_logits(tmp_path / "model", tmp_path / "out")


def _expand(values: dict[str, np.ndarray]) -> Change:
    """The same experts as values."""

    def change(tensors: Tensors, dtypes: dict[str, str]) -> None:
        dtypes.clear()
        for name, array in values.items():
            if ".experts." in name:
                for suffix in [n for n in tensors if n.startswith(name + ".")]:
                    del tensors[suffix]
                tensors[name + ".weight"] = array.astype(np.float32)

    return change


@pytest.mark.parametrize("case", ["fp8", "modelopt", "mxfp4", "packed-sym-64", "gptq-32"])
def test_codes_and_the_same_values_in_f32_are_quantised_alike(case: str, tmp_path: Path) -> None:
    values = _write(tmp_path / "codes", "mixtral", case)
    _write(tmp_path / "plain", "mixtral", case, _expand(values))
    recipe = Recipe("q4", "bf16", 32, rules=(Rule("experts.up", "q8", 32),), scales="search")
    reports = [convert(tmp_path / n, tmp_path / f"{n}.hr", recipe) for n in ("codes", "plain")]
    assert sorted(reports[0].requantised) == ["experts.down", "experts.gate", "experts.up"]
    assert not reports[1].requantised
    assert reports[0].losses == reports[1].losses
    for layer in range(LAYERS):
        file = f"experts-{layer:03}.safetensors"
        made = [(tmp_path / f"{n}.hr" / file).read_bytes() for n in ("codes", "plain")]
        assert made[0] == made[1]


def test_one_matrix_of_an_expert_is_quantised_again(tmp_path: Path) -> None:
    _write(tmp_path / "model", "olmoe", "awq-64")
    recipe = Recipe("keep", "keep", 32, rules=(Rule("experts.down", "q8", 32),))
    report = convert(tmp_path / "model", tmp_path / "out", recipe)
    assert report.requantised == {"experts.down": "q4a in groups of 64"}
    made = open_checkpoint(tmp_path / "out", None)
    assert isinstance(made, ContainerCheckpoint) and made.records is not None
    formats = [m.format for m in made.records.shape.matrices]
    assert formats == ["q4a", "q4a", "q8"]


def test_a_bad_scale_is_named_and_nothing_is_left_under_the_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.scales"

    def spoil(tensors: Tensors, _: dict[str, str]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][1, 9] = np.inf

    _write(tmp_path / "model", "qwen3_moe", "gptq-64", spoil)
    wanted = r"^expert [a-z ]*: layer 1, expert 2, matrix down, file"
    with pytest.raises(ExpertReadError, match=wanted):
        convert(tmp_path / "model", tmp_path / "out", KEPT_WHOLE)
    assert not (tmp_path / "out").exists()
    _write(tmp_path / "model", "qwen3_moe", "gptq-64")
    convert(tmp_path / "model", tmp_path / "out", KEPT_WHOLE)
    require_same_logits(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize("case", ["fp8", "nvfp4", "modelopt", "mxfp4", "packed-sym-32", "awq-64"])
def test_to_gguf(case: str, tmp_path: Path) -> None:
    """Codes that a GGUF type holds stay what they are; others are widened when asked."""
    values = _write(tmp_path / "model", "qwen3_moe", case)
    put_tokenizer(tmp_path / "model")
    out = tmp_path / "out.gguf"
    if case != "mxfp4":
        wanted = rf"holds gate of the experts of layer 0 as it is stored, {CASES[case][2]}: "
        with pytest.raises(UnsupportedModelError, match=wanted):
            convert_to_gguf(tmp_path / "model", out, GgufRecipe())
        with pytest.raises(UnsupportedModelError, match="quantised a second time"):
            convert_to_gguf(tmp_path / "model", out, GgufRecipe("q4"))
        assert not out.exists()
    convert_to_gguf(tmp_path / "model", out, GgufRecipe(None if case == "mxfp4" else "f32"))
    header = GgufCheckpoint(out).header
    type = "MXFP4" if case == "mxfp4" else "F32"
    for layer in range(LAYERS):
        for role, name in EXPERT_ROLES.items():
            tensor = header.tensors[f"blk.{layer}.{name}"]
            assert tensor.type.name == type
            raw = np.fromfile(out, np.uint8, tensor.nbytes, offset=tensor.offset)
            got = dequantize(raw.reshape(-1, tensor.row_bytes), type).reshape(tensor.shape)
            modules = [expert_module("qwen3_moe", layer, e, role) for e in range(EXPERTS)]
            expected = np.stack([values[m] for m in modules]).astype(np.float32)
            np.testing.assert_array_equal(got, expected)
    if case == "mxfp4":
        require_same_logits(tmp_path / "model", out)
