"""Calibration and the comparison with the source, on the demo model's weights and tiny ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, ops, quant
from headrace.checkpoint.gguf_names import ARCHITECTURES
from headrace.checkpoint.layout import Recipe
from headrace.config import EngineConfig
from headrace.convert import convert
from headrace.convert.importance import FORMAT, PRIOR_TOKENS, Importance, read_importance
from headrace.errors import CheckpointError, ConfigError, RequestError
from headrace.study import WINDOW, calibrate, compare
from headrace.synth import SynthShape, synthesize

CONFIG = EngineConfig(memory="auto")
TEXT = "ab cd ef " * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "hf"
    shape = SynthShape(
        model_type="qwen3_moe", num_hidden_layers=2, hidden_size=128, moe_intermediate_size=32,
        num_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=600, rope_theta=1e4, rms_norm_eps=1e-6,
        max_position_embeddings=2048, norm_topk_prob=True,
    )  # fmt: skip
    synthesize(shape, path, recipe=Recipe(), format="hf")
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_calibration_sees_every_linear(source: Path, text: Path, tmp_path: Path) -> None:
    importance = calibrate(source, text, tmp_path / "cache", CONFIG)
    with LLM(source) as model:
        num_tokens = len(model.tokenizer.encode(TEXT))
        main = [n for n, i in model.checkpoint.tensors.items() if len(i.shape) == 2]
    seen = {n for n in main if "mlp.gate" not in n and "embed_tokens" not in n}
    assert set(importance.dense) == seen
    assert {sums.count for sums in importance.dense.values()} == {num_tokens}
    assert {int(s.counts.sum()) for s in importance.experts.values()} == {2 * num_tokens}
    assert set(importance.experts) == {0, 1}


def test_sums_are_those_of_the_inputs(source: Path, text: Path, tmp_path: Path) -> None:
    """The first layer's q projection is given the normed embedding, which is easily had."""
    importance = calibrate(source, text, tmp_path / "cache", CONFIG)
    with LLM(source) as model:
        ids = np.array(model.tokenizer.encode(TEXT), np.int32)
        x = model.checkpoint.embedding("model.embed_tokens.weight", resident=True)(ids)
        weight = model.checkpoint.load_vector("model.layers.0.input_layernorm.weight")
        normed = ops.rms_norm(x, weight, model.spec.rms_norm_eps)
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = (normed.astype(np.float64) ** 2).sum(axis=0)
    np.testing.assert_allclose(importance.dense[name].squares, expected, rtol=1e-12)


def test_chunks_and_memory_do_not_change_the_sums(source: Path, text: Path, tmp_path: Path) -> None:
    one = calibrate(source, text, tmp_path / "a", EngineConfig(chunk=512))
    other = calibrate(source, text, tmp_path / "b", EngineConfig(chunk=7))
    assert one.checksum == other.checksum


def test_looking_on_changes_no_score(source: Path, text: Path, tmp_path: Path) -> None:
    comparison = compare(source, source, text, CONFIG)
    assert comparison.kl_max == 0
    assert comparison.top_1_agreement == 1
    calibrate(source, text, tmp_path / "cache", CONFIG)
    with LLM(source) as model:
        ids = model.tokenizer.encode(TEXT)
        assert len(ids) <= WINDOW
        total = model.score(ids).total
    assert comparison.source_nats == pytest.approx(-total / (len(ids) - 1), rel=1e-6)


def test_activations_of_experts_are_what_down_is_given(rng: np.random.Generator) -> None:
    from headrace import _core
    from headrace.checkpoint.records import make_record_layout
    from headrace.ops import reference

    layout = make_record_layout(64, 48, "f32", 1)
    weights = {
        e: [rng.standard_normal((m.rows, m.cols)).astype(np.float32) for m in layout.matrices]
        for e in range(5)
    }
    records = {}
    for expert, matrices in weights.items():
        record = _core.aligned_empty(layout.record_bytes)
        for place, w in zip(layout.matrices, matrices, strict=True):
            record[place.offset : place.offset + place.nbytes] = quant.pack(w, "f32", 1)
        records[expert] = record
    x = rng.standard_normal((9, 64)).astype(np.float32)
    ids = np.stack([rng.permutation(5)[:2] for _ in range(9)]).astype(np.int32)
    share = rng.random((9, 2)).astype(np.float32)
    parts = [(m.format, m.rows, m.cols, m.group, m.offset) for m in layout.matrices]

    def feed() -> _core.ResidentFeed:
        held = {e: r for e, r in records.items() if e in ids}
        return _core.ResidentFeed(*parts, held)

    out, activations = ops.moe_activations(x, ids, share, feed())
    np.testing.assert_array_equal(out, ops.moe_ffn(x, ids, share, feed()))
    for t in range(9):
        for a in range(2):
            gate, up, _ = weights[int(ids[t, a])]
            packed = [_core.Matrix(_core.pack(w, "f32"), "f32", 48, 64) for w in (gate, up)]
            opened, passed = ops.linears(x[t : t + 1], packed)
            np.testing.assert_array_equal(activations[t, a], (reference.silu(opened) * passed)[0])


def test_cache_is_used_for_the_same_text_only(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = calibrate(source, text, cache, CONFIG)
    told: list[str] = []
    again = calibrate(source, text, cache, CONFIG, lambda what, *_: told.append(what))
    assert again.checksum == first.checksum
    assert not told, "nothing was run"
    text.write_text(TEXT + "gh")
    other = calibrate(source, text, cache, CONFIG, lambda what, *_: told.append(what))
    assert told
    assert other.checksum != first.checksum
    cache.write_bytes(cache.read_bytes()[:100])
    assert calibrate(source, text, cache, CONFIG).checksum == other.checksum


def test_few_tokens_are_judged_by_the_layer() -> None:
    importance = Importance()
    ids = np.array([[0]] * 99 + [[1]], np.int32)
    x = np.ones((100, 4), np.float32)
    x[99] = [8, 0, 0, 0]
    importance.add_experts(0, 3, ids, x, np.ones((100, 1, 2), np.float32))
    mean = (np.array([99 + 64, 99, 99, 99])) / 100
    for expert, own in ((1, np.array([64.0, 0, 0, 0])), (2, np.zeros(4))):
        expected = own + PRIOR_TOKENS * mean
        got = importance.of_expert(0, expert, "gate", 4)
        np.testing.assert_allclose(got, expected / expected.mean(), rtol=1e-6)
    assert importance.of_expert(7, 0, "gate", 4) is None


def test_a_coarser_copy_differs_more(source: Path, text: Path, tmp_path: Path) -> None:
    divergences = []
    for number, format in enumerate(("bf16", "q8", "q4")):
        recipe = Recipe(format, format, 64, scales="search")
        convert(source, tmp_path / str(number), recipe)
        divergences.append(compare(source, tmp_path / str(number), text, CONFIG).kl_mean)
    assert divergences[0] == 0
    assert 0 < divergences[1] < divergences[2]


def test_other_vocabulary_is_refused(source: Path, text: Path) -> None:
    with pytest.raises(RequestError, match="vocabularies differ"):
        compare(source, Path(__file__).parents[2] / "src" / "headrace" / "demo", text, CONFIG)


def test_bad_texts_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read text"):
        calibrate(source, tmp_path / "none.txt", tmp_path / "cache", CONFIG)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="text is empty"):
        compare(source, source, tmp_path / "empty.txt", CONFIG)


# llama.cpp's imatrix files


@pytest.fixture
def imatrix(tmp_path: Path) -> Callable[..., Path]:
    def write(changes: dict[str, np.ndarray | None] | None = None, kind: str = "imatrix") -> Path:
        gguf = pytest.importorskip("gguf")
        tensors = {
            "blk.0.attn_q.weight.in_sum2": np.arange(1, 65, dtype=np.float32)[None],
            "blk.0.attn_q.weight.counts": np.array([[7]], np.float32),
            "output.weight.in_sum2": np.ones((1, 64), np.float32),
            "output.weight.counts": np.array([[7]], np.float32),
        }
        for role, width in (("gate", 64), ("up", 64), ("down", 32)):
            sums = np.arange(8 * width, dtype=np.float32).reshape(8, width)
            tensors[f"blk.0.ffn_{role}_exps.weight.in_sum2"] = sums
            tensors[f"blk.0.ffn_{role}_exps.weight.counts"] = np.full((8, 1), 9, np.float32)
        tensors |= changes or {}
        path = tmp_path / "imatrix.gguf"
        writer = gguf.GGUFWriter(path, "")
        writer.add_type(kind)
        for name, array in tensors.items():
            if array is not None:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_imatrix_files_are_read(imatrix: Callable[..., Path]) -> None:
    found = read_importance(imatrix(), "qwen3_moe")
    assert set(found.dense) == {"model.layers.0.self_attn.q_proj.weight", "lm_head.weight"}
    assert ARCHITECTURES["qwen3_moe"].gguf_name("lm_head.weight") == "output.weight"
    expected = np.arange(1, 65) / 32.5
    got = found.of_dense("model.layers.0.self_attn.q_proj.weight", 64)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert found.experts[0].counts.tolist() == [9] * 8
    assert found.experts[0].hidden.shape == (8, 32)


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({}, "model", "no imatrix"),
    ({"output.weight.counts": None}, "imatrix", "output.weight.counts"),
    ({"output.weight.in_sum2": -np.ones((1, 64), np.float32)}, "imatrix", "negative"),
    ({"output.weight.in_sum2": np.full((1, 64), np.nan, np.float32)}, "imatrix", "NaN"),
    ({"blk.0.ffn_gate_exps.weight.counts": np.ones((3, 1), np.float32)}, "imatrix", "one count"),
    ({"blk.0.ffn_down_exps.weight.in_sum2": None}, "imatrix", "expected gate, up and down"),
])  # fmt: skip
def test_bad_imatrix_files_are_refused(
    changes: dict, kind: str, message: str, imatrix: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_importance(imatrix(changes, kind), "qwen3_moe")
    assert message in str(caught.value)
    assert "imatrix.gguf" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"GGUF", b"x" * 100, b"\x02\0\0\0"])
def test_what_is_no_importance_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(CheckpointError, match="bad") as caught:
        read_importance(tmp_path / "bad", "qwen3_moe")
    assert "pickle" not in str(caught.value)


def test_a_negative_sum_in_our_own_file_is_refused(tmp_path: Path) -> None:
    importance = Importance(about={"x": 1})
    importance.add_dense("w", np.ones((2, 3), np.float32))
    importance.save(tmp_path / "good")
    assert read_importance(tmp_path / "good", "any").checksum == importance.checksum
    importance.dense["w"].squares[0] = -1
    importance.save(tmp_path / "bad")
    with pytest.raises(CheckpointError, match="negative: dense/w/squares"):
        read_importance(tmp_path / "bad", "any")
    assert json.dumps(importance.about) == '{"x": 1}'


@pytest.mark.parametrize(
    "change",
    [
        {"about": np.frombuffer(b"[1, 2]", np.uint8)},
        {"about": np.frombuffer(b"[" * 5000, np.uint8)},
        {"dense/a/squares": np.ones(3), "dense/a/count": np.ones(2, np.int64)},
        {"dense/a/squares": np.ones(3)},
        {"nameless": np.ones(3)},
    ],
)
def test_malformed_importance_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    about = np.frombuffer(json.dumps({"format": FORMAT}).encode(), np.uint8)
    path = tmp_path / "bad.npz"
    with path.open("wb") as file:
        np.savez(file, **{"about": about, **change})
    with pytest.raises(CheckpointError, match="malformed importance file"):
        read_importance(path, "qwen3_moe")
