"""Recipes: which tensor is stored how, what a file may say, and searched scales in a container."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_helpers import Shape, from_bf16, write_checkpoint

from headrace import _core, quant_search
from headrace.checkpoint import ContainerCheckpoint, open_checkpoint
from headrace.checkpoint.layout import Rule
from headrace.convert import Recipe, convert
from headrace.convert.importance import Importance
from headrace.convert.plan import make_plan
from headrace.convert.recipe import PRESETS, read_recipe
from headrace.errors import CheckpointError, ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", Shape())
    return tmp_path / "hf"


def opened(path: Path) -> ContainerCheckpoint:
    checkpoint = open_checkpoint(path, None)
    assert isinstance(checkpoint, ContainerCheckpoint)
    return checkpoint


def test_searched_scales_are_stored_and_reported(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", Shape())
    report = convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q8", 32, scales="search"))
    checkpoint = opened(tmp_path / "out")
    assert checkpoint.recipe.scales == "search"
    name = "model.layers.0.self_attn.q_proj.weight"
    packed = quant_search.quantise(tensors[name], "q8", 32)
    np.testing.assert_array_equal(checkpoint.load_bytes(name), packed)
    records = checkpoint.records
    assert records is not None
    gate = records.shape.gate
    data = np.fromfile(records.files[records.file[1, 2, 0]], np.uint8)
    begin = int(records.offset[1, 2, 0]) + gate.offset
    expected = quant_search.quantise(
        tensors["model.layers.1.mlp.experts.2.gate_proj.weight"], "q4", 32
    )
    np.testing.assert_array_equal(data[begin : begin + gate.nbytes], expected)
    assert set(report.losses) == {
        "attention", "head", "experts.gate", "experts.up", "experts.down",
    }  # fmt: skip
    assert 0.05 < report.losses["experts.gate"]["relative_rms_error"] < 0.09
    assert report.losses["attention"]["relative_rms_error"] < 0.006


def test_the_loss_reported_is_that_of_the_stored_bytes(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", Shape())
    report = convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q4", 32, scales="search"))
    checkpoint = opened(tmp_path / "out")
    error = squares = 0.0
    for name in (n for n in tensors if "self_attn" in n and tensors[n].ndim == 2):
        exact = from_bf16(tensors[name]).astype(np.float64)
        error += ((exact - _core.unpack(checkpoint.load_matrix(name))) ** 2).sum()
        squares += (exact**2).sum()
    assert report.losses["attention"]["relative_rms_error"] == pytest.approx(
        np.sqrt(error / squares), rel=1e-4
    )


def test_importance_changes_the_bytes_and_is_part_of_the_recipe(
    source: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    importance = Importance()
    importance.add_dense("lm_head.weight", rng.standard_normal((50, 64)).astype(np.float32) ** 3)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(200)]).astype(np.int32)
    x = rng.standard_normal((200, 64)).astype(np.float32) ** 3
    importance.add_experts(1, 4, ids, x, rng.standard_normal((200, 2, 48)).astype(np.float32) ** 3)
    recipe = Recipe("q4", "q4", 32, scales="search")
    convert(source, tmp_path / "plain", recipe)
    convert(source, tmp_path / "aimed", recipe, importance=importance)
    convert(source, tmp_path / "again", recipe, importance=importance)
    assert opened(tmp_path / "aimed").recipe.importance == importance.checksum
    files = {p.name: p.read_bytes() for p in (tmp_path / "aimed").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()}
    plain = {p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    assert {n for n in files if files[n] != plain[n]} == {
        "headrace.json", "dense.safetensors", "experts-001.safetensors",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="another source or recipe"):
        convert(source, tmp_path / "plain", recipe, importance=importance)


def test_rules_reach_classes_names_and_roles(source: Path, tmp_path: Path) -> None:
    recipe = replace(
        PRESETS["balanced"],
        rules=(
            Rule("model.layers.1.self_attn.q_proj.*", "bf16", 1),
            Rule("attention", "q4", 64),
            Rule("experts.down", "q8", 32),
            Rule("head", "bf16", 1),
        ),
    )
    convert(source, tmp_path / "out", recipe)
    checkpoint = opened(tmp_path / "out")
    assert checkpoint.recipe == recipe
    stored = {n: (t.format, t.group) for n, t in checkpoint.dense.items() if t.kind == "matrix"}
    assert stored["model.layers.1.self_attn.q_proj.weight"] == ("bf16", 1)
    assert stored["model.layers.0.self_attn.q_proj.weight"] == ("q4", 64)
    assert stored["lm_head.weight"] == ("bf16", 1)
    records = checkpoint.records
    assert records is not None
    assert [(m.format, m.group) for m in records.shape.matrices] == [
        ("q4", 32), ("q4", 32), ("q8", 32),
    ]  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_and_their_sizes(preset: str, source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, PRESETS[preset])
    convert(source, tmp_path / "out", PRESETS[preset])
    weights = {p.name: p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")}
    assert weights == plan.file_bytes()
    assert sum(plan.class_bytes().values()) <= sum(weights.values())
    sizes = {p: sum(make_plan(source, PRESETS[p]).file_bytes().values()) for p in PRESETS}
    assert sizes["small"] < sizes["balanced"] < sizes["faithful"]


def test_recipe_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'preset = "small"\nhead = "bf16"\n'
        '[[rules]]\nmatch = "experts.down"\nformat = "q8"\n'
        '[[rules]]\nmatch = "attention"\nformat = "q4"\ngroup = 32\n'
    )
    expected = replace(
        PRESETS["small"],
        head="bf16",
        rules=(Rule("experts.down", "q8", 32), Rule("attention", "q4", 32)),
    )
    assert read_recipe(tmp_path / "a.toml") == expected
    (tmp_path / "a.json").write_text(
        json.dumps({
            "experts": "q4", "dense": "q4", "group": 64, "head": "bf16",
            "rules": [{"match": "experts.down", "format": "q8"},
                      {"match": "attention", "format": "q4", "group": 32}],
        })
    )  # fmt: skip
    assert read_recipe(tmp_path / "a.json") == expected


@pytest.mark.parametrize(("text", "message"), [
    ('exprts = "q4"', "unknown key `exprts`"),
    ('experts = "q5"', "unknown value for experts: 'q5'"),
    ('preset = "tiny"', "unknown preset 'tiny'"),
    ('[[rules]]\nmatch = "head"', "rule 1: expected `match` and `format`"),
    ('[[rules]]\nmatch = "head"\nformat = "q9"', "rule 1: unknown value for rule's format: 'q9'"),
    ('[[rules]]\nmatch = "head"\nformat = "q8"\ngroup = 64', "`group` does nothing"),
    ('[[rules]]\nmatch = "head"\nformat = "q4"\ngroup = 48', "unknown value for group of q4: 48"),
    ('[[rules]]\nmatch = "head"\nformat = "q8"\nscale = 1', "unknown key `scale`"),
    ('[[rules]]\nmatch = "head"\nformat = "q8"\n[[rules]]\nmatch = "head"\nformat = "q4"',
     "rule 2: there is a rule for `head` already"),
    ("rules = 3", "`rules` is no list"),
    ("= =", "no TOML"),
])  # fmt: skip
def test_bad_recipe_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(tmp_path / "bad.toml")
    assert message in str(caught.value)
    assert "bad.toml" in str(caught.value)


@pytest.mark.parametrize(("rules", "message"), [
    ((Rule("shared", "q8", 32),), "rule 1, `shared`, matches nothing"),
    ((Rule("model.layers.*.mlp.experts.*", "q8", 32),), "experts are chosen by class"),
    ((Rule("model.layers.*.mlp.gate.weight", "q8", 32),), "routers"),
    ((Rule("attention", "q8", 32), Rule("*.q_proj.*", "q4", 32)),
     "`attention` before it matches the same"),
    ((Rule("experts", "q8", 32), Rule("experts.up", "q4", 32)), "`experts` before it"),
])  # fmt: skip
def test_rules_that_decide_nothing_are_refused(
    rules: tuple[Rule, ...], message: str, source: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(source, Recipe(rules=rules))
    assert message in str(caught.value)


def test_importance_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    importance = Importance()
    importance.add_dense("lm_head.weight", np.ones((2, 65), np.float32))
    with pytest.raises(CheckpointError, match="expected 64 inputs, got 65"):
        convert(source, tmp_path / "out", Recipe(scales="search"), importance=importance)


def test_a_manifest_without_new_fields_still_opens(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", Recipe("q4", "q8", 64))
    manifest = json.loads((tmp_path / "out" / "headrace.json").read_bytes())
    assert manifest["recipe"] == {"experts": "q4", "dense": "q8", "group": 64}
    assert opened(tmp_path / "out").recipe == Recipe("q4", "q8", 64)
