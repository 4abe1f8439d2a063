"""From a checkpoint to a GGUF file: every value, every name, and what is refused."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_level import BYTE_LEVEL, TOKENS, put_tokenizer, sentencepiece_json, tokenizer_json
from checkpoint_helpers import Shape, from_bf16, write_checkpoint, write_safetensors
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core

from headrace import quant
from headrace.checkpoint import GgufCheckpoint, gguf_writer, open_checkpoint
from headrace.checkpoint.gguf_blocks import TYPE_OF_FORMAT, blocks_of_packed, dequantize
from headrace.checkpoint.gguf_header import GgufHeader, read_header
from headrace.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from headrace.checkpoint.gguf_tokenizer import tokenizer_json as rebuild
from headrace.checkpoint.gguf_vocabulary import vocabulary_metadata
from headrace.convert import GgufRecipe, Recipe, convert, convert_to_gguf
from headrace.convert.gguf_plan import make_gguf_plan
from headrace.errors import CheckpointError, ConfigError, UnsupportedModelError
from headrace.models.names import QWEN3_MOE

SHAPE = Shape(inner=64, vocab=104)
KEPT = GgufRecipe()


def make_source(path: Path, shape: Shape = SHAPE, **options: Any) -> dict[str, np.ndarray]:
    tensors = write_checkpoint(path, shape, **options)
    put_tokenizer(path)
    return tensors


def values_of(header: GgufHeader, name: str) -> np.ndarray:
    """A tensor's values, in its shape."""
    tensor = header.tensors[name]
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = np.frombuffer(file.read(tensor.nbytes), np.uint8)
    rows = raw.reshape(-1, tensor.row_bytes)
    return dequantize(rows, tensor.type.name).reshape(tensor.shape)


def write(source: Path, dest: Path, recipe: GgufRecipe = KEPT) -> GgufHeader:
    convert_to_gguf(source, dest, recipe)
    return read_header(dest)


# Values


@given(
    format=st.sampled_from(["q4", "q8", "mxfp4", "bf16", "f16", "f32"]),
    rows=st.integers(1, 40),
    runs=st.integers(1, 5),
    wide=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_of_a_packed_matrix_stand_for_its_values(
    format: str, rows: int, runs: int, wide: bool, seed: int
) -> None:
    group = 1 if format in quant.FLOATING else 64 if wide and format == "q4" else 32
    weights = np.random.default_rng(seed).standard_normal((rows, 32 * runs), np.float32)
    packed = quant.pack(weights, format, group)
    blocks = blocks_of_packed(packed, format, rows, 32 * runs, group)
    expected = quant.unpack(packed, format, rows, 32 * runs, group)
    np.testing.assert_array_equal(dequantize(blocks, TYPE_OF_FORMAT[format]), expected)


def test_a_source_is_kept_as_it_is(tmp_path: Path) -> None:
    tensors = make_source(tmp_path / "hf")
    header = write(tmp_path / "hf", tmp_path / "out.gguf")
    for layer in range(SHAPE.layers):
        for role, name in (("gate", "ffn_gate"), ("up", "ffn_up"), ("down", "ffn_down")):
            names = [QWEN3_MOE.experts.name(layer, e, role) for e in range(SHAPE.experts)]
            merged = f"blk.{layer}.{name}_exps.weight"
            assert header.tensors[merged].type.name == "BF16"
            expected = np.stack([from_bf16(tensors[n]) for n in names])
            np.testing.assert_array_equal(values_of(header, merged), expected)
    for name, own, type in (
        ("token_embd.weight", "model.embed_tokens.weight", "BF16"),
        ("output.weight", "lm_head.weight", "BF16"),
        ("output_norm.weight", "model.norm.weight", "F32"),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", "BF16"),
        ("blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight", "F32"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight", "BF16"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", "F32"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", "F32"),
        ("blk.0.ffn_gate_inp.weight", "model.layers.0.mlp.gate.weight", "F32"),
    ):
        assert header.tensors[name].type.name == type
        np.testing.assert_array_equal(values_of(header, name), from_bf16(tensors[own]))
    assert len(header.tensors) == 3 + SHAPE.layers * 12


def test_half_precision_stays_what_it_is(tmp_path: Path) -> None:
    tensors = make_source(tmp_path / "hf", dtype="f16")
    header = write(tmp_path / "hf", tmp_path / "out.gguf")
    assert header.metadata["general.file_type"] == 1
    assert header.tensors["blk.0.ffn_up_exps.weight"].type.name == "F16"
    expected = tensors["model.layers.0.mlp.experts.1.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(values_of(header, "blk.0.ffn_up_exps.weight")[1], expected)


def test_metadata_states_the_model(tmp_path: Path) -> None:
    make_source(tmp_path / "hf")
    metadata = write(tmp_path / "hf", tmp_path / "out.gguf").metadata
    own = {k.removeprefix("qwen3moe."): v for k, v in metadata.items() if k[:9] == "qwen3moe."}
    assert own == {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "expert_feed_forward_length": 64,
        "expert_count": 4,
        "expert_used_count": 2,
        "vocab_size": 104,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6, rel=1e-6),
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 16,
    }
    assert metadata["general.file_type"] == 32
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("recipe", "types"),
    [
        (Recipe("q4", "q4", 32), {"Q4_0", "F32", "BF16"}),
        (Recipe("q4", "q8", 64), {"Q4_0", "Q8_0", "F32", "BF16"}),
        (Recipe("mxfp4", "bf16", 64), {"MXFP4", "BF16", "F32"}),
        (Recipe("q8", "q8", 64), {"Q8_0", "BF16", "F32"}),
    ],
)
def test_a_container_loses_nothing(tmp_path: Path, recipe: Recipe, types: set[str]) -> None:
    """Each value is the one that the container's packed bytes stand for."""
    make_source(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "packed", recipe)
    header = write(tmp_path / "packed", tmp_path / "out.gguf")
    assert {t.type.name for t in header.tensors.values()} == types
    widened = write(tmp_path / "packed", tmp_path / "wide.gguf", GgufRecipe("f32", "f32"))
    assert {t.type.name for t in widened.tensors.values()} == {"F32"}
    for name in header.tensors:
        np.testing.assert_array_equal(values_of(header, name), values_of(widened, name))
    packed = open_checkpoint(tmp_path / "packed", None)
    assert packed.records is not None
    record = np.fromfile(packed.records.files[1], np.uint8)
    for expert in range(SHAPE.experts):
        begin = int(packed.records.offset[1, expert, 0])
        for m, role in zip(packed.records.shape.matrices, ("gate", "up", "down"), strict=True):
            data = record[begin + m.offset : begin + m.offset + m.nbytes]
            expected = quant.unpack(data, m.format, m.rows, m.cols, m.group)
            found = values_of(header, f"blk.1.ffn_{role}_exps.weight")[expert]
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["q4", "q8", "mxfp4", "bf16"])
def test_quantising_on_the_way_is_quantising_before(
    tmp_path: Path, format: str, tied: bool
) -> None:
    """Source to GGUF gives the bytes of source to container to GGUF."""
    make_source(tmp_path / "hf", replace(SHAPE, tied=tied), dtype="f32")
    dense = "q8" if format == "mxfp4" else format
    convert(tmp_path / "hf", tmp_path / "packed", Recipe(format, dense, 32))
    write(tmp_path / "packed", tmp_path / "a.gguf", GgufRecipe(dense=dense))
    write(tmp_path / "hf", tmp_path / "b.gguf", GgufRecipe(format, dense))
    header = read_header(tmp_path / "a.gguf")
    assert ("output.weight" in header.tensors) is not tied
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_large_matrices_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_source(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "packed", Recipe("q4", "q4", 32))
    recipes = {"hf": GgufRecipe("q4", "q8"), "packed": KEPT}
    for name, recipe in recipes.items():
        write(tmp_path / name, tmp_path / f"{name}.whole.gguf", recipe)
    monkeypatch.setattr("headrace.checkpoint.values.CHUNK_BYTES", 4096)
    for name, recipe in recipes.items():
        write(tmp_path / name, tmp_path / f"{name}.gguf", recipe)
        whole = (tmp_path / f"{name}.whole.gguf").read_bytes()
        assert (tmp_path / f"{name}.gguf").read_bytes() == whole


def test_layers_for_further_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    make_source(tmp_path / "hf", replace(SHAPE, mtp=1))
    report = convert_to_gguf(tmp_path / "hf", tmp_path / "out.gguf", KEPT)
    assert not [n for n in read_header(tmp_path / "out.gguf").tensors if n.startswith("blk.2.")]
    assert any("predict further tokens" in note for note in report.notes)


# What is refused


def test_nothing_is_quantised_twice(tmp_path: Path) -> None:
    make_source(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "packed", Recipe("q4", "q8", 32))
    for recipe in (GgufRecipe("q8"), GgufRecipe("bf16"), GgufRecipe(None, "q4")):
        with pytest.raises(UnsupportedModelError, match="quantised a second time"):
            make_gguf_plan(tmp_path / "packed", recipe)
    dense = tmp_path / "dense.gguf"
    make_dense(tmp_path / "llama", "llama")
    write(tmp_path / "llama", dense, GgufRecipe(None, "q8"))
    for format in ("q8", "bf16"):
        with pytest.raises(UnsupportedModelError, match=r"second time(.|\n)*expected f32"):
            make_gguf_plan(dense, GgufRecipe(None, format))
    wide = write(dense, tmp_path / "wide.gguf", GgufRecipe(None, "f32"))
    quantised = read_header(dense)
    for name in quantised.tensors:
        np.testing.assert_array_equal(values_of(wide, name), values_of(quantised, name))


def test_rows_that_are_no_multiple_of_32_are_named(tmp_path: Path) -> None:
    make_source(tmp_path / "hf", replace(SHAPE, inner=48))
    with pytest.raises(UnsupportedModelError, match="experts of layer 0 has rows of 48 values"):
        make_gguf_plan(tmp_path / "hf", GgufRecipe("q4"))
    convert(tmp_path / "hf", tmp_path / "packed", Recipe("q4", "q8", 32))
    with pytest.raises(UnsupportedModelError, match="ask for f32"):
        make_gguf_plan(tmp_path / "packed", KEPT)
    make_gguf_plan(tmp_path / "packed", GgufRecipe("f32"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": False}, "not divided by their sum"),
        ({"use_sliding_window": True, "sliding_window": 8}, "with sliding windows"),
        ({"mlp_only_layers": [1]}, "dense layers between"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
                }
            },
            "llama3 rope",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            "yarn rope with its own factors",
        ),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    source = tmp_path / "hf"
    tensors = make_source(source)
    if "mlp_only_layers" in changes:
        kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.1.mlp.")}
        shape = {"gate": (128, 64), "up": (128, 64), "down": (64, 128)}
        kept |= {
            f"model.layers.1.mlp.{n}_proj.weight": np.zeros(s, "<u2") for n, s in shape.items()
        }
        write_safetensors(source / "model.safetensors", kept)
    (source / "config.json").write_text(json.dumps({**SHAPE.config, **changes}))
    with pytest.raises(UnsupportedModelError, match=words):
        make_gguf_plan(source, KEPT)


def test_wrong_use_is_named(tmp_path: Path) -> None:
    make_source(tmp_path / "hf")
    make_dense(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match="unknown value for experts: 'q6'"):
        GgufRecipe("q6")
    with pytest.raises(ConfigError, match="is a dense model"):
        make_gguf_plan(tmp_path / "llama", GgufRecipe("q4"))
    with pytest.raises(ConfigError, match="inside the source"):
        convert_to_gguf(tmp_path / "hf", tmp_path / "hf" / "out.gguf", KEPT)
    (tmp_path / "there.gguf").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="destination exists"):
        convert_to_gguf(tmp_path / "hf", tmp_path / "there.gguf", KEPT)
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"


def test_damage_in_the_source_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    make_source(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "packed", Recipe("q4", "q8", 32))
    layer = tmp_path / "packed" / "experts-001.safetensors"
    raw = bytearray(layer.read_bytes())
    raw[-5000] ^= 1
    layer.write_bytes(raw)
    with pytest.raises(CheckpointError, match="checksum differs: layer 1, expert 3"):
        convert_to_gguf(tmp_path / "packed", tmp_path / "out.gguf", KEPT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "packed"]


def test_a_nan_is_named(tmp_path: Path) -> None:
    tensors = make_source(tmp_path / "hf")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = 0x7FC0
    write_safetensors(tmp_path / "hf" / "model.safetensors", tensors)
    for recipe in (KEPT, GgufRecipe("q4")):
        with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight, index 197"):
            convert_to_gguf(tmp_path / "hf", tmp_path / "out.gguf", recipe)


def test_space_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_source(tmp_path / "hf")
    size = make_gguf_plan(tmp_path / "hf", KEPT).layout.file_bytes

    class Usage:
        free = size - 1

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(CheckpointError, match=f"expected {size} bytes free"):
        convert_to_gguf(tmp_path / "hf", tmp_path / "out.gguf", KEPT)
    (tmp_path / "out.gguf.tmp").write_bytes(b"left by a run that was killed")
    report = convert_to_gguf(tmp_path / "hf", tmp_path / "out.gguf", KEPT)
    assert report.total_bytes == size == (tmp_path / "out.gguf").stat().st_size


@pytest.mark.parametrize("after", [0, 1, 20])
def test_a_full_drive_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    make_source(tmp_path / "hf")
    original, left = gguf_writer.write_all, [after]

    def fail(file: Any, data: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file, data)

    monkeypatch.setattr(gguf_writer, "write_all", fail)
    with pytest.raises(CheckpointError, match=r"no space left for .*out\.gguf") as error:
        convert_to_gguf(tmp_path / "hf", tmp_path / "out.gguf", KEPT)
    assert "kept" not in str(error.value), "there is one file"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


SCRIPT = """
import sys, time
from pathlib import Path
from headrace.convert import GgufRecipe, convert_to_gguf

def progress(p):
    print(p.done_bytes, p.total_bytes, flush=True)
    time.sleep(0.002)

convert_to_gguf(Path(sys.argv[1]), Path(sys.argv[2]), GgufRecipe(), progress)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    make_source(tmp_path / "hf")
    whole = write(tmp_path / "hf", tmp_path / "whole.gguf").path.read_bytes()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    dest = tmp_path / "out.gguf"
    for lines in (1, 9, 30):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "hf"), str(dest)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            for _ in range(lines):
                assert process.stdout.readline(), "the conversion ended before it could be killed"
            process.kill()
        assert not dest.exists()
        assert dest.with_name("out.gguf.tmp").exists()
    assert write(tmp_path / "hf", dest).path.read_bytes() == whole
    assert not dest.with_name("out.gguf.tmp").exists()


# Other architectures: the fixtures in tests/models are read back to the bit; here are the names.


def make_dense(path: Path, model_type: str) -> None:
    """A dense checkpoint of the tiny shape."""
    shape = replace(SHAPE, layers=1, tied=True)
    tensors = write_checkpoint(path, shape)
    keep = {n: t for n, t in tensors.items() if ".mlp." not in n}
    if model_type == "llama":
        keep = {n: t for n, t in keep.items() if "_norm.weight" not in n or "self" not in n}
    rng = np.random.default_rng(1)
    for role, size in (("gate", (128, 64)), ("up", (128, 64)), ("down", (64, 128))):
        values = rng.standard_normal(size).astype("<f4").view("<u4") >> 16
        keep[f"model.layers.0.mlp.{role}_proj.weight"] = values.astype("<u2")
    write_safetensors(path / "model.safetensors", keep)
    unused = ("num_experts", "moe_", "norm_topk", "decoder_sparse", "mlp_only")
    config = {k: v for k, v in shape.config.items() if not k.startswith(unused)}
    (path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    put_tokenizer(path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_dense_model_is_read_back(tmp_path: Path, model_type: str) -> None:
    make_dense(tmp_path / "hf", model_type)
    write(tmp_path / "hf", tmp_path / "out.gguf")
    source, found = open_checkpoint(tmp_path / "hf", None), GgufCheckpoint(tmp_path / "out.gguf")
    assert found.config["model_type"] == model_type
    assert found.tensors.keys() == source.tensors.keys()
    for name, info in source.tensors.items():
        if len(info.shape) == 1:
            np.testing.assert_array_equal(found.load_vector(name), source.load_vector(name))
        else:
            expected, got = source.load_matrix(name), found.load_matrix(name)
            np.testing.assert_array_equal(got.data, expected.data)


# Tokenizers


def metadata_of(**changes: Any) -> dict[str, Any]:
    return vocabulary_metadata(tokenizer_json(**changes), len(TOKENS) + 3, Path("somewhere"))


def test_a_vocabulary_is_stated_with_types() -> None:
    metadata = metadata_of()
    assert metadata["tokenizer.ggml.tokens"][:4] == TOKENS[:4]
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{len(TOKENS) + 2}]"
    types = metadata["tokenizer.ggml.token_type"]
    assert types == [3, 3, 3, 4] + [1] * (len(TOKENS) - 4) + [5, 5, 5]
    assert metadata["tokenizer.ggml.merges"] == ["a b", "ab c", "\u0120 a"]
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert metadata["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_known_way_to_cut_text_comes_back(name: str) -> None:
    known = PRE_TOKENIZERS[name]
    definition = tokenizer_json(
        pre_tokenizer={"type": "Sequence", "pretokenizers": known.steps},
        normalizer={"type": "NFC"} if known.has_nfc else None,
    )
    definition["model"]["ignore_merges"] = known.ignore_merges
    metadata = vocabulary_metadata(definition, len(TOKENS), Path("somewhere"))
    found = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    assert replace(found, adds_bos=known.adds_bos) == known
    core = Core.from_str(json.dumps(definition))
    again = Core.from_str(rebuild(GgufHeader(Path("x"), 0, 0, metadata, {})))
    for text in ("abc ab a1b22<tool>", "don't</s>  x", "a  abc!?"):
        assert again.encode(text).ids == core.encode(text).ids


def test_a_token_before_and_after_a_text_is_stated() -> None:
    parts = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ]
    template = {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": {}}
    both = {"type": "Sequence", "processors": [dict(BYTE_LEVEL), template]}
    metadata = metadata_of(post_processor=both)
    assert metadata["tokenizer.ggml.add_bos_token"] and metadata["tokenizer.ggml.add_eos_token"]
    assert metadata["tokenizer.ggml.bos_token_id"] == 0
    first = metadata_of(post_processor={**template, "single": parts[:2]})
    assert first["tokenizer.ggml.add_bos_token"] and not first["tokenizer.ggml.add_eos_token"]
    twice = {**template, "single": [parts[0], parts[0], parts[1]]}
    with pytest.raises(UnsupportedModelError, match="at most one token before"):
        metadata_of(post_processor=twice)
    with pytest.raises(UnsupportedModelError, match="got RobertaProcessing"):
        metadata_of(post_processor={"type": "RobertaProcessing"})


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({}, {"byte_fallback": True}, "prepends and replaces spaces by its normalizer"),
        ({}, {"type": "Unigram"}, "got Unigram"),
        ({"normalizer": {"type": "Lowercase"}}, {}, "normalizer Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, {}, "pre-tokenizer has no known name"),
        ({}, {"ignore_merges": True}, "ignore_merges True"),
        ({"pre_tokenizer": None}, {}, "pre-tokenizer has no known name"),
    ],
)
def test_a_tokenizer_without_a_name_is_refused(
    changes: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    definition = tokenizer_json(**changes)
    definition["model"] |= model
    with pytest.raises(UnsupportedModelError, match=words):
        vocabulary_metadata(definition, len(TOKENS), Path("somewhere"))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_become_scores_and_come_back(prefix: bool) -> None:
    definition = sentencepiece_json(prefix=prefix)
    size = len(definition["model"]["vocab"])
    metadata = vocabulary_metadata(definition, size + 1, Path("somewhere"))
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    parts = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    scores = dict(zip(*parts, strict=True))
    assert scores["ab"] > scores["\u2581ab"] > scores["bab"] > scores["abab"]
    core = Core.from_str(json.dumps(definition))
    again = Core.from_str(rebuild(GgufHeader(Path("x"), 0, 0, metadata, {})))
    for text in ("ab abab", " ababab  b\u00e9", "\u65e5<s>ab</s>", "babab\nab"):
        assert again.encode(text).ids == core.encode(text).ids
        assert again.decode(again.encode(text).ids) == core.decode(core.encode(text).ids)


@pytest.mark.parametrize(
    ("merges", "words"),
    [
        ([["a", "b"], ["\u2581", "ab"], ["b", "ab"], ["ab", "ab"], ["a", "bab"]], "never joined"),
        ([["a", "bab"], ["a", "b"], ["b", "ab"], ["ab", "ab"]], "merges of 'abab' stand apart"),
    ],
)
def test_merges_that_scores_cannot_say_are_refused(merges: list[list[str]], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        vocabulary_metadata(sentencepiece_json(merges), 400, Path("somewhere"))


def test_a_space_rule_without_a_name_is_refused() -> None:
    definition = sentencepiece_json()
    cut = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer Metaspace"):
        vocabulary_metadata({**definition, "pre_tokenizer": cut}, 400, Path("somewhere"))
    del definition["model"]["vocab"]["<0x80>"]
    with pytest.raises(UnsupportedModelError, match="no token <0x80>"):
        vocabulary_metadata(definition, 400, Path("somewhere"))


def test_more_ids_than_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="more ids than the embedding has rows"):
        vocabulary_metadata(tokenizer_json(), len(TOKENS) - 1, Path("somewhere"))


def test_end_tokens_have_three_places(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    make_source(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 1, 9]}))
    report = convert_to_gguf(source, tmp_path / "out.gguf", KEPT)
    metadata = read_header(tmp_path / "out.gguf").metadata
    found = [metadata[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "eot", "eom")]
    assert found == [0, 1, 7, 2], "the tokenizer's own end token first"
    assert any("[9] are not stated" in note for note in report.notes)


# A second opinion


@pytest.mark.oracle
def test_the_reference_reader_sees_the_same(tmp_path: Path) -> None:
    """The package gguf, of the llama.cpp project, reads names, metadata and values."""
    gguf = pytest.importorskip("gguf", reason="NO ORACLE: the package `gguf` is not installed")
    make_source(tmp_path / "hf")
    for experts, dense in (("q4", "q8"), ("mxfp4", "q4"), ("bf16", "f32")):
        path = tmp_path / f"{experts}.gguf"
        header = write(tmp_path / "hf", path, GgufRecipe(experts, dense))
        reader = gguf.GGUFReader(path)
        assert [t.name for t in reader.tensors] == list(header.tensors)
        for tensor in reader.tensors:
            found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(found, values_of(header, tensor.name))
        fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert fields == header.metadata
