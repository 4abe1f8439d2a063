"""A Hugging Face directory opened in place: exact values, complete tables, clear refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import (
    NAMES,
    Names,
    Shape,
    from_bf16,
    random_tensors,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import _core
from headrace.checkpoint import HuggingFaceCheckpoint, open_checkpoint
from headrace.errors import (
    CheckpointError,
    EngineError,
    NumericError,
    RequestError,
    UnsupportedModelError,
)
from headrace.inspect import describe


def _wide(array: np.ndarray) -> np.ndarray:
    return from_bf16(array) if array.dtype == np.uint16 else array.astype(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_dense_tensors_are_exact(dtype: str, shards: int, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, dtype=dtype, shards=shards)
    checkpoint = open_checkpoint(tmp_path, NAMES)
    dense = {name for name in tensors if ".experts." not in name}
    assert set(checkpoint.tensors) == dense
    for name in dense:
        if tensors[name].ndim == 1:
            np.testing.assert_array_equal(checkpoint.load_vector(name), _wide(tensors[name]))
            continue
        matrix = checkpoint.load_matrix(name)
        assert matrix.format == dtype
        assert matrix.nbytes == checkpoint.tensors[name].nbytes
        np.testing.assert_array_equal(_core.unpack(matrix), _wide(tensors[name]))
        wide = checkpoint.load_matrix(name, format="f32")
        np.testing.assert_array_equal(_core.unpack(wide), _wide(tensors[name]))


def test_large_matrix_is_packed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.checkpoint.values.CHUNK_BYTES", 2 * 16 * 64 * 2)
    tensors = write_checkpoint(tmp_path, Shape(vocab=77))
    matrix = open_checkpoint(tmp_path, NAMES).load_matrix("lm_head.weight")
    np.testing.assert_array_equal(_core.unpack(matrix), from_bf16(tensors["lm_head.weight"]))


def test_record_table_points_at_the_experts(tmp_path: Path) -> None:
    shape = Shape(layers=2, experts=11)
    tensors = write_checkpoint(tmp_path, shape, shards=2)
    table = open_checkpoint(tmp_path, NAMES).records
    assert table is not None
    assert table.layers == (0, 1)
    assert table.num_experts == 11
    assert table.repack == "bf16"
    assert table.record_bytes % 4096 == 0
    assert table.shape.gate.nbytes == 48 * 64 * 2
    for i, layer in enumerate(table.layers):
        for expert in range(11):
            for part, proj in enumerate(("gate_proj", "up_proj", "down_proj")):
                data = table.files[table.file[i, expert, part]].read_bytes()
                begin = int(table.offset[i, expert, part])
                got = data[begin : begin + int(table.length[i, expert, part])]
                name = NAMES.pattern.format(layer=layer, expert=expert, proj=proj)
                assert got == tensors[name].tobytes()


@pytest.mark.parametrize("resident", [True, False])
def test_embedding_rows(resident: bool, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    table = open_checkpoint(tmp_path, NAMES).embedding("model.embed_tokens.weight", resident)
    assert table.is_resident is resident
    assert (table.nbytes > 0) is resident
    ids = np.array([3, 0, 39, 3], np.int32)
    np.testing.assert_array_equal(table(ids), from_bf16(tensors["model.embed_tokens.weight"])[ids])
    assert table(np.empty(0, np.int32)).shape == (0, 64)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        table(np.array([40], np.int32))


def test_mtp_layers_are_kept_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(layers=2, mtp=1))
    checkpoint = open_checkpoint(tmp_path, NAMES)
    assert checkpoint.records is not None
    assert checkpoint.records.layers == (0, 1)
    assert checkpoint.mtp_records is not None
    assert checkpoint.mtp_records.layers == (2,)
    assert "model.layers.2.eh_proj.weight" in checkpoint.mtp_tensors
    assert not any(n.startswith("model.layers.2.") for n in checkpoint.tensors)


def test_dense_model_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros((4, 4), "<u2")})
    assert open_checkpoint(tmp_path, None).records is None


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, seed=seed)
    first, same, other = (open_checkpoint(tmp_path / n, NAMES).fingerprint for n in "abc")
    assert first == same != other
    (tmp_path / "a" / "tokenizer.json").write_text("[]")
    assert open_checkpoint(tmp_path / "a", NAMES).fingerprint != first


def _rewrite(path: Path, **changes: np.ndarray | None) -> None:
    tensors = random_tensors(Shape())
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    write_safetensors(path / "model.safetensors", tensors)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({EXPERT: None}, "tensor is missing: up matrix of layer 1, expert 2"),
        ({EXPERT: np.zeros((47, 64), "<u2")}, "wrong shape or dtype: " + EXPERT),
        ({EXPERT: np.zeros((48, 64), "<f2")}, "wrong shape or dtype: " + EXPERT),
        ({EXPERT.replace("2", "4"): np.zeros((48, 64), "<u2")}, "layer 1.*\n.*got 5.*expert 4"),
    ],
)
def test_incomplete_experts_are_refused(
    changes: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    _rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path, NAMES)


def test_whole_expert_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(experts=4))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 5}))
    with pytest.raises(CheckpointError, match="expected 5 experts, got 4"):
        open_checkpoint(tmp_path, NAMES)


def test_names_that_match_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no experts"):
        open_checkpoint(tmp_path, Names(pattern="x.{layer}.{expert}.{proj}"))


def test_unknown_dtype_is_unsupported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    _rewrite(tmp_path, **{"lm_head.weight": np.zeros((40, 64), "|u1")})
    with pytest.raises(UnsupportedModelError, match=r"dtype U8: lm_head\.weight"):
        open_checkpoint(tmp_path, NAMES).load_matrix("lm_head.weight")


@pytest.mark.parametrize(
    ("value", "kind"), [(0x7F80, "infinity"), (0xFF80, "infinity"), (0x7FC1, "NaN")]
)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
def test_nan_is_named_with_its_index(value: int, kind: str, name: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    bad = tensors[name].copy()
    bad.reshape(-1)[37] = value
    _rewrite(tmp_path, **{name: bad})
    checkpoint = open_checkpoint(tmp_path, NAMES)
    with pytest.raises(CheckpointError, match=f"weight is {kind}: tensor {name}, index 37"):
        checkpoint.load_matrix(name) if bad.ndim == 2 else checkpoint.load_vector(name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)
config_keys = st.sampled_from(sorted(Shape(mtp=1).config))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.dictionaries(config_keys, json_values, max_size=3),
    index=st.none() | json_values | st.dictionaries(st.just("weight_map"), json_values),
    names=st.dictionaries(st.sampled_from(["model.norm.weight", "x"]), st.text(max_size=4)),
)
def test_fuzz_config_and_index(
    changes: dict[str, Any], index: Any, names: dict[str, str], tmp_path: Path
) -> None:
    """Whatever the small files say: a checkpoint and its model open, or say what is wrong."""
    if not (tmp_path / "model-00001-of-00002.safetensors").exists():
        write_checkpoint(tmp_path, Shape(mtp=1), shards=2)
        shutil.copy(tmp_path / "model.safetensors.index.json", tmp_path / "index")
    (tmp_path / "config.json").write_text(json.dumps({**Shape(mtp=1).config, **changes}))
    weight_map = json.loads((tmp_path / "index").read_text())["weight_map"]
    content = {"weight_map": {**weight_map, **names}} if index is None else index
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    try:
        describe(tmp_path)
    except EngineError as error:
        assert str(error)


def test_wrong_kind_of_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "none", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(tmp_path / "file", None)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        HuggingFaceCheckpoint(tmp_path, None)


def test_file_cut_after_opening(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path, NAMES)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 8)
    with pytest.raises(CheckpointError, match="file is short"):
        for name, info in checkpoint.tensors.items():
            if len(info.shape) == 2:
                checkpoint.load_matrix(name)


@pytest.mark.parametrize("bits", [0x7F80, 0xFFC0])
def test_an_embedding_row_from_the_drive_that_is_not_finite_is_named(
    bits: int, tmp_path: Path
) -> None:
    tensors = write_checkpoint(tmp_path)
    tensors["model.embed_tokens.weight"][7, 63] = bits
    write_safetensors(tmp_path / "model.safetensors", tensors)
    table = open_checkpoint(tmp_path, NAMES).embedding("model.embed_tokens.weight", resident=False)
    table(np.array([3, 6, 8], np.int32))
    with pytest.raises(NumericError, match="embedding of token 7 is not finite"):
        table(np.array([3, 7], np.int32))
