"""Conversion: what the container holds, that it is reproducible, and every refusal."""

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import packed_reference as reference
import pytest
from checkpoint_helpers import (
    NAMES,
    Shape,
    from_bf16,
    random_tensors,
    write_checkpoint,
    write_safetensors,
)

from headrace import _core
from headrace.checkpoint import ContainerCheckpoint, open_checkpoint
from headrace.convert import Progress, Recipe, convert
from headrace.errors import CheckpointError, ConfigError, UnsupportedModelError

RECIPES = [
    Recipe("q4", "q8", 64),
    Recipe("q4", "q4", 32),
    Recipe("q8", "q8", 64),
    Recipe("bf16", "bf16", 64),
    Recipe("mxfp4", "q8", 32),
]


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def _container(path: Path) -> ContainerCheckpoint:
    checkpoint = open_checkpoint(path, None)
    assert isinstance(checkpoint, ContainerCheckpoint)
    return checkpoint


def _record_matrices(
    checkpoint: ContainerCheckpoint, table: object, layer: int, expert: int
) -> list:
    i = table.layers.index(layer)
    data = np.fromfile(table.files[table.file[i, expert, 0]], np.uint8)
    begin = int(table.offset[i, expert, 0])
    record = data[begin : begin + table.record_bytes]
    assert begin % 4096 == 0
    assert int(_core.checksum(record)) == int(table.checksum[i, expert])
    return [
        reference.unpack_bytes(
            record[m.offset : m.offset + m.nbytes], m.format, m.rows, m.cols, m.group
        )
        for m in table.shape.matrices
    ]


def _expected(weights: np.ndarray, format: str, group: int) -> np.ndarray:
    wide = from_bf16(weights)
    packed = reference.pack(weights, format, group)
    return reference.unpack_bytes(packed, format, *wide.shape, group)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_container_holds_the_packed_weights(recipe: Recipe, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", Shape(mtp=1), shards=2)
    report = convert(tmp_path / "hf", tmp_path / "out", recipe)
    assert not report.already_done
    checkpoint = _container(tmp_path / "out")
    assert checkpoint.recipe == recipe
    for tables, layers in ((checkpoint.records, (0, 1)), (checkpoint.mtp_records, (2,))):
        assert tables is not None
        assert tables.layers == layers
        for layer in layers:
            for expert in range(4):
                got = _record_matrices(checkpoint, tables, layer, expert)
                group = recipe.group_of(recipe.experts)
                for proj, values in zip(("gate", "up", "down"), got, strict=True):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight"
                    np.testing.assert_array_equal(
                        values, _expected(tensors[name], recipe.experts, group)
                    )
    dense = {n for n in tensors if ".experts." not in n}
    assert set(checkpoint.tensors) | set(checkpoint.mtp_tensors) == dense
    assert "model.layers.2.eh_proj.weight" in checkpoint.mtp_tensors
    for name in dense:
        if tensors[name].ndim == 1:
            np.testing.assert_array_equal(checkpoint.load_vector(name), from_bf16(tensors[name]))
            continue
        matrix = checkpoint.load_matrix(name)
        if name.endswith("mlp.gate.weight"):
            assert matrix.format == "bf16", "routers stay as in the source: exact"
            np.testing.assert_array_equal(_core.unpack(matrix), from_bf16(tensors[name]))
        elif name == "model.embed_tokens.weight":
            np.testing.assert_array_equal(_core.unpack(matrix), from_bf16(tensors[name]))
        else:
            assert matrix.format == recipe.dense
            expected = _expected(tensors[name], recipe.dense, recipe.group_of(recipe.dense))
            np.testing.assert_array_equal(_core.unpack(matrix), expected)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_other_source_dtypes(dtype: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", dtype=dtype)
    convert(tmp_path / "hf", tmp_path / "out", Recipe("q8", "q8"))
    checkpoint = _container(tmp_path / "out")
    name = "model.layers.0.mlp.gate.weight"
    np.testing.assert_array_equal(_core.unpack(checkpoint.load_matrix(name)), tensors[name])
    table = checkpoint.embedding("model.embed_tokens.weight", resident=False)
    assert table.format == dtype
    ids = np.array([5, 39], np.int32)
    np.testing.assert_array_equal(table(ids), tensors["model.embed_tokens.weight"][ids])


def test_inputs_that_the_group_does_not_divide(tmp_path: Path) -> None:
    shape = Shape(hidden=72, inner=40)
    tensors = write_checkpoint(tmp_path / "hf", shape)
    convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q8", 64))
    checkpoint = _container(tmp_path / "out")
    down = _record_matrices(checkpoint, checkpoint.records, 1, 3)[2]
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert down.shape == (72, 40)
    np.testing.assert_array_equal(down, _expected(tensors[name], "q4", 64))


@pytest.mark.parametrize("resident", [True, False])
def test_untied_embedding_is_exact_in_rows(resident: bool, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    table = _container(tmp_path / "out").embedding("model.embed_tokens.weight", resident)
    assert table.is_resident is resident
    ids = np.array([0, 7, 39, 7], np.int32)
    np.testing.assert_array_equal(table(ids), from_bf16(tensors["model.embed_tokens.weight"])[ids])


def test_tied_embedding_is_packed_once(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", Shape(tied=True))
    convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q8"))
    checkpoint = _container(tmp_path / "out")
    assert "lm_head.weight" not in checkpoint.tensors
    name = "model.embed_tokens.weight"
    expected = _expected(tensors[name], "q8", 32)
    np.testing.assert_array_equal(_core.unpack(checkpoint.load_matrix(name)), expected)
    table = checkpoint.embedding(name, resident=False)
    assert table.is_resident, "a packed table cannot be read by row"
    ids = np.array([1, 39], np.int32)
    np.testing.assert_array_equal(table(ids), expected[ids])


def test_same_bytes_every_time_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", shards=2)
    shutil.copytree(tmp_path / "hf", tmp_path / "elsewhere" / "copy")
    for source, dest in (("hf", "a"), ("elsewhere/copy", "b")):
        convert(tmp_path / source, tmp_path / dest, Recipe())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {
        "config.json",
        "dense.safetensors",
        "experts-000.safetensors",
        "experts-001.safetensors",
        "generation_config.json",
        "headrace.json",
        "tokenizer.json",
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "elsewhere", "hf"]


def test_any_safetensors_tool_can_read_it(tmp_path: Path) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("ml_dtypes")  # teaches NumPy the name bfloat16
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    records = numpy_io.load_file(tmp_path / "out" / "experts-000.safetensors")
    assert set(records) == {f"layers.0.experts.{e}" for e in range(4)}
    assert numpy_io.load_file(tmp_path / "out" / "dense.safetensors")


def test_repeated_convert_has_nothing_to_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    before = contents(tmp_path / "out")
    assert convert(tmp_path / "hf", tmp_path / "out", Recipe()).already_done
    assert contents(tmp_path / "out") == before
    with pytest.raises(ConfigError, match=r"another source or recipe(?s:.*)expected recipe .*'q8'"):
        convert(tmp_path / "hf", tmp_path / "out", Recipe("q8"))
    write_checkpoint(tmp_path / "hf2", seed=2)
    with pytest.raises(ConfigError, match=r"another source or recipe(?s:.*)expected source "):
        convert(tmp_path / "hf2", tmp_path / "out", Recipe())


@pytest.mark.parametrize("kind", ["file", "directory", "other partial"])
def test_foreign_destinations_are_left_alone(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    dest = tmp_path / "out"
    if kind == "file":
        dest.write_text("mine")
    else:
        folder = dest if kind == "directory" else tmp_path / "out.partial"
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="exists"):
        convert(tmp_path / "hf", dest, Recipe())
    assert contents(tmp_path) == before


def test_empty_destination_is_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert _container(tmp_path / "out").records is not None


class Stop(Exception):
    pass


def stop_after(calls: int) -> Callable[[Progress], None]:
    left = [calls]

    def progress(_: Progress) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return progress


@pytest.mark.parametrize("calls", (0, 1, 8, 20, 25, 30))
def test_resume_keeps_finished_files(calls: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "whole", Recipe())
    with pytest.raises(Stop):
        convert(tmp_path / "hf", tmp_path / "out", Recipe(), stop_after(calls))
    assert not (tmp_path / "out").exists()
    finished = len(list((tmp_path / "out.partial").glob("*.safetensors")))
    report = convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert report.kept_files == finished
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_resume_with_other_options_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    with pytest.raises(Stop):
        convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q8", 64), stop_after(30))
    before = contents(tmp_path / "out.partial")
    with pytest.raises(ConfigError, match="another recipe") as error:
        convert(tmp_path / "hf", tmp_path / "out", Recipe("q4", "q8", 32))
    assert "'group': 32" in str(error.value)
    assert "'group': 64" in str(error.value)
    assert f"remove the directory `{tmp_path / 'out.partial'}`" in str(error.value)
    write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="another source"):
        convert(tmp_path / "other", tmp_path / "out", Recipe("q4", "q8", 64))
    assert contents(tmp_path / "out.partial") == before


@pytest.mark.parametrize("calls", [1, 2, 30])
def test_a_repaired_source_starts_anew_and_says_so(
    calls: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors = write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "whole", Recipe())
    good = (tmp_path / "hf" / "model.safetensors").read_bytes()
    tensors[name].reshape(-1)[33] = 0xFFC0
    write_safetensors(tmp_path / "hf" / "model.safetensors", tensors)
    with pytest.raises((CheckpointError, Stop)):
        convert(tmp_path / "hf", tmp_path / "out", Recipe(), stop_after(calls))
    finished = len(list((tmp_path / "out.partial").glob("*.safetensors")))
    (tmp_path / "hf" / "model.safetensors").write_bytes(good)
    report = convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert report.kept_files == 0
    assert "starting anew" in caplog.text and f"{finished} finished files" in caplog.text
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_partial_without_finished_files_gives_way_to_any_conversion(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    with pytest.raises(Stop):
        convert(tmp_path / "hf", tmp_path / "out", Recipe("q8"), stop_after(1))
    assert (tmp_path / "out.partial").is_dir()
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert _container(tmp_path / "out").recipe == Recipe()


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_source_without_a_tokenizer_is_refused_before_anything_is_written(
    damage: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    path.unlink() if damage == "missing" else path.write_text("{}")
    with pytest.raises(CheckpointError, match=f"tokenizer is {damage}: .*tokenizer.json"):
        convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("damage", ["flip", "cut", "header", "note"])
def test_damaged_finished_file_is_written_again(damage: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "whole", Recipe())
    with pytest.raises(Stop):
        convert(tmp_path / "hf", tmp_path / "out", Recipe(), stop_after(30))
    victim = tmp_path / "out.partial" / "dense.safetensors"
    assert victim.is_file()
    data = bytearray(victim.read_bytes())
    if damage == "note":
        (tmp_path / "out.partial" / "journal" / "dense.safetensors.json").write_text('{"check')
    elif damage == "cut":
        victim.write_bytes(data[:-1])
    else:
        data[20 if damage == "header" else -1] ^= 1
        victim.write_bytes(data)
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_killed_between_manifest_and_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "whole", Recipe())

    def killed(*_: object) -> None:
        raise Stop

    for step in ("shutil.rmtree", "pathlib.Path.rename"):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(step, killed)
            convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert (tmp_path / "out.partial" / "headrace.json").is_file()
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("after", [0, 1, 3, 9])
def test_full_drive_is_named_and_resumable(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "whole", Recipe())
    import headrace.checkpoint.writer as writer

    original, left = writer.write_all, [after]

    def full(file: object, data: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", full)
        with pytest.raises(CheckpointError, match="no space left for ") as error:
            convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert "run the same command again; finished files are kept" in str(error.value)
    assert not list(tmp_path.rglob("*.tmp")), "nothing half written stays"
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_too_little_space_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "hf")
    usage = shutil.disk_usage(tmp_path)._replace(free=12345)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"not enough space.*\nexpected \d+ bytes.*got 12345"):
        convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_nan_weight_is_named(name: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf")
    tensors[name].reshape(-1)[33] = 0xFFC0
    write_safetensors(tmp_path / "hf" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"weight is NaN: tensor {name}, index 33"):
        convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert not (tmp_path / "out").exists()


def test_missing_and_unexpected_tensors_are_refused_before_writing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    for name, change in (("model.norm.weight", None), ("model.odd.weight", np.zeros(3, "<u2"))):
        tensors = random_tensors(Shape())
        tensors.pop(name, None)
        if change is not None:
            tensors[name] = change
        write_safetensors(tmp_path / "hf" / "model.safetensors", tensors)
        with pytest.raises(CheckpointError, match=name):
            convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_unknown_model_and_unknown_recipe(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "nope"}))
    with pytest.raises(UnsupportedModelError, match="nope"):
        convert(tmp_path / "hf", tmp_path / "out", Recipe())
    with pytest.raises(ConfigError, match="experts"):
        Recipe(experts="q3")


def test_a_source_is_only_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    before = contents(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    for dest in ("hf/out", "hf/deep/out", "link/out"):
        with pytest.raises(ConfigError, match="inside the source"):
            convert(tmp_path / "hf", tmp_path / dest, Recipe())
    assert contents(tmp_path / "hf") == {k.removeprefix("hf/"): v for k, v in before.items()}


def test_a_link_leads_to_where_the_container_is_made(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    convert(tmp_path / "hf", tmp_path / "link", Recipe())
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "link", "out"]
    assert _container(tmp_path / "link").records is not None


def test_a_file_in_the_place_of_the_unfinished_container_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    (tmp_path / "out.partial").write_text("mine")
    with pytest.raises(ConfigError, match=r"no directory: .*out\.partial"):
        convert(tmp_path / "hf", tmp_path / "out", Recipe())
    assert (tmp_path / "out.partial").read_text() == "mine"


@pytest.mark.skipif(sys.platform == "win32", reason="no flock on Windows")
def test_two_writers_of_one_container_are_kept_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    refusals = []

    def again(_: Progress) -> None:
        if not refusals:
            with pytest.raises(ConfigError, match="another process is writing") as refusal:
                convert(tmp_path / "hf", tmp_path / "out", Recipe())
            refusals.append(refusal)

    assert not convert(tmp_path / "hf", tmp_path / "out", Recipe(), again).already_done
    assert refusals
    convert(tmp_path / "hf", tmp_path / "alone", Recipe())
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_container_is_no_source(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    with pytest.raises(CheckpointError, match="a container already"):
        convert(tmp_path / "out", tmp_path / "again", Recipe())


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    seen: list[Progress] = []
    report = convert(tmp_path / "hf", tmp_path / "out", Recipe(), seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.total_bytes
    weights = (tmp_path / "out").glob("*.safetensors")
    assert report.total_bytes == sum(p.stat().st_size for p in weights)


def test_hugging_face_and_container_name_the_same_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", Shape(mtp=1))
    convert(tmp_path / "hf", tmp_path / "out", Recipe())
    before, after = open_checkpoint(tmp_path / "hf", NAMES), _container(tmp_path / "out")
    assert {n: i.shape for n, i in before.tensors.items()} == {
        n: i.shape for n, i in after.tensors.items()
    }
    assert before.mtp_tensors.keys() == after.mtp_tensors.keys()
