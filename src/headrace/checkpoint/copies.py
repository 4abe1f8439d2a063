"""Records on further drives: files of a container that were moved there, and copies of records.

A drive is named by a folder. In it lie files of the container's own names and form,
`experts-LLL.safetensors`, each with all of a layer's records or some of them, and, if `mirror
stage` wrote them, `mirror.json`, which says whose they are. Whatever is wrong with a copy is one
warning: the model itself has every record.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace import _core
from headrace.arrays import Bytes
from headrace.checkpoint.jsonfile import read_object
from headrace.checkpoint.layout import expert_file_name, record_name
from headrace.checkpoint.records import RECORD_ALIGNMENT, RecordTable
from headrace.checkpoint.safetensors import read_header
from headrace.errors import CheckpointError

_log = logging.getLogger(__name__)

MIRROR_NAME = "mirror.json"
MIRROR_FORMAT = "headrace mirror"
MIRROR_VERSION = 1


def find_file(folder: Path, name: str, drives: Sequence[Path]) -> Path:
    """Return a file of the model: in its folder, else on the first drive that has it."""
    places = [folder / name, *(drive / name for drive in drives)]
    return next((path for path in places if path.is_file()), places[0])


def add_copies(
    table: RecordTable, folder: Path, drives: Sequence[Path], fingerprint: str
) -> RecordTable:
    """Note on which drive each file lies, and which records lie on a drive a second time.

    Args:
        table: packed records.
        folder: of the model.
        drives: further drives, in the order given.
        fingerprint: identity of the model; a mirror of another is left alone, with a warning.
    """
    folders = (folder, *drives)
    files = list(table.files)
    drive_of_file = [folders.index(path.parent) for path in files]
    copies: list[tuple[int, int, int]] = []
    for number, drive in enumerate(drives, start=1):
        found, problems = _find_copies(table, drive, fingerprint)
        for path, places in found:
            copies += [(record, len(files), offset) for record, offset in places]
            files.append(path)
            drive_of_file.append(number)
        if not found and not problems and number not in drive_of_file:
            problems.append(f"no record of this model: {drive}")
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            _log.warning(
                "not all of a drive is used, the model's own records are read instead: %s%s",
                problems[0].replace("\n", "; "), more,
            )  # fmt: skip
    return replace(
        table,
        files=tuple(files),
        drives=folders,
        drive_of_file=tuple(drive_of_file),
        copies=np.array(copies, np.int64).reshape(-1, 3),
    )


def _find_copies(
    table: RecordTable, drive: Path, fingerprint: str
) -> tuple[list[tuple[Path, list[tuple[int, int]]]], list[str]]:
    """Files with (record, offset) of each copy, and what is wrong with the others."""
    found, problems = [], []
    try:
        require_mirror(drive, fingerprint)
        for row, layer in enumerate(table.layers):
            path = drive / expert_file_name(layer)
            if path in table.files or not path.is_file():
                continue
            try:
                experts = read_copies(path, layer, table)
            except CheckpointError as error:
                problems.append(str(error).partition("\nhint:")[0])  # it is for a model's files
                continue
            first = row * table.num_experts
            found.append((path, [(first + expert, offset) for expert, offset in experts.items()]))
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
    return found, problems


def require_mirror(drive: Path, fingerprint: str) -> dict[str, object] | None:
    """Return what `mirror.json` says; None without one: files that somebody copied by hand.

    Raises:
        CheckpointError: there is no such folder, or it is a mirror of another model or version.
    """
    if not drive.is_dir():
        raise CheckpointError(f"{'not a' if drive.exists() else 'no such'} folder: {drive}")
    path = drive / MIRROR_NAME
    if not path.is_file():
        return None
    content = read_object(path)
    for key, expected in (("format", MIRROR_FORMAT), ("version", MIRROR_VERSION)):
        if content.get(key) != expected:
            raise CheckpointError(
                f"not a mirror that this version reads: {path}\n"
                f"expected {key} {expected!r}, got {str(content.get(key))[:40]!r}"
            )
    if content.get("fingerprint") != fingerprint:
        raise CheckpointError(
            f"mirror of another model: {path}\nexpected {fingerprint[:16]}, "
            f"got {str(content.get('fingerprint'))[:16]}"
        )
    return content


def read_copies(path: Path, layer: int, table: RecordTable) -> dict[int, int]:
    """Read which experts of a layer a file holds: expert -> offset.

    Raises:
        CheckpointError: the file is damaged, or holds something that is no record of this table.
    """
    header = read_header(path)
    expert_of = {record_name(layer, expert): expert for expert in range(table.num_experts)}
    copies, record_bytes = {}, table.layout_of(layer).record_bytes
    for name, entry in header.tensors.items():
        if name not in expert_of or entry.nbytes != record_bytes or entry.offset % RECORD_ALIGNMENT:
            raise CheckpointError(
                f"not a copy of a record: {name}, file {path}\n"
                f"expected a record of layer {layer}, {record_bytes} bytes at a "
                f"multiple of {RECORD_ALIGNMENT}, got {entry.nbytes} at {entry.offset}"
            )
        copies[expert_of[name]] = entry.offset
    return copies


def make_record(table: RecordTable) -> Bytes:
    """Make memory for any one record: [record_bytes], aligned for direct reads."""
    data: Bytes = _core.aligned_empty(table.record_bytes)
    return data


def read_record(
    table: RecordTable, layer: int, expert: int, data: Bytes, at: tuple[Path, int] | None = None
) -> Bytes:
    """Read a record and compare it with its checksum.

    Args:
        table: of the model.
        layer: number of the layer.
        expert: number of the expert.
        data: [record_bytes], filled as far as the record reaches.
        at: file and offset of a copy; None is the model's own.

    Returns:
        the record: the first bytes of `data`.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    row = table.layers.index(layer)
    assert table.checksum is not None, "packed records have checksums"
    if at is None:
        at = table.files[table.file[row, expert, 0]], int(table.offset[row, expert, 0])
    checksum = int(table.checksum[row, expert])
    name = record_name(layer, expert)
    record = data[: table.layouts[row].record_bytes]
    _core.read_named([(name, str(at[0]), at[1], record, record.nbytes, checksum)])
    return record
