"""A checkpoint that is not what its config says: the error names the tensor and both shapes."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FIXTURES, make_case, open_model, read_case_config

from headrace.errors import CheckpointError

Header = dict[str, dict[str, Any]]


def rewrite(folder: Path, change: Callable[[Header], None], name: str = "mixtral") -> Path:
    """Copy a fixture of one shard, with its header changed and its data as they were."""
    raw = (FIXTURES / name / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header: Header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + raw[8 + length :]
    )
    (folder / "config.json").write_text(json.dumps(read_case_config(name, "default")))
    return folder


def rename(old: str, new: str) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        header[new] = header.pop(old)

    return change


def reshape(name: str, shape: list[int]) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        header[name]["shape"] = shape

    return change


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.block_sparse_moe.experts.2.w3.weight"


def test_the_unchanged_copy_opens(tmp_path: Path) -> None:
    open_model(rewrite(tmp_path, lambda header: None))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename(Q_PROJ, Q_PROJ + "s"), [f"tensor `{Q_PROJ}` is missing", "[32, 32]"]),
        (rename("model.norm.weight", "norm.weight"), ["`model.norm.weight`", "`norm.weight`"]),
        (rename("lm_head.weight", "head.weight"), ["tensor `lm_head.weight` is missing"]),
        (reshape(Q_PROJ, [16, 64]), [Q_PROJ, "expected [32, 32]", "got [16, 64]"]),
        (reshape("model.norm.weight", [32, 1]), ["model.norm.weight", "expected [32]"]),
        (
            rename(UP, "model.layers.0.block_sparse_moe.experts.2.w4.weight"),
            ["up matrix of layer 0, expert 2"],
        ),
    ],
    ids=["renamed", "prefix", "head", "misshapen", "rank", "expert"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[Header], None], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(rewrite(tmp_path, change))
    for word in words:
        assert word in str(caught.value)


def test_more_tensors_than_the_architecture_has(tmp_path: Path) -> None:
    """A qwen3 checkpoint has query norms that a llama has no place for."""
    folder = make_case("qwen3", "default", tmp_path / "model")
    config = read_case_config("qwen3", "default")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(
        CheckpointError, match=r"4 tensors that this .*\n.* `model\.layers\.0\.self_attn\.k_norm"
    ):
        open_model(folder)


def test_config_and_experts_that_disagree(tmp_path: Path) -> None:
    folder = make_case("mixtral", "default", tmp_path / "model")
    config = read_case_config("mixtral", "default")
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(CheckpointError, match=r"gate matrix.*\n.*\[48, 32\].*got \[40, 32\]"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}))
    with pytest.raises(CheckpointError, match="expert"):
        open_model(folder)


def test_a_tied_head_needs_no_tensor_and_an_untied_one_does(tmp_path: Path) -> None:
    folder = make_case("llama", "default", tmp_path / "model")
    open_model(folder)
    config = read_case_config("llama", "default")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"`lm_head\.weight` is missing"):
        open_model(folder)
