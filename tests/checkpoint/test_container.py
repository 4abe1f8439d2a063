"""A container that was damaged: every kind of damage is refused or named, by file and tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import Shape, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import _core
from headrace.checkpoint import ContainerCheckpoint, open_checkpoint
from headrace.checkpoint.jsonfile import canonical_json
from headrace.checkpoint.layout import DenseTensor, manifest_checksum
from headrace.convert import Recipe, convert
from headrace.errors import CheckpointError, EngineError, MemoryBudgetError
from headrace.inspect import describe, verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("container")
    write_checkpoint(path / "hf", Shape(mtp=1))
    convert(path / "hf", path / "out", Recipe())
    return path / "out"


@pytest.fixture
def container(pristine: Path, tmp_path: Path) -> Path:
    dest = tmp_path / "out"
    dest.mkdir()
    for file in pristine.iterdir():
        (dest / file.name).write_bytes(file.read_bytes())
    return dest


def open_container(path: Path) -> ContainerCheckpoint:
    checkpoint = open_checkpoint(path, None)
    assert isinstance(checkpoint, ContainerCheckpoint)
    return checkpoint


def edit(container: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = container / "headrace.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_fingerprint_follows_the_manifest(container: Path) -> None:
    first = open_checkpoint(container, None).fingerprint
    edit(container, lambda m: m["source"].update(fingerprint="other"))
    assert open_checkpoint(container, None).fingerprint != first


def edit_header(path: Path, name: str, **fields: Any) -> None:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header[name].update(fields)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(data[:8] + text.ljust(start - 8) + data[start:])


@pytest.mark.parametrize(
    ("file", "name", "fields"),
    [
        ("experts-001.safetensors", "layers.1.experts.2", {"dtype": "I8"}),
        ("dense.safetensors", "lm_head.weight", {"dtype": "I8"}),
        ("dense.safetensors", "model.norm.weight", {"dtype": "I32"}),
        ("dense.safetensors", "model.embed_tokens.weight", {"dtype": "F16"}),
        ("dense.safetensors", "model.embed_tokens.weight", {"shape": [64, 40]}),
    ],
)
def test_header_of_another_dtype_or_shape_is_refused(
    file: str, name: str, fields: dict[str, Any], container: Path
) -> None:
    edit_header(container / file, name, **fields)
    with pytest.raises(CheckpointError, match="wrong dtype or shape") as error:
        open_checkpoint(container, None)
    assert name in str(error.value) and file in str(error.value)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other format": (lambda m: m.update(format="zip"), "format"),
    "newer version": (lambda m: m.update(version=2), "another format version"),
    "version true": (lambda m: m.update(version=True), "another format version"),
    "no recipe": (lambda m: m.pop("recipe"), "recipe"),
    "unknown recipe": (lambda m: m["recipe"].update(experts="q3"), "recipe"),
    "recipe of lists": (lambda m: m["recipe"].update(experts=[]), "recipe"),
    "recipe of other experts": (lambda m: m["recipe"].update(experts="q8"), "by the recipe"),
    "recipe of another group": (lambda m: m["recipe"].update(group=32), "by the recipe"),
    "recipe of other dense": (lambda m: m["recipe"].update(dense="bf16"), "by the recipe"),
    "other model_type": (lambda m: m.update(model_type="mixtral"), "model_type"),
    "no model_type": (lambda m: m.pop("model_type"), "model_type"),
    "recipe with more": (lambda m: m["recipe"].update(more=1), "recipe"),
    "dense file elsewhere": (lambda m: m["dense"].update(file="../x"), r"dense\.file"),
    "expert file elsewhere": (
        lambda m: m["experts"]["layers"]["0"].update(file="/etc/passwd"),
        r"experts\.layers\.0\.file",
    ),
    "layer is no number": (lambda m: m["experts"]["layers"].update(x={}), "layer numbers"),
    "layer with zeros": (lambda m: m["experts"]["layers"].update({"007": {}}), "layer numbers"),
    "no layers": (lambda m: m["experts"].update(layers={}), "at least one layer"),
    "too few checksums": (
        lambda m: m["experts"]["layers"]["0"]["checksums"].pop(),
        "4 checksums",
    ),
    "checksum is no hex": (
        lambda m: m["experts"]["layers"]["0"]["checksums"].__setitem__(0, "+123456789abcdef"),
        "16 lower-case",
    ),
    "huge num_experts": (lambda m: m["experts"].update(num_experts=1 << 30), "checksums"),
    "other record length": (
        lambda m: m["experts"]["layout"].update(record_bytes=8192 * 512),
        r"experts\.layout",
    ),
    "layout of huge matrices": (
        lambda m: m["experts"]["layout"]["gate"].update(rows=(1 << 31) - 1, cols=(1 << 31) - 1),
        "positive rows and cols",
    ),
    "layout of another format": (
        lambda m: m["experts"]["layout"]["gate"].update(format="q4", group=16),
        "a format and its group",
    ),
    "dense shape": (
        lambda m: m["dense"]["tensors"]["lm_head.weight"].update(shape=[1 << 40, 2]),
        "positive counts",
    ),
    "dense shape too small": (
        lambda m: m["dense"]["tensors"]["lm_head.weight"].update(shape=[16, 64]),
        "nbytes",
    ),
    "dense group": (
        lambda m: m["dense"]["tensors"]["lm_head.weight"].update(group=True),
        "a format and its group",
    ),
    "dense tensor dropped": (
        lambda m: m["dense"]["tensors"].pop("model.norm.weight"),
        "different tensors",
    ),
    "dense tensor added": (
        lambda m: m["dense"]["tensors"].update(x=m["dense"]["tensors"]["model.norm.weight"]),
        "different tensors",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_manifest_is_not_believed(case: str, container: Path) -> None:
    change, message = CHANGES[case]
    edit(container, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(container, None)


@pytest.mark.parametrize("name", ["dense.safetensors", "experts-001.safetensors", "config.json"])
def test_missing_file(name: str, container: Path) -> None:
    (container / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(container, None)


@pytest.mark.parametrize("name", ["dense.safetensors", "experts-001.safetensors"])
def test_truncated_file(name: str, container: Path) -> None:
    data = (container / name).read_bytes()
    for length in (len(data) - 1, len(data) // 2, 4096, 9, 0):
        (container / name).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(container, None)


def test_files_of_two_layers_swapped(container: Path) -> None:
    first, second = container / "experts-000.safetensors", container / "experts-001.safetensors"
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(CheckpointError, match="full set"):
        open_checkpoint(container, None)


def test_flipped_byte_in_dense_is_found_on_load(container: Path) -> None:
    entry = open_checkpoint(container, None).entries["lm_head.weight"]
    flip(container / "dense.safetensors", entry.offset + 77)
    checkpoint = open_checkpoint(container, None)
    checkpoint.load_matrix("model.layers.0.mlp.gate.weight")
    with pytest.raises(CheckpointError, match=r"checksum differs: lm_head\.weight") as error:
        checkpoint.load_matrix("lm_head.weight")
    assert f"offset {entry.offset}" in str(error.value)


def read_all_ahead(checkpoint: ContainerCheckpoint) -> None:
    checkpoint.read_ahead(dict.fromkeys(checkpoint.tensors))


def test_tensors_read_ahead_are_those_read_one_by_one(container: Path) -> None:
    ahead, alone = open_container(container), open_container(container)
    read_all_ahead(ahead)
    for name, info in alone.tensors.items():
        if len(info.shape) == 1:
            assert ahead.load_vector(name).tobytes() == alone.load_vector(name).tobytes()
        elif alone.dense[name].kind == "matrix":
            one, other = ahead.load_matrix(name), alone.load_matrix(name)
            assert one.data.tobytes() == other.data.tobytes()
            assert one.data.ctypes.data % 4096 == 0  # direct reads went straight to it
        else:
            ids = np.arange(info.shape[0], dtype=np.int32)
            table = ahead.embedding(name, resident=True)(ids)
            assert table.tobytes() == alone.embedding(name, resident=True)(ids).tobytes()


def test_a_flipped_byte_is_found_while_all_is_read_ahead(container: Path) -> None:
    names = ("model.layers.1.self_attn.o_proj.weight", "model.norm.weight")
    entries = [open_container(container).entries[name] for name in names]
    for entry in entries:
        flip(container / "dense.safetensors", entry.offset + 5)
    with pytest.raises(CheckpointError) as error:
        read_all_ahead(open_container(container))
    named = next(e for e in entries if e.name in str(error.value))
    path = container / "dense.safetensors"
    assert str(error.value).startswith(f"checksum differs: {named.name}, file {path}")
    assert f"at offset {named.offset}" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("end", "file is short: {}, file"), ("eio", "file cannot be read: {}, file")],
)
def test_a_tensor_that_cannot_be_read_ahead_is_named(
    container: Path, kind: str, expected: str
) -> None:
    checkpoint = open_container(container)
    entry = checkpoint.entries["lm_head.weight"]
    _core.inject_fault(kind, count=-1, path_contains="dense", offset=entry.offset)
    try:
        with pytest.raises(CheckpointError, match=expected.format(r"lm_head\.weight")) as error:
            read_all_ahead(checkpoint)
        assert _core.num_faults_fired() > 0
    finally:
        _core.clear_faults()
    assert f"at offset {entry.offset}" in str(error.value)


def test_memory_for_tensors_that_the_system_refuses(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_container(container)
    monkeypatch.setattr(DenseTensor, "stored_bytes", 1 << 50)
    with pytest.raises(MemoryBudgetError, match=r"the system refused \d+ bytes of memory"):
        read_all_ahead(checkpoint)


def test_verify_names_every_damaged_range(container: Path) -> None:
    assert verify(container).is_sound
    table = open_checkpoint(container, None).records
    assert table is not None
    offset = int(table.offset[1, 2, 0])
    flip(container / "experts-001.safetensors", offset + 4097)
    flip(container / "experts-002.safetensors", 4096)
    norm = open_checkpoint(container, None).entries["model.norm.weight"]
    flip(container / "dense.safetensors", norm.offset)
    seen: list[tuple[str, int, int]] = []
    report = verify(container, lambda *args: seen.append(args))
    assert not report.is_sound
    assert report.has_checksums
    assert {(d.file, d.tensor) for d in report.damaged} == {
        ("experts-001.safetensors", "layers.1.experts.2"),
        ("experts-002.safetensors", "layers.2.experts.0"),
        ("dense.safetensors", "model.norm.weight"),
    }
    assert offset in {d.offset for d in report.damaged}
    assert seen[-1][1] == seen[-1][2] == report.checked_bytes


def test_verify_finds_a_flipped_bit_in_every_file(container: Path) -> None:
    names = [p.name for p in container.iterdir()]
    assert {"config.json", "generation_config.json", "headrace.json"} <= set(names)
    rng = np.random.default_rng(0)
    for name in names:
        path = container / name
        whole = path.read_bytes()
        for offset in {0, len(whole) - 1, *rng.integers(0, len(whole), 25).tolist()}:
            changed = bytearray(whole)
            changed[offset] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(changed)
            try:
                found = [d.file for d in verify(container).damaged]
            except EngineError as error:  # it cannot even be opened
                found = [name] if name in str(error) else [str(error)]
            assert name in found, (name, offset)
        path.write_bytes(whole)
    dense = container / "dense.safetensors"
    dense.write_bytes(dense.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"after the last tensor: file .*dense\.safetensors"):
        verify(container)


def test_every_byte_of_a_record_is_covered(container: Path) -> None:
    path = container / "experts-000.safetensors"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for offset in rng.integers(4096, len(whole), 25):
        flip(path, int(offset))
        assert len(verify(container).damaged) == 1
        path.write_bytes(whole)


def test_describe_is_json_and_adds_up(container: Path) -> None:
    summary = json.loads(json.dumps(describe(container)))
    assert summary["kind"] == "container"
    assert summary["recipe"] == {"experts": "q4", "dense": "q8", "group": 64}
    experts = summary["experts"]
    assert experts["num_records"] == 8
    assert experts["bytes"] == 8 * experts["record_bytes"]
    assert experts["working_set_bytes"] == 2 * 2 * experts["record_bytes"]
    assert summary["mtp_layers"] == [2]
    dense = summary["dense"]
    assert dense["bytes"] == (
        dense["matrix_bytes"] + dense["embedding_bytes"] + dense["vector_bytes"]
    )
    assert summary["file_bytes"] == sum(f["bytes"] for f in summary["files"])


def test_files_that_the_manifest_has_no_checksum_of_are_named(container: Path) -> None:
    assert verify(container).unrecorded == ()
    (container / "chat_template.jinja").write_text("{{ messages }}")
    assert verify(container).unrecorded == ("chat_template.jinja",)
    manifest = json.loads((container / "headrace.json").read_bytes())
    del manifest["files"], manifest["checksum"]
    manifest["checksum"] = manifest_checksum(manifest)
    (container / "headrace.json").write_bytes(canonical_json(manifest))
    report = verify(container)
    assert report.is_sound, "made before there were checksums of small files"
    assert {"config.json", "chat_template.jinja"} <= set(report.unrecorded)


def test_hugging_face_is_described_and_verified_too(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, Shape(experts=4))
    summary = describe(tmp_path)
    assert summary["kind"] == "huggingface"
    assert summary["experts"]["in_place"]
    report = verify(tmp_path)
    assert report.is_sound
    assert not report.has_checksums
    assert report.checked_bytes == sum(a.nbytes for a in tensors.values())


paths = st.sampled_from(
    [
        ("format",),
        ("version",),
        ("recipe",),
        ("recipe", "experts"),
        ("source",),
        ("dense",),
        ("dense", "tensors"),
        ("dense", "tensors", "lm_head.weight"),
        *(("dense", "tensors", "lm_head.weight", k) for k in ("kind", "format", "group", "shape")),
        *(("dense", "tensors", "model.norm.weight", k) for k in ("kind", "nbytes", "checksum")),
        ("experts",),
        ("experts", "num_experts"),
        ("experts", "layers"),
        ("experts", "layers", "1"),
        ("experts", "layers", "1", "checksums"),
        ("experts", "layout"),
        ("experts", "layout", "down"),
        *(("experts", "layout", "gate", k) for k in ("rows", "cols", "format", "group", "offset")),
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.lists(st.tuples(paths, values), min_size=1, max_size=3), cut=st.integers(0, 5000))
def test_fuzz_manifest(
    changes: list[tuple[tuple[str, ...], Any]], cut: int, container: Path
) -> None:
    path = container / "headrace.json"
    original = path.read_text()
    manifest = json.loads(original)
    for keys, value in changes:
        node = manifest
        for key in keys[:-1]:
            node = node[key] if isinstance(node, dict) and key in node else {}
        if isinstance(node, dict):
            node[keys[-1]] = value
    text = json.dumps(manifest)
    path.write_text(text[:cut] if cut < 300 else text)
    try:
        open_checkpoint(container, None)
    except CheckpointError as error:
        assert str(error)
    finally:
        path.write_text(original)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1))
def test_fuzz_manifest_bytes(flips: list[tuple[int, int]], container: Path) -> None:
    path = container / "headrace.json"
    original = path.read_bytes()
    data = bytearray(original)
    for at, value in flips:
        data[at % len(data)] ^= value
    path.write_bytes(data)
    try:
        open_checkpoint(container, None)
    except CheckpointError as error:
        assert str(error)
    finally:
        path.write_bytes(original)
