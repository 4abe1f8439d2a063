"""Synthetic checkpoints: sound, reproducible, and routed like trained models."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import packed_reference as reference
import pytest
from tokenizers import Tokenizer

from headrace import ops
from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.config import ExpertConfig
from headrace.convert import Recipe, convert
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.experts import ExpertStore
from headrace.experts.trace import read_trace
from headrace.inspect import open_model, verify
from headrace.models.registry import build_model
from headrace.state import StepRows
from headrace.synth import SHAPES, SynthShape, find_shape, synthesize
from headrace.synth.model import SynthModel

TINY = SynthShape(
    model_type="qwen3_moe",
    num_hidden_layers=3,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    vocab_size=2048,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    norm_topk_prob=True,
)


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synth") / "tiny"
    synthesize(TINY, path, recipe=Recipe())
    return path


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe("mxfp4", "bf16"), Recipe("q8", "q4", 32), Recipe("f32", "f32")]
)
def test_container_is_sound(recipe: Recipe, tmp_path: Path) -> None:
    report = synthesize(TINY, tmp_path / "out", recipe=recipe)
    assert verify(tmp_path / "out").is_sound
    spec, checkpoint = open_model(tmp_path / "out")
    build_model(spec, checkpoint)
    weights = (tmp_path / "out").glob("*.safetensors")
    assert report.total_bytes == sum(p.stat().st_size for p in weights)


def test_other_architectures_open(tmp_path: Path) -> None:
    for model_type in ("olmoe", "mixtral"):
        fields = {**TINY.__dict__, "model_type": model_type, "num_key_value_heads": 4}
        synthesize(SynthShape(**fields), tmp_path / model_type, recipe=Recipe())
        build_model(*open_model(tmp_path / model_type))


def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert synthesize(TINY, tiny, recipe=Recipe()).already_done
    synthesize(TINY, tmp_path / "same", recipe=Recipe())
    assert contents(tmp_path / "same") == contents(tiny)
    synthesize(TINY, tmp_path / "other", recipe=Recipe(), seed=1)
    assert contents(tmp_path / "other") != contents(tiny)


@pytest.mark.parametrize("format", ["container", "hf"])
def test_interrupted_run_is_resumed(format: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(name: str, done: int, total: int) -> None:
        if done > total * 0.8:
            raise Stop

    with pytest.raises(Stop):
        synthesize(TINY, tmp_path / "out", recipe=Recipe(), format=format, progress=stop)
    assert len(list((tmp_path / "out.partial").glob("*.safetensors"))) >= 2
    synthesize(TINY, tmp_path / "out", recipe=Recipe(), format=format)
    synthesize(TINY, tmp_path / "whole", recipe=Recipe(), format=format)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_hugging_face_form_opens_and_converts(tmp_path: Path) -> None:
    synthesize(TINY, tmp_path / "hf", recipe=Recipe(), format="hf")
    spec, checkpoint = open_model(tmp_path / "hf")
    assert checkpoint.records is not None
    assert checkpoint.records.repack == "bf16"
    build_model(spec, checkpoint)
    convert(tmp_path / "hf", tmp_path / "out", Recipe())


def _record(checkpoint: Checkpoint, layer: int, expert: int) -> list[np.ndarray]:
    table = checkpoint.records
    assert table is not None
    data = np.fromfile(table.files[table.file[layer, expert, 0]], np.uint8)
    data = data[int(table.offset[layer, expert, 0]) :]
    return [
        reference.unpack_bytes(
            data[m.offset : m.offset + m.nbytes], m.format, m.rows, m.cols, m.group
        )
        for m in table.shape.matrices
    ]


@pytest.mark.parametrize("experts", ["q4", "q8", "mxfp4", "bf16"])
def test_weights_have_zero_mean_and_the_wanted_spread(experts: str, tmp_path: Path) -> None:
    synthesize(TINY, tmp_path / "out", recipe=Recipe(experts))
    checkpoint = open_checkpoint(tmp_path / "out", None)
    gate, up, down = _record(checkpoint, 1, 5)
    for matrix in (gate, up):
        assert abs(matrix.mean()) < 4 * matrix.std() / np.sqrt(matrix.size)
        assert 0.7 < matrix.std() * np.sqrt(256) < 1.45
    assert not down[:64].any(), "nothing writes to the constant entries"
    assert down[64:].std() > 0
    assert not np.array_equal(gate, up)
    assert not np.array_equal(gate, _record(checkpoint, 1, 6)[0])


def _unpack(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return ops.embedding(
        np.arange(checkpoint.tensors[name].shape[0], dtype=np.int32), checkpoint.load_matrix(name)
    )


@pytest.mark.parametrize("dense", ["q8", "q4", "bf16"])
def test_head_is_blind_to_the_constant_and_never_ends(dense: str, tmp_path: Path) -> None:
    synthesize(TINY, tmp_path / "out", recipe=Recipe("q4", dense))
    head = _unpack(open_checkpoint(tmp_path / "out", None), "lm_head.weight")
    assert not head[:, :64].any()
    assert not head[-1].any()
    assert len(np.unique(head, axis=0)) == len(head), "equal rows would make equal scores"


def test_any_id_decodes_and_text_encodes_to_bytes(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    text = "Once upon a time, é ☃\n"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()), "one id per byte"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([300, 2046]) == " w300 w2046"
    assert tokenizer.token_to_id("<|end|>") == 2047
    assert json.loads((tiny / "generation_config.json").read_text())["eos_token_id"] == 2047


def test_routing_is_skewed_and_sticky_and_text_does_not_collapse(
    tiny: Path, tmp_path: Path
) -> None:
    spec, checkpoint = open_model(tiny)
    model = build_model(spec, checkpoint)
    prompt = np.random.default_rng(0).integers(32, 127, 96, np.int32)
    assert checkpoint.records is not None
    readers = ExpertConfig(readers=2, trace=tmp_path / "routing")
    store = ExpertStore(checkpoint.records, num_slots=96, readers=readers)
    kv = model.make_state(4, "f16")
    rows = StepRows.for_sequence(0, len(prompt), range(4))
    store.note_step([(0, len(prompt), True)])
    logits = model(prompt, rows, kv, store, np.array([len(prompt) - 1], np.int32))
    text = []
    for position in range(len(prompt), len(prompt) + 96):
        text.append(int(logits[0].argmax()))
        rows = StepRows.for_sequence(position, 1, range(4))
        store.note_step([(0, 1, False)])
        logits = model(np.array(text[-1:], np.int32), rows, kv, store, np.zeros(1, np.int32))
    store.close()
    assert len(set(text)) > 48, "greedy text does not run in circles"
    assert TINY.vocab_size - 1 not in text
    top, overlap = [], []
    routing = read_trace(tmp_path / "routing").native
    visits = [routing.visit(index) for index in range(routing.num_visits)]
    for layer in range(3):
        ids = np.concatenate([ids for row, ids in visits if row == layer])
        # The last layer's mixture runs for the rows that are scored alone.
        assert len(ids) == (97 if layer == 2 else 192)
        counts = np.sort(np.bincount(ids.ravel(), minlength=32))[::-1]
        top.append(counts[:3].sum() / counts.sum())
        overlap.append(np.mean([len(np.intersect1d(a, b)) / 4 for a, b in pairwise(ids)]))
    assert 0.15 < np.mean(top) < 0.6, "uniform routing gives the top 3 of 32 a share of 0.09"
    assert 0.2 < np.mean(overlap) < 0.7, "uniform routing gives 0.125"


def test_skew_decides_how_uneven_the_popularity_is(tiny: Path, tmp_path: Path) -> None:
    def popularity(skew: float) -> np.ndarray:
        return SynthModel(TINY, 0, skew).router(0)[:, :64].sum(axis=1)

    assert not popularity(0.0).any(), "all experts are equally popular"
    assert np.ptp(popularity(1.2)) == pytest.approx(2 * np.ptp(popularity(0.6)), rel=1e-4)
    synthesize(TINY, tmp_path / "even", recipe=Recipe(), skew=0.0)
    assert contents(tmp_path / "even") != contents(tiny)
    with pytest.raises(ConfigError, match=r"skew.*\nexpected 0\.\.10, got -1"):
        synthesize(TINY, tmp_path / "bad", recipe=Recipe(), skew=-1.0)


def test_named_shapes() -> None:
    assert {"qwen3-30b-a3b", "olmoe-7b"} <= set(SHAPES)
    for name in ("gpt-oss-120b", "glm-5.2"):
        with pytest.raises(UnsupportedModelError, match=name):
            find_shape(name)
    with pytest.raises(ConfigError, match="unknown shape"):
        find_shape("nope")
    with pytest.raises(ConfigError, match=r"expected 1\.\.48"):
        find_shape("qwen3-30b-a3b").with_layers(49)
    with pytest.raises(ConfigError, match="unknown format"):
        synthesize(TINY, Path("nowhere"), recipe=Recipe(), format="zip")
