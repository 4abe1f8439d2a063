"""Every check on safetensors headers, and a fuzz test that only CheckpointError may leave."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import header_of, write_raw, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint import read_config
from headrace.checkpoint.safetensors import read_directory, read_header
from headrace.errors import CheckpointError

GOOD = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.arange(4, dtype="<u2")}


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, GOOD)
    header = read_header(path)
    assert header.tensors["a"].shape == (2, 3)
    assert header.tensors["b"].dtype == "BF16"
    entry = header.tensors["b"]
    assert path.read_bytes()[entry.offset : entry.offset + entry.nbytes] == GOOD["b"].tobytes()


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    numpy_io.save_file(
        {"a": GOOD["a"], "h": np.ones((3, 5), np.float16)}, tmp_path / "x", metadata={"k": "v"}
    )
    header = read_header(tmp_path / "x")
    assert header.metadata == {"k": "v"}
    data = (tmp_path / "x").read_bytes()
    entry = header.tensors["a"]
    assert data[entry.offset :][: entry.nbytes] == GOOD["a"].tobytes()


def _changed(**changes: Any) -> dict[str, Any]:
    header = header_of(GOOD)
    header["a"] = {**header["a"], **changes}
    return header


DATA = b"".join(a.tobytes() for a in GOOD.values())
BAD = {
    "empty object is no tensor": (b'{"a":{}}', "malformed tensor description"),
    "not JSON": (b"{", "malformed JSON"),
    "not UTF-8": (b"\xff\xfe{}", "malformed JSON"),
    "not an object": (b"[1]", "malformed JSON"),
    "NaN": (b'{"a":NaN}', "NaN is not JSON"),
    "deep nesting": (b"[" * 200_000, "malformed JSON"),
    "huge integer": (b'{"a":' + b"9" * 10_000 + b"}", "malformed JSON"),
    "key twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        "appears twice",
    ),
    "metadata of numbers": (b'{"__metadata__":{"a":1}}', "__metadata__"),
    "unknown dtype": (_changed(dtype="F128"), "unknown dtype"),
    "dtype is a list": (_changed(dtype=["F32"]), "unknown dtype"),
    "shape is negative": (_changed(shape=[2, -3]), "malformed shape"),
    "shape is true": (_changed(shape=[True, 6]), "malformed shape"),
    "shape is long": (_changed(shape=[1] * 1000), "malformed shape"),
    "shape overflows": (_changed(shape=[1 << 62, 1 << 62]), "does not fit its shape"),
    "length for another shape": (_changed(shape=[2, 2]), "does not fit its shape"),
    "length for another dtype": (_changed(dtype="F16"), "does not fit its shape"),
    "half a byte": (_changed(dtype="F4", shape=[49]), "does not fit its shape"),
    "offsets reversed": (_changed(data_offsets=[24, 0]), "outside its file"),
    "offsets past the end": (_changed(data_offsets=[16, 40]), "outside its file"),
    "offsets astronomical": (_changed(data_offsets=[0, (1 << 63) - 1]), "outside its file"),
    "three offsets": (_changed(data_offsets=[0, 8, 24]), "malformed data_offsets"),
    "offsets of text": (_changed(data_offsets=["0", "24"]), "malformed data_offsets"),
    "overlap": (_changed(shape=[2, 4], data_offsets=[0, 32]), "overlap"),
    "hole before the first": (_changed(data_offsets=[8, 32]), "between the header and a"),
    "hole between two": (_changed(shape=[2, 2], data_offsets=[0, 16]), "between a and b"),
}


@pytest.mark.parametrize("extra", [1, 4096])
@pytest.mark.parametrize("tensors", [GOOD, {}], ids=["some", "none"])
def test_bytes_after_the_last_tensor_are_refused(
    extra: int, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors)
    end = path.stat().st_size
    read_header(path)
    with path.open("ab") as file:
        file.write(bytes(extra))
    with pytest.raises(CheckpointError, match="after the last tensor") as error:
        read_header(path)
    assert f"end at byte {end}, got {end + extra} bytes" in str(error.value)


@pytest.mark.parametrize("case", BAD)
def test_names_what_is_wrong(case: str, tmp_path: Path) -> None:
    header, message = BAD[case]
    path = tmp_path / "x.safetensors"
    write_raw(path, header, DATA)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert "x.safetensors" in str(error.value)


@pytest.mark.parametrize("length", [0, 3, 7])
def test_file_shorter_than_its_length_field(length: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\1" * length)
    with pytest.raises(CheckpointError, match="does not fit its file"):
        read_header(tmp_path / "x")


def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in ("model.safetensors", "model.gguf", "config.json"):
        (tmp_path / name).write_bytes(pointer)
    for read, name in ((read_header, "model.safetensors"), (read_config, "model.gguf")):
        with pytest.raises(CheckpointError, match=f"{name}\n(.*\n)*hint: .*`git lfs pull`"):
            read(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"config\.json\n(.*\n)*hint: .*`git lfs pull`"):
        read_config(tmp_path)


def test_header_longer_than_the_file_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="does not fit its file"):
        read_header(tmp_path / "x")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", GOOD)
    whole = (tmp_path / "x").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(tmp_path / "cut")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors"):
        read_header(tmp_path / "nowhere.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "x"]) | json_values,
        "shape": st.lists(st.integers(-2, 9), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-2, 70), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=5), entries
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(header=headers | json_values, data=st.binary(max_size=64), cut=st.integers(0, 200))
def test_fuzz_structured_header(header: Any, data: bytes, cut: int, tmp_path: Path) -> None:
    path = tmp_path / "fuzz"
    write_raw(path, json.dumps(header).encode(), data)
    if cut < 100:
        path.write_bytes(path.read_bytes()[:cut])
    _reads_or_refuses(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(flips=st.lists(st.tuples(st.integers(0, 199), st.integers(1, 255)), min_size=1, max_size=6))
def test_fuzz_flipped_bytes(flips: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "fuzz"
    write_safetensors(path, GOOD)
    data = bytearray(path.read_bytes())
    for at, value in flips:
        data[at % len(data)] ^= value
    path.write_bytes(data)
    _reads_or_refuses(path)


def _reads_or_refuses(path: Path) -> None:
    """Whatever is read lies inside the file and does not overlap."""
    try:
        header = read_header(path)
    except CheckpointError:
        return
    end = 0
    for entry in sorted(header.tensors.values(), key=lambda e: (e.offset, e.nbytes)):
        assert header.data_start <= entry.offset
        assert entry.offset + entry.nbytes <= path.stat().st_size
        assert entry.nbytes == 0 or entry.offset >= end
        end = max(end, entry.offset + entry.nbytes)


def _shards(path: Path, count: int = 3) -> dict[str, str]:
    weight_map = {}
    for i in range(1, count + 1):
        name = f"model-{i:05}-of-{count:05}.safetensors"
        write_safetensors(path / name, {f"t{i}": np.zeros(4, "<f4")})
        weight_map[f"t{i}"] = name
    return weight_map


def _write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_directory_kinds(tmp_path: Path) -> None:
    weight_map = _shards(tmp_path)
    assert len(read_directory(tmp_path)) == 3, "without an index"
    _write_index(tmp_path, weight_map)
    assert len(read_directory(tmp_path)) == 3
    write_safetensors(tmp_path / "model.safetensors", GOOD)
    assert [h.path.name for h in read_directory(tmp_path)] == ["model.safetensors"]


def test_missing_shard_is_named_with_and_without_index(tmp_path: Path) -> None:
    weight_map = _shards(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        read_directory(tmp_path)
    _write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        read_directory(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    weight_map = _shards(tmp_path)
    _write_index(tmp_path, {**weight_map, "t9": weight_map["t1"]})
    with pytest.raises(CheckpointError, match="tensor is missing: t9"):
        read_directory(tmp_path)
    _write_index(tmp_path, {**weight_map, "t1": weight_map["t2"]})
    with pytest.raises(CheckpointError, match=r"tensor is missing: t1|shards are missing"):
        read_directory(tmp_path)
    write_safetensors(
        tmp_path / weight_map["t1"], {"t1": np.zeros(4, "<f4"), "extra": np.zeros(1, "<f4")}
    )
    _write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="unexpected tensor: extra"):
        read_directory(tmp_path)


def test_duplicate_tensor_over_two_shards(tmp_path: Path) -> None:
    weight_map = _shards(tmp_path)
    write_safetensors(
        tmp_path / weight_map["t1"], {"t1": np.zeros(4, "<f4"), "t2": np.zeros(4, "<f4")}
    )
    _write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="duplicate tensor: t2"):
        read_directory(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a\\b", "", 3, None, ".."])
def test_index_cannot_leave_its_directory(name: Any, tmp_path: Path) -> None:
    _write_index(tmp_path, {"t": name})
    with pytest.raises(CheckpointError, match=r"malformed index|shards are missing"):
        read_directory(tmp_path)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        read_directory(tmp_path)
