"""What a GGUF file says of its model, after it was a container: the same, or a difference named
here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import HEAD_DIM, VOCAB, model_metadata, model_tensors
from tiny_gguf import pack_file

from headrace.checkpoint import GgufCheckpoint
from headrace.checkpoint.gguf_names import ARCHITECTURES, ROPE_FACTORS
from headrace.checkpoint.gguf_rope import HIGH, LOW, ORIGINAL_CONTEXT
from headrace.checkpoint.gguf_split import read_model
from headrace.convert import GgufRecipe, convert, convert_to_gguf
from headrace.convert.recipe import KEPT_WHOLE
from headrace.llm import resolve_model
from headrace.models.registry import REGISTRY, load_spec

KEPT = GgufRecipe()
STATED = {
    "general.type": "model",
    "general.file_type": 7,
    "general.quantization_version": 2,
    "vocab_size": VOCAB,
    "rope.dimension_count": 64,
}
"""Keys that the first file leaves out and the second one has, with their values."""
LEFT_OUT = {
    "general.author": "nobody",
    "general.license": "mit",
    "general.tags": ["small", "random"],
    "rope.scaling.finetuned": True,
    "expert_weights_scale": 1.0,
    "tokenizer.ggml.token_type_count": 2,
    "tokenizer.huggingface.json": "{}",
}
"""Keys that the second file lacks: notes for people, and what changes nothing."""
NAMES = [
    "bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask",
    "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
]  # fmt: skip


def metadata_of(path: Path) -> dict[str, Any]:
    return dict(read_model(path).metadata)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The two values of each key that is not the same in both; None where there is none."""
    pairs = {key: (one.get(key), other.get(key)) for key in {**one, **other}}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def through_a_container(source: Path, folder: Path) -> Path:
    convert(source, folder / "container", KEPT_WHOLE)
    convert_to_gguf(folder / "container", folder / "again.gguf", KEPT)
    return folder / "again.gguf"


def whole_metadata(model_type: str) -> dict[str, Any]:
    """Of a file of somebody else that states all it can."""
    metadata = model_metadata(model_type)
    tokens = metadata["tokenizer.ggml.tokens"]
    unused = range(VOCAB - 3, VOCAB)
    for id in unused:
        tokens[id], metadata["tokenizer.ggml.token_type"][id] = f"[PAD{id}]", 5
    specials = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    ids = {f"tokenizer.ggml.{n}_token_id": i for n, i in zip(NAMES, specials, strict=False)}
    assert len(ids) == len(NAMES)
    return {
        **metadata,
        **ids,
        "general.name": "Tiny 4x Random",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}",
    }


def owned(model_type: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with the architecture's prefix where they are the model's own."""
    prefix = ARCHITECTURES[model_type].name
    whole = ("general.", "tokenizer.")
    return {k if k.startswith(whole) else f"{prefix}.{k}": v for k, v in keys.items()}


def write(path: Path, model_type: str, metadata: Mapping[str, Any]) -> Path:
    path.write_bytes(pack_file(metadata, model_tensors(model_type, "Q8_0", "Q8_0")))
    return path


@pytest.mark.parametrize("model_type", sorted(REGISTRY))
def test_a_foreign_file_says_the_same_again(tmp_path: Path, model_type: str) -> None:
    left_out = owned(model_type, LEFT_OUT)
    source = write(tmp_path / "a.gguf", model_type, {**whole_metadata(model_type), **left_out})
    stated = owned(model_type, STATED)
    expected = {key: (None, value) for key, value in stated.items()}
    expected |= {key: (value, None) for key, value in left_out.items()}
    again = through_a_container(source, tmp_path)
    assert differences(metadata_of(source), metadata_of(again)) == expected
    convert_to_gguf(source, tmp_path / "b.gguf", KEPT)
    assert (tmp_path / "b.gguf").read_bytes() == again.read_bytes()


@pytest.mark.parametrize("rope", ["none", "linear", "yarn"])
@pytest.mark.parametrize("model_type", sorted(REGISTRY))
def test_a_file_of_ours_says_all_of_it_again(tmp_path: Path, model_type: str, rope: str) -> None:
    metadata = whole_metadata(model_type)
    if rope != "none":
        scaling = {"rope.scaling.type": rope, "rope.scaling.factor": 4.0}
        metadata |= owned(model_type, scaling)
    if rope == "yarn":
        metadata |= owned(model_type, {"rope.scaling.original_context_length": 128})
    convert_to_gguf(write(tmp_path / "a.gguf", model_type, metadata), tmp_path / "b.gguf", KEPT)
    again = through_a_container(tmp_path / "b.gguf", tmp_path)
    assert again.read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert load_spec(GgufCheckpoint(again).config).rope.kind == rope.replace("none", "default")


def test_the_demo_says_all_of_it_again(tmp_path: Path) -> None:
    convert_to_gguf(resolve_model(Path("demo")), tmp_path / "a.gguf", KEPT)
    again = through_a_container(tmp_path / "a.gguf", tmp_path)
    assert again.read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert "tokenizer.ggml.bos_token_id" not in metadata_of(again)


def test_silence_and_other_names_of_a_rule_are_written_out(tmp_path: Path) -> None:
    """`llama-v3` cuts text as `llama-bpe` does, and a file that says no more begins texts with
    bos."""
    metadata = {**model_metadata("llama"), "tokenizer.ggml.pre": "llama-v3"}
    source = write(tmp_path / "a.gguf", "llama", metadata)
    found = differences(metadata, metadata_of(through_a_container(source, tmp_path)))
    assert {key: pair for key, pair in found.items() if key.startswith("tokenizer.")} == {
        "tokenizer.ggml.pre": ("llama-v3", "llama-bpe"),
        "tokenizer.ggml.add_bos_token": (None, True),
        "tokenizer.ggml.add_eos_token": (None, False),
    }


def test_scores_become_the_order_of_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"ab": -1.5, "\u2581ab": -4.0, "bab": -2.25, "abab": -9.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581ab", *made]
    types = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [*[0.0] * 259, -20.0, -21.0, -22.0, *made.values()]
    monkeypatch.setattr("gguf_models.VOCAB", len(tokens))
    text = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    metadata = {**model_metadata("llama"), **text}
    del metadata["tokenizer.ggml.merges"]
    again = metadata_of(
        through_a_container(write(tmp_path / "a.gguf", "llama", metadata), tmp_path)
    )
    ours = again["tokenizer.ggml.scores"]
    assert ours == [*[0.0] * 262, 0.0, -2.0, -1.0, -3.0]
    found = differences(metadata, again)
    assert {key for key in found if key.startswith("tokenizer.")} == {
        "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
    }  # fmt: skip


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_factors_of_llama3_rope_come_back_from_their_rule(tmp_path: Path, theta: float) -> None:
    """They may differ from the file's in the last bits, as those of two writers do."""
    smooth = np.float32(theta) ** -(np.arange(0, HEAD_DIM, 2, dtype=np.float32) / HEAD_DIM)
    smooth = np.clip((ORIGINAL_CONTEXT / (2 * np.pi) * smooth - LOW) / (HIGH - LOW), 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    tensors = model_tensors("llama", "Q8_0", "Q8_0")
    tensors[ROPE_FACTORS] = ("F32", [HEAD_DIM // 2], factors.tobytes())
    metadata = {**whole_metadata("llama"), "llama.rope.freq_base": theta}
    source = tmp_path / "a.gguf"
    source.write_bytes(pack_file(metadata, tensors))
    again = through_a_container(source, tmp_path)
    tensor = read_model(again).tensors[ROPE_FACTORS]
    found = np.fromfile(again, np.float32, HEAD_DIM // 2, offset=tensor.offset)
    np.testing.assert_allclose(found, factors, rtol=3e-7)
    assert set(differences(metadata_of(source), metadata_of(again))) == set(owned("llama", STATED))
