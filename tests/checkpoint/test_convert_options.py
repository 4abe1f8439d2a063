"""`headrace convert`: what its options say together, and what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import Shape, write_checkpoint
from gguf_models import write_model

from headrace.checkpoint import open_checkpoint
from headrace.convert.importance import Importance


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", Shape())
    return tmp_path / "hf"


@pytest.mark.parametrize(("options", "message"), [
    (["--preset", "tiny"], "unknown preset 'tiny'"),
    (["--preset", "small", "--recipe", "x.toml"], "give one"),
    (["--preset", "small", "--experts", "q4"], "--experts contradicts --preset"),
    (["--recipe", "x.toml", "--head", "q8"], "--head contradicts --recipe"),
    (["--recipe", "missing.toml"], "cannot read recipe missing.toml"),
    (["--scales", "best"], "unknown value for scales"),
    (["--experts", "f32", "--dense", "bf16", "--scales", "largest"], "--scales does nothing"),
    (["--experts", "f32", "--dense", "bf16", "--calibrate", "x"], "--calibrate does nothing"),
    (["--memory", "1GiB"], "--memory does nothing without"),
    (["--scales", "largest", "--calibrate", "x"], "--calibrate does nothing unless"),
    (["--scales", "largest", "--importance", "x"], "--importance does nothing unless"),
    (["--importance", "x", "--calibrate", "y"], "both weigh errors"),
    (["--dry-run", "--report", "x"], "--report does nothing with --dry-run"),
    (["--report", "missing.txt"], "cannot read text missing.txt: No such file"),
    (["--calibrate", "missing.txt"], "cannot read text missing.txt: No such file"),
])  # fmt: skip
def test_options_that_make_no_sense(
    cli: Any, source: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    status, _, err = cli("convert", source, tmp_path / "out", *options)
    assert status == 2
    assert message in " ".join(err.split())
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("options", "message"), [
    (["--experts", "q4", "--dense", "q8"], "--experts does nothing"),
    (["--group", "32", "--dense", "q8"], "--group 32 does nothing"),
    (["--scales", "search", "--dense", "bf16"], "--scales does nothing"),
])  # fmt: skip
def test_a_dense_model_takes_no_options_of_experts(
    cli: Any, tmp_path: Path, options: list[str], message: str
) -> None:
    source = write_model(tmp_path / "dense.gguf", "qwen3", "F16")
    status, _, err = cli("convert", source, tmp_path / "out", *options)
    assert status == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize("option", [
    ["--preset", "small"], ["--head", "q8"], ["--scales", "search"], ["--dry-run"],
    ["--calibrate", "x"], ["--report", "x"], ["--importance", "x"], ["--memory", "1GiB"],
])  # fmt: skip
def test_a_gguf_file_takes_none_of_them(cli: Any, source: Path, option: list[str]) -> None:
    status, _, err = cli("convert", source, "out.gguf", *option)
    assert status == 2
    assert f"{option[0]} does nothing for a GGUF file" in " ".join(err.split())


def test_dry_run_tells_the_size_of_what_would_be_written(
    cli: Any, source: Path, tmp_path: Path
) -> None:
    status, out, _ = cli("convert", source, tmp_path / "out", "--dry-run", "--json")
    planned = json.loads(out)
    assert status == 0
    assert not list(tmp_path.glob("out*"))
    status, out, _ = cli("convert", source, tmp_path / "out", "--json")
    assert status == 0
    assert json.loads(out)["total_bytes"] == planned["total_bytes"]
    assert planned["recipe"]["scales"] == "search"
    assert planned["classes"]["experts.down"] < planned["total_bytes"]


def test_convert_prints_what_quantising_cost(cli: Any, source: Path, tmp_path: Path) -> None:
    status, _, err = cli("convert", source, tmp_path / "out", "--experts", "q4")
    assert status == 0
    assert "experts.gate: 4.25 bits a weight, error" in " ".join(err.split())


def test_importance_files_reach_the_recipe(cli: Any, source: Path, tmp_path: Path) -> None:
    importance = Importance(about={})
    importance.save(tmp_path / "sums")
    options = ("--importance", tmp_path / "sums")
    status, _, _ = cli("convert", source, tmp_path / "out", *options)
    assert status == 0
    assert open_checkpoint(tmp_path / "out", None).recipe.importance == importance.checksum
