"""GGUF models of every architecture and type: experts in place, split files, what is refused."""

from pathlib import Path

import numpy as np
import pytest
from gguf_models import (
    EXPERTS,
    MIXTURES,
    mixed_types,
    model_metadata,
    model_tensors,
    write_model,
    write_split_model,
)
from tiny_gguf import pack_file
from tiny_models import logits_of, open_model, open_store

from headrace import _core
from headrace.arrays import Float32
from headrace.checkpoint import GgufCheckpoint
from headrace.checkpoint.gguf_blocks import FLOATING, QUANTISED, dequantize, packed_format
from headrace.checkpoint.gguf_header import BLOCK_TYPES, read_header
from headrace.checkpoint.gguf_names import ARCHITECTURES, EXPERT_ROLES
from headrace.checkpoint.gguf_split import read_model
from headrace.convert import GgufRecipe, convert_to_gguf
from headrace.errors import CheckpointError, EngineError, UnsupportedModelError
from headrace.inspect import verify
from headrace.models.registry import REGISTRY, load_spec

TYPES = sorted({*QUANTISED, *FLOATING})
TYPE_IDS = {type.name: id for id, type in BLOCK_TYPES.items()}


def values_of(path: Path, name: str) -> Float32:
    """A tensor's values by the NumPy specification, in its shape."""
    tensor = read_model(path).tensors[name]
    raw = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    return dequantize(raw.reshape(-1, tensor.row_bytes), tensor.type.name).reshape(tensor.shape)


def records_of(path: Path) -> dict[tuple[int, int, str], Float32]:
    """Every expert's matrices as the reader packs them, as real numbers."""
    _, checkpoint = open_model(path)
    assert checkpoint.records is not None
    found = {}
    with open_store(checkpoint, 2) as store:
        assert store is not None
        for layer in checkpoint.records.layers:
            for expert in range(EXPERTS):
                with store.acquire(layer, np.array([[expert]], np.int32)) as lease:
                    assert lease.next_ready() == [0]
                    record = lease.data(0)
                    layout = checkpoint.records.layout_of(layer)
                    for role, m in zip(EXPERT_ROLES, layout.matrices, strict=True):
                        packed = _core.aligned_empty(m.nbytes)
                        packed[:] = record[m.offset : m.offset + m.nbytes]
                        matrix = _core.Matrix(packed, m.format, m.rows, m.cols, m.group)
                        found[layer, expert, role] = _core.unpack(matrix)
                    lease.done(0)
    return found


@pytest.mark.parametrize("type", TYPES)
def test_experts_in_place_have_the_files_values(tmp_path: Path, type: str) -> None:
    path = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "F32", type)
    for (layer, expert, role), values in records_of(path).items():
        wanted = values_of(path, f"blk.{layer}.{EXPERT_ROLES[role]}")[expert]
        np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize("type", TYPES)
def test_dense_matrices_have_the_files_values(tmp_path: Path, type: str) -> None:
    checkpoint = GgufCheckpoint(write_model(tmp_path / "tiny.gguf", "qwen3", type))
    wanted = values_of(checkpoint.path, "blk.1.attn_k.weight")
    matrix = checkpoint.load_matrix("model.layers.1.self_attn.k_proj.weight")
    assert (matrix.format, matrix.group) == packed_format(type)
    assert checkpoint.info("model.layers.1.self_attn.k_proj.weight").nbytes == matrix.nbytes
    np.testing.assert_array_equal(_core.unpack(matrix), wanted)
    embedding = checkpoint.embedding("model.embed_tokens.weight", True)
    rows = embedding(np.array([7, 0], np.int32))
    np.testing.assert_array_equal(rows, values_of(checkpoint.path, "token_embd.weight")[[7, 0]])


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
@pytest.mark.parametrize("type", ["Q4_0", "Q6_K", "Q4_K", "MXFP4", "F32"])
def test_placement_does_not_change_a_bit(tmp_path: Path, model_type: str, type: str) -> None:
    path = write_model(tmp_path / "tiny.gguf", model_type, type, type)
    resident, floor = logits_of(path), logits_of(path, 2)
    assert np.isfinite(resident).all()
    assert resident.std() > 0.01
    np.testing.assert_array_equal(resident.view(np.uint32), floor.view(np.uint32))


@pytest.mark.parametrize("case", MIXTURES)
def test_every_matrix_of_a_mixture_keeps_its_own_format(tmp_path: Path, case: str) -> None:
    types = mixed_types(case)
    path = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q6_K", types)
    table = GgufCheckpoint(path).records
    assert table is not None
    for layer in (0, 1):
        found = [(m.format, m.group) for m in table.layout_of(layer).matrices]
        assert found == [packed_format(types[layer, role]) for role in EXPERT_ROLES]
    assert table.record_bytes == max(one.record_bytes for one in table.layouts)
    for (layer, expert, role), values in records_of(path).items():
        wanted = values_of(path, f"blk.{layer}.{EXPERT_ROLES[role]}")[expert]
        np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(logits_of(path), logits_of(path, 2))


@pytest.mark.parametrize("model_type", ["mixtral", "llama"])
def test_a_split_model_is_the_whole_one(tmp_path: Path, model_type: str) -> None:
    whole = write_model(tmp_path / "whole.gguf", model_type, "Q4_1", "Q4_1")
    first = write_split_model(tmp_path, model_type, "Q4_1")
    wanted = logits_of(whole)
    np.testing.assert_array_equal(logits_of(first).view(np.uint32), wanted.view(np.uint32))
    second = first.with_name("tiny-00002-of-00003.gguf")  # any part stands for the model
    np.testing.assert_array_equal(logits_of(second).view(np.uint32), wanted.view(np.uint32))
    assert GgufCheckpoint(first).fingerprint != GgufCheckpoint(whole).fingerprint


def test_parts_that_are_missing_or_strange_are_named(tmp_path: Path) -> None:
    first = write_split_model(tmp_path, "qwen3", "Q8_0")
    third = tmp_path / "tiny-00003-of-00003.gguf"
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 parts .*\nexpected tiny-00003-of-00003"):
        read_model(first)
    third.write_bytes((tmp_path / "tiny-00002-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"no part 3 of 3: .*\ngot part 1 of 3"):
        read_model(first)
    third.write_bytes(kept)
    renamed = first.rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"expected NAME-00001-of-00003\.gguf"):
        read_model(renamed)


def test_a_missing_or_misshapen_expert_tensor_is_named(tmp_path: Path) -> None:
    metadata, tensors = model_metadata("qwen3_moe"), model_tensors("qwen3_moe", "F32", "Q8_0")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        pack_file(metadata, {k: v for k, v in tensors.items() if "1.ffn_up_" not in k})
    )
    with pytest.raises(CheckpointError, match=r"missing: blk\.1\.ffn_up_exps\.weight"):
        GgufCheckpoint(path)
    path.write_bytes(pack_file(metadata | {"qwen3moe.expert_count": 3}, tensors))
    with pytest.raises(CheckpointError, match=r"expected \[3, 256, 256\], got \[4, 256, 256\]"):
        GgufCheckpoint(path)


def test_other_types_are_refused_with_those_that_run(tmp_path: Path) -> None:
    tensors = model_tensors("qwen3_moe", "F32", "Q8_0")
    raw = bytes(EXPERTS * 256 * 66)
    tensors["blk.0.ffn_up_exps.weight"] = ("IQ2_XXS", [EXPERTS, 256, 256], raw)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pack_file(model_metadata("qwen3_moe"), tensors))
    with pytest.raises(UnsupportedModelError, match=r"IQ2_XXS .*blk\.0\.ffn_up_exps.*\n.*IQ4_XS"):
        GgufCheckpoint(path)


def test_a_bad_scale_of_an_expert_is_named(tmp_path: Path) -> None:
    tensors = model_tensors("qwen3_moe", "F32", "Q8_0")
    type, shape, raw = tensors["blk.1.ffn_down_exps.weight"]
    at = (2 * 256 + 9) * 272 + 34 * 3  # expert 2, row 9, block 3
    raw = raw[:at] + b"\x00\x7c" + raw[at + 2 :]
    tensors["blk.1.ffn_down_exps.weight"] = (type, shape, raw)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pack_file(model_metadata("qwen3_moe"), tensors))
    with pytest.raises(EngineError, match=r"layer 1, expert 2, matrix down.*\n.*\[9, 96\]"):
        records_of(path)
    report = verify(path)
    assert not report.is_sound
    assert report.num_checked == len(tensors)
    assert [found.tensor for found in report.damaged] == ["blk.1.ffn_down_exps.weight"]


@pytest.mark.parametrize("model_type", sorted(REGISTRY))
@pytest.mark.parametrize("type", TYPES)
def test_gguf_to_gguf_keeps_every_tensors_bytes(tmp_path: Path, model_type: str, type: str) -> None:
    metadata, tensors = model_metadata(model_type), model_tensors(model_type, type, type)
    source, dest = tmp_path / "a.gguf", tmp_path / "b.gguf"
    source.write_bytes(pack_file(metadata, tensors))
    convert_to_gguf(source, dest, GgufRecipe())
    found = read_model(dest).tensors
    assert set(found) == set(tensors)
    for name, (kind, shape, raw) in tensors.items():
        tensor = found[name]
        assert (tensor.type.name, list(tensor.shape)) == (kind, list(shape))
        assert np.fromfile(dest, np.uint8, tensor.nbytes, offset=tensor.offset).tobytes() == raw


@pytest.mark.parametrize("parts", [1, 3])
def test_no_damage_of_a_mixture_goes_unnamed(parts: int, tmp_path: Path) -> None:
    """A header cut or with bytes changed gives a table that is checked, or an error of ours."""
    if parts == 1:
        first = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q8_0", "Q4_K")
    else:
        first = write_split_model(tmp_path, "qwen3_moe", "Q4_K", parts)
    files = sorted(tmp_path.glob("*.gguf"))
    good = {path: path.read_bytes() for path in files}
    headers = {path: read_header(path).header_bytes for path in files}
    random = np.random.RandomState(1)
    num_refused = 0
    for _ in range(300):
        path = files[random.randint(len(files))]
        raw = bytearray(good[path])
        # Names, shapes and types of tensors follow the vocabulary: damage where they stand, too.
        low = 0 if random.randint(2) else headers[path] * 3 // 4
        if random.randint(4) == 0:
            raw = raw[: random.randint(low, headers[path])]
        else:
            for at in random.randint(low, headers[path], size=random.randint(1, 4)):
                raw[at] = random.randint(256)
        path.write_bytes(raw)
        try:
            checkpoint = GgufCheckpoint(first)
            table = checkpoint.records
            assert table is not None
            sizes = np.array([file.stat().st_size for file in table.files])
            assert (table.offset >= 0).all()
            assert (table.offset + table.length <= sizes[table.file]).all()
            load_spec(checkpoint.config)
        except EngineError:
            num_refused += 1
        path.write_bytes(good[path])
    assert 100 < num_refused < 300
    assert GgufCheckpoint(first).records is not None
