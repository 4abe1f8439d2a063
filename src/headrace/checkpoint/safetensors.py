"""Headers of safetensors files: what lies where, checked before anybody reads a byte of data.

A file is one unsigned 64-bit little-endian length, that many bytes of JSON, then the data. Every
name, shape and offset is checked here, once; later code may trust a `TensorEntry`. Reads no data.

Source:
    The safetensors format description (github.com/huggingface/safetensors, "Format").
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headrace.checkpoint.jsonfile import is_there, lfs_hint, parse_object, read_object
from headrace.errors import CheckpointError

DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
MAX_DIMENSIONS = 8
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_NO_SAFETENSORS = "the file is truncated or is not safetensors; download it again"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in one file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The checked header of one file."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _parse_entry(
    name: str, value: Any, path: Path, data_start: int, data_bytes: int
) -> TensorEntry:
    place = f"tensor {name}, file {path}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"malformed tensor description: {place}\n"
            "expected an object with exactly dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"unknown dtype {dtype!r}: {place}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(_is_count(n) for n in shape)
    ):
        raise CheckpointError(
            f"malformed shape: {place}\n"
            f"expected at most {MAX_DIMENSIONS} non-negative integers, got {str(shape)[:200]}"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(
            f"malformed data_offsets: {place}\n"
            f"expected two non-negative integers, got {str(offsets)[:200]}"
        )
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise CheckpointError(
            f"tensor lies outside its file: {place}\n"
            f"expected a range within {data_bytes} bytes of data, got {begin}..{end}\n"
            "hint: the file is truncated or damaged; download it again"
        )
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    if num_bits % 8 or num_bits // 8 != end - begin:
        raise CheckpointError(
            f"tensor length does not fit its shape: {place}\n"
            f"expected {num_bits / 8:.0f} bytes for {dtype} {shape}, got {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _check_cover(
    entries: Iterable[TensorEntry], path: Path, data_start: int, file_bytes: int
) -> None:
    """Check that the tensors cover the data: no overlap, no hole, nothing after the last one."""
    end, last = data_start, "the header"
    for entry in sorted((e for e in entries if e.nbytes), key=lambda e: e.offset):
        if entry.offset < end:
            raise CheckpointError(
                f"tensors overlap: {last} and {entry.name}, file {path}\n"
                f"expected {entry.name} at byte {end} or later, got {entry.offset}"
            )
        if entry.offset > end:
            raise CheckpointError(
                f"bytes that belong to no tensor: between {last} and {entry.name}, file {path}\n"
                f"expected {entry.name} at byte {end}, got {entry.offset}"
            )
        end, last = entry.offset + entry.nbytes, entry.name
    if file_bytes != end:
        raise CheckpointError(
            f"bytes after the last tensor: file {path}\n"
            f"expected the file to end at byte {end}, got {file_bytes} bytes\n"
            "hint: the file is damaged, or is not safetensors; download it again"
        )


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Nothing is allocated by a number the file states before that number was compared with the file's
    own size.

    Raises:
        CheckpointError: the file is missing, shorter than its header says, not valid JSON, or names
            a tensor twice, outside the file, over another one, or with a length its shape denies;
            or bytes between the tensors or after the last one belong to none.
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            limit = min(file_bytes - 8, MAX_HEADER_BYTES)
            if len(prefix) < 8 or header_bytes > limit:
                raise CheckpointError(
                    f"safetensors header does not fit its file: {path}\n"
                    f"expected a header of at most {max(limit, 0)} bytes, got "
                    f"{header_bytes if len(prefix) == 8 else 'no length'}\n"
                    f"hint: {lfs_hint(prefix) or _NO_SAFETENSORS}"
                )
            data = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) != header_bytes:
        raise CheckpointError(
            f"safetensors header is short: {path}\nexpected {header_bytes} bytes, got {len(data)}"
        )
    content = parse_object(data, f"header of {path}")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"malformed __metadata__: header of {path}\nexpected an object of strings"
        )
    start = 8 + header_bytes
    tensors = {
        name: _parse_entry(name, value, path, start, file_bytes - start)
        for name, value in content.items()
    }
    _check_cover(tensors.values(), path, start, file_bytes)
    return Header(path, tensors, metadata, start, file_bytes)


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX_NAME
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"malformed index: {path}\nexpected a non-empty object `weight_map`")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(
                f"malformed index: {path}, tensor {name}\n"
                f"expected the name of a file beside the index, got {str(shard)[:200]!r}"
            )
    return weight_map


def _require_shards(directory: Path, shards: Iterable[str]) -> list[Path]:
    names = sorted(set(shards))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} shards are missing: {directory}\n"
            f"first missing: {missing[0]}\n"
            "hint: the download is incomplete; fetch the files again"
        )
    return [directory / name for name in names]


def _shards_without_index(directory: Path) -> list[Path]:
    """Find shards named X-00001-of-000NN when no index tells of them."""
    found = [m for p in directory.glob("*.safetensors") if (m := _SHARD_NAME.fullmatch(p.name))]
    if not found:
        raise CheckpointError(
            f"no weights: {directory}\n"
            f"expected {SINGLE_NAME}, {INDEX_NAME} or a headrace container\n"
            "hint: give the directory that holds config.json and the .safetensors files"
        )
    stem, width = found[0]["stem"], len(found[0]["number"])
    count = int(found[0]["count"])
    if count > len(found) or len({(m["stem"], m["count"]) for m in found}) > 1:
        present = {m.string for m in found}
        names = [
            f"{stem}-{i:0{width}}-of-{count:0{width}}.safetensors" for i in range(1, count + 1)
        ]
        missing = [name for name in names if name not in present]
        raise CheckpointError(
            f"shards do not form one set: {directory}\n"
            f"expected {count} files {stem}-*-of-{count:0{width}}.safetensors, got {len(found)}"
            + (f"; first missing: {missing[0]}" if missing else "")
        )
    return [directory / m.string for m in found]


def read_directory(directory: Path) -> list[Header]:
    """Read the headers of all shards of a Hugging Face checkpoint directory, in name order.

    Takes a single `model.safetensors`, an index with its shards, or a complete set of shards whose
    index was lost. Names are unique over all files.

    Raises:
        CheckpointError: no weights, a missing shard, a tensor that index and shard disagree on, a
            tensor in two shards, or what `read_header` raises.
    """
    if (directory / SINGLE_NAME).is_file():
        return [read_header(directory / SINGLE_NAME)]
    index = _read_index(directory) if is_there(directory / INDEX_NAME) else None
    if index is None:
        paths = sorted(_shards_without_index(directory))
    else:
        paths = _require_shards(directory, index.values())
    headers = [read_header(path) for path in paths]
    seen: dict[str, Path] = {}
    for header in headers:
        for name in header.tensors:
            if name in seen:
                raise CheckpointError(
                    f"duplicate tensor: {name}\nin {seen[name].name} and {header.path.name}"
                    f" of {directory}"
                )
            seen[name] = header.path
    if index is not None:
        _check_index(index, seen, directory)
    return headers


def _check_index(index: Mapping[str, str], seen: Mapping[str, Path], directory: Path) -> None:
    for name, shard in index.items():
        if name not in seen or seen[name].name != shard:
            got = seen[name].name if name in seen else "no shard"
            raise CheckpointError(
                f"tensor is missing: {name}\nexpected in {shard} by {directory / INDEX_NAME},"
                f" got it in {got}"
            )
    for name in seen:
        if name not in index:
            raise CheckpointError(
                f"unexpected tensor: {name}, file {seen[name]}\n"
                f"expected only the {len(index)} tensors that {INDEX_NAME} lists"
            )
