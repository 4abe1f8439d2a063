"""Quantised matrices read in place: every value compared with the format's public definition."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_models import Change, write_coded_model
from safetensors_files import Tensors
from stored_codes import AWQ, CASES, FP8, GPTQ, Make, compressed
from tiny_models import open_model, run

from headrace import _core
from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.layout import Recipe
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE, default_for
from headrace.errors import CheckpointError, EngineError, UnsupportedModelError

HIDDEN, INNER, VOCAB = 128, 256, 64
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
PLAIN = "model.layers.1.self_attn.o_proj"


def _write(
    folder: Path, settings: dict[str, Any], make: Make, change: Change = lambda *_: None
) -> dict[str, np.ndarray]:
    """Write a model whose matrices are quantised but for the embedding, head and one layer's o."""
    config = {**CONFIG, "quantization_config": settings}
    return write_coded_model(folder, config, make, lambda name: name != PLAIN, change)


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_value_is_the_one_the_format_defines(case: str, tmp_path: Path) -> None:
    settings, make, format, group = CASES[case]
    values = _write(tmp_path, settings, make)
    checkpoint = open_checkpoint(tmp_path, None)
    for name, expected in values.items():
        matrix = checkpoint.load_matrix(name + ".weight")
        info = checkpoint.info(name + ".weight")
        is_plain = name == PLAIN
        assert (matrix.format, matrix.group) == (("f32", 1) if is_plain else (format, group))
        assert (info.format, info.group, info.nbytes) == (
            matrix.format, matrix.group, matrix.nbytes
        )  # fmt: skip
        # The expected values are exact in float64; unpacking rounds them once.
        np.testing.assert_array_equal(_core.unpack(matrix), expected.astype(np.float32))


@pytest.mark.parametrize(
    "case", ["fp8", "nvfp4", "modelopt", "mxfp4", "packed-sym-64", "awq-128", "gptq-32"]
)
def test_a_quantised_model_runs_in_place(case: str, tmp_path: Path) -> None:
    settings, make, *_ = CASES[case]
    _write(tmp_path, settings, make)
    model, _ = open_model(tmp_path)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = run(model, None, ids, [8])
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, run(model, None, ids, [3, 1, 4]))


@pytest.mark.parametrize("case", ["fp8", "nvfp4", "packed-asym-64", "gptq-128"])
def test_convert_takes_the_real_numbers(case: str, tmp_path: Path) -> None:
    settings, make, *_ = CASES[case]
    values = _write(tmp_path / "codes", settings, make)
    _write(tmp_path / "plain", settings, make, lambda *stored: _expand(*stored, values))
    (tmp_path / "plain" / "config.json").write_text(json.dumps(CONFIG))
    made = []
    for name in ("codes", "plain"):
        convert(tmp_path / name, tmp_path / f"{name}.hr", Recipe(dense="q4"))
        made.append((tmp_path / f"{name}.hr" / "dense.safetensors").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("case", sorted(CASES))
def test_convert_keeps_the_codes(case: str, tmp_path: Path) -> None:
    settings, make, format, group = CASES[case]
    _write(tmp_path / "codes", settings, make)
    source = open_checkpoint(tmp_path / "codes", None)
    assert default_for(source) == KEPT_WHOLE
    report = convert(tmp_path / "codes", tmp_path / "out", KEPT_WHOLE)
    assert not report.losses
    made = open_checkpoint(tmp_path / "out", None)
    assert made.info(Q + "weight").format == format
    assert made.info(Q + "weight").group == group
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    wanted, got = (run(open_model(c.path)[0], None, ids, [8]) for c in (source, made))
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def _expand(tensors: Tensors, dtypes: dict[str, str], values: dict[str, np.ndarray]) -> None:
    dtypes.clear()
    for name, array in values.items():
        for stored in [n for n in tensors if n.startswith(name + ".")]:
            del tensors[stored]
        tensors[name + ".weight"] = array.astype(np.float32)


def _drop(name: str) -> Change:
    return lambda tensors, _: tensors.__delitem__(name)


def _set(name: str, value: np.ndarray) -> Change:
    return lambda tensors, _: tensors.update({name: value})


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("awq-32", _drop(Q + "qzeros"), f"tensor is missing: {Q}qzeros"),
        ("awq-32", _set(Q + "scales", np.ones((3, 128), np.float16)), f"not supported: {Q}scales"),
        ("awq-32", _set(Q + "qzeros", np.ones((3, 16), np.int32)), f"wrong shape: {Q}qzeros"),
        ("awq-32", _set(Q + "qweight", np.ones(3, np.int32)), f"wrong shape: {Q}qweight"),
        ("awq-32", _set(Q + "qweight", np.ones((3, 4), np.int64)), f"dtype I64: {Q}qweight"),
        ("gptq-32", _set(Q + "g_idx", np.zeros(128, np.int32)), f"act-order.*{Q}weight"),
        (
            "packed-sym-32",
            _set(Q + "weight_shape", np.array([1 << 60, 4])),
            f"stated shape does not fit the codes: {Q}weight_shape",
        ),
        ("fp8", _set(Q + "weight_scale_inv", np.ones((2, 1), np.float32)), "wrong shape"),
        ("fp8", _set(Q + "weight_scale_inv", np.array([[np.nan]], np.float32)), "weight is NaN"),
        ("mxfp4", _set(Q + "weight_scale", np.full((128, 4), 255, np.uint8)), Q + "weight"),
        ("nvfp4", _set(Q + "weight_global_scale", np.zeros(1, np.float32)), Q + "weight"),
    ],
)
def test_damage_is_named(case: str, change: Change, message: str, tmp_path: Path) -> None:
    settings, make, *_ = CASES[case]
    _write(tmp_path, settings, make, change)
    with pytest.raises(EngineError, match=message) as caught:
        open_checkpoint(tmp_path, None).load_matrix(Q + "weight")
    assert isinstance(caught.value, (CheckpointError, UnsupportedModelError))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes"},
        {},
        {**FP8, "weight_block_size": [32, 32]},
        {**AWQ, "version": "gemv"},
        {**AWQ, "bits": 8},
        {**GPTQ, "desc_act": True},
        {**GPTQ, "checkpoint_format": "marlin"},
        compressed("float-quantized"),
        {**compressed("pack-quantized"), "config_groups": {"a": {"weights": {"num_bits": 8}}}},
    ],
)
def test_what_is_not_read_is_refused_with_a_list(settings: dict[str, Any], tmp_path: Path) -> None:
    _write(tmp_path, settings, CASES["fp8"][1])
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.*\n(.*\n)?read are: fp8"):
        open_checkpoint(tmp_path, None)


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("packed-sym-64", "transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}),
        ("gptq-32", "is_marlin_format", True),
        ("gptq-32", "rotation", "hadamard"),
        ("awq-128", "smoothing", 0.5),
        ("fp8", "weight_transform", "rotate"),
        ("modelopt", "pre_quant_scale", True),
    ],
)
def test_a_field_that_nobody_knows_is_refused_by_name(
    case: str, name: str, value: Any, tmp_path: Path
) -> None:
    settings, make, *_ = CASES[case]
    _write(tmp_path, {**settings, name: value}, make)
    with pytest.raises(UnsupportedModelError, match=f"unknown field: {name} = "):
        open_checkpoint(tmp_path, None)
    _write(tmp_path, {**settings, name: None}, make)
    open_checkpoint(tmp_path, None)


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("packed-sym-64", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format dense"),
        ("packed-sym-64", {"config_groups": {"a": {"format": "float-quantized"}}}, "each group"),
        ("fp8", {"fmt": "e5m2"}, "fmt e4m3"),
        ("gptq-32", {"checkpoint_format": None, "format": "marlin"}, "gptq or gptq_v2"),
    ],
)
def test_an_option_that_changes_values_is_refused(
    case: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    settings, make, *_ = CASES[case]
    _write(tmp_path, {**settings, **changes}, make)
    with pytest.raises(UnsupportedModelError, match=expected):
        open_checkpoint(tmp_path, None)


def test_settings_that_are_no_object(tmp_path: Path) -> None:
    _write(tmp_path, [], CASES["fp8"][1])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"malformed config\.json: quantization_config"):
        open_checkpoint(tmp_path, None)
