"""From a checkpoint to one GGUF file: one matrix of one expert in memory at a time.

The file is written under a temporary name, in one pass, and renamed when it is whole. A run that
was killed leaves the temporary file, which the next run overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.arrays import Bytes
from headrace.checkpoint import (
    ContainerCheckpoint,
    GgufCheckpoint,
    HuggingFaceCheckpoint,
    Matrix,
)
from headrace.checkpoint.base import CHUNK_BYTES, to_float32
from headrace.checkpoint.container import check_bytes
from headrace.checkpoint.gguf_blocks import BLOCK_VALUES, blocks_of_packed
from headrace.checkpoint.gguf_header import GgufTensor
from headrace.checkpoint.gguf_names import EXPERT_ROLES, ROPE_FACTORS, paired_rows
from headrace.checkpoint.gguf_writer import GgufWriter, write_gguf
from headrace.checkpoint.records import FLOAT_FORMATS, RecordLayout
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import (
    check_finite,
    pack_values,
    read_range,
    row_pieces,
    unpack_values,
)
from headrace.checkpoint.writer import TEMPORARY_SUFFIX, require_space
from headrace.convert.gguf_plan import DensePart, GgufPlan, GgufRecipe, make_gguf_plan
from headrace.convert.run import Progress
from headrace.convert.source import open_records, packed_pieces, read_records
from headrace.errors import ConfigError

_FLOATING = frozenset(FLOAT_FORMATS.values())


@dataclass(frozen=True)
class GgufReport:
    """What was written."""

    dest: Path
    total_bytes: int
    num_tensors: int
    notes: tuple[str, ...]
    """What the file does not carry over, in words for people."""


def convert_to_gguf(
    source: Path,
    dest: Path,
    recipe: GgufRecipe,
    progress: Callable[[Progress], None] = lambda _: None,
) -> GgufReport:
    """Write a model as a GGUF file that llama.cpp and its kin run.

    Args:
        source: a container, the directory of a Hugging Face checkpoint, or a GGUF file; only read.
        dest: the file to make. It must not exist.
        recipe: how weights are stored; by default as in the source, without loss.
        progress: called often.

    Raises:
        ConfigError: the destination exists or lies in the source, or an option does nothing.
        CheckpointError: the source is damaged or holds a NaN or infinity, or the drive is full.
        UnsupportedModelError: the file would not compute the same model, or a format cannot be had
            from this source.
    """
    dest = dest.resolve()
    if dest.exists():
        raise ConfigError(
            f"destination exists: {dest}\nhint: remove it, or choose another destination"
        )
    if source.resolve() in dest.parents:
        raise ConfigError(
            f"destination lies inside the source: {dest}\n"
            "hint: a source is only read; choose a destination beside it"
        )
    plan = make_gguf_plan(source, recipe)
    _require_space(dest, plan.layout.file_bytes)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(Progress(dest.name, done, plan.layout.file_bytes))

    with write_gguf(dest, plan.layout, advance) as writer:
        _Export(plan, writer).run()
    return GgufReport(dest, plan.layout.file_bytes, plan.num_tensors, plan.notes)


def _require_space(dest: Path, num_bytes: int) -> None:
    left_over = dest.with_name(dest.name + TEMPORARY_SUFFIX)
    held = left_over.stat().st_size if left_over.is_file() else 0  # which this run overwrites
    hint = "or choose a destination on another drive"
    require_space(dest.parent, num_bytes - held, "the file", hint)


@dataclass(frozen=True)
class _Piece:
    """Whole rows of a matrix as the source holds them."""

    name: str
    path: Path
    first: int
    """The first row within the matrix; a multiple of 16."""
    rows: int
    cols: int
    format: str
    group: int
    """Inputs per scale of a packed piece; 0: values stand row after row."""
    data: Bytes


class _Export:
    """One run over an open file."""

    def __init__(self, plan: GgufPlan, writer: GgufWriter) -> None:
        self.plan, self.source, self.writer = plan, plan.source, writer

    def run(self) -> None:
        """Write every tensor."""
        for name, tensor in self.plan.copied.items():
            self._copy(name, tensor)
        for part in self.plan.dense:
            if part.tensor.name not in self.plan.copied:
                self._write_dense(part)
        if not isinstance(self.source, GgufCheckpoint):
            for index, layer in enumerate(self.plan.layers):
                self._write_experts(index, layer)
        if self.plan.rope_factors is not None and ROPE_FACTORS not in self.plan.copied:
            self.writer.write(ROPE_FACTORS, 0, self.plan.rope_factors.view(np.uint8))

    def _copy(self, name: str, tensor: GgufTensor) -> None:
        """Take a tensor over block by block, in the file's own order of rows."""
        for first in range(0, tensor.nbytes, CHUNK_BYTES):
            piece = np.empty(min(CHUNK_BYTES, tensor.nbytes - first), np.uint8)
            read_range(tensor.path, tensor.offset + first, piece)
            self.writer.write(name, first, piece)

    def _write_dense(self, part: DensePart) -> None:
        tensor = part.tensor
        if len(tensor.shape) == 1:
            values = self.source.load_vector(part.source_name)
            self.writer.write(tensor.name, 0, values.view(np.uint8))
            return
        pieces = self._pieces(part.source_name)
        if not part.num_heads:
            for piece in pieces:
                blocks = _blocks(piece, part.format, tensor.type)
                self.writer.write(tensor.name, piece.first * tensor.row_bytes, blocks)
            return
        whole = np.concatenate([_blocks(piece, part.format, tensor.type) for piece in pieces])
        reordered = np.empty_like(whole)
        reordered[paired_rows(len(whole), part.num_heads)] = whole
        self.writer.write(tensor.name, 0, reordered)

    def _pieces(self, name: str) -> Iterator[_Piece]:
        """A dense matrix of the source, piece by piece."""
        source = self.source
        rows, cols = source.info(name).shape
        if isinstance(source, HuggingFaceCheckpoint) and name not in source.quantised:
            yield from _plain_pieces(source.entry(name), cols)
        elif isinstance(source, ContainerCheckpoint) and source.dense[name].kind == "rows":
            data, format = source.load_bytes(name), source.dense[name].format
            yield _Piece(name, source.path, 0, rows, cols, format, 0, data)
        else:
            matrix = source.load_matrix(name)
            yield from _packed_pieces(name, source.path, matrix)

    def _write_experts(self, index: int, layer: int) -> None:
        """Write a layer's three tensors, expert by expert: a record is read once."""
        for expert, pieces in enumerate(self._experts(index, layer)):
            formats = self.plan.expert_formats[layer]
            for name, piece, written in zip(EXPERT_ROLES.values(), pieces, formats, strict=True):
                blocks = _blocks(piece, *written)
                self.writer.write(f"blk.{layer}.{name}", expert * blocks.nbytes, blocks)

    def _experts(self, index: int, layer: int) -> Iterator[Iterable[_Piece]]:
        """Gate, up and down of each expert, each whole."""
        source, records = self.source, self.source.records
        assert records is not None, "a layer with experts has records"
        layout = records.layouts[index]
        if isinstance(source, HuggingFaceCheckpoint) and records.coded:
            with open_records(source, layer) as store:
                for expert, record in enumerate(read_records(store, layer)):
                    yield _matrices(layout, record, source.path, layer, expert)
        elif isinstance(source, HuggingFaceCheckpoint):
            for expert in range(records.num_experts):
                by_role = source.experts[layer][expert]
                yield [_whole_piece(by_role[role]) for role in EXPERT_ROLES]
        else:
            assert records.checksum is not None, "a container has checksums"
            record = np.empty(layout.record_bytes, np.uint8)
            for expert in range(records.num_experts):
                path = records.files[records.file[index, expert, 0]]
                offset = int(records.offset[index, expert, 0])
                read_range(path, offset, record)
                name = f"layer {layer}, expert {expert}"
                check_bytes(record, int(records.checksum[index, expert]), name, path, offset)
                yield _matrices(layout, record, path, layer, expert)


def _matrices(
    layout: RecordLayout, record: Bytes, path: Path, layer: int, expert: int
) -> Iterator[_Piece]:
    """The matrices of a packed record."""
    for role, m in zip(EXPERT_ROLES, layout.matrices, strict=True):
        name, data = f"{role} of layer {layer}, expert {expert}", record[m.offset :][: m.nbytes]
        yield _Piece(name, path, 0, m.rows, m.cols, m.format, m.group, data)


def _whole_piece(entry: TensorEntry) -> _Piece:
    """A matrix whose values lie row after row."""
    data = np.empty(entry.nbytes, np.uint8)
    read_range(entry.path, entry.offset, data)
    (rows, cols), format = entry.shape, FLOAT_FORMATS[entry.dtype]
    return _Piece(entry.name, entry.path, 0, rows, cols, format, 0, data)


def _plain_pieces(entry: TensorEntry, cols: int) -> Iterator[_Piece]:
    rows, format = entry.shape[0], FLOAT_FORMATS[entry.dtype]
    row_bytes = entry.nbytes // rows
    for first, count in row_pieces(rows, row_bytes):
        data = np.empty(count * row_bytes, np.uint8)
        read_range(entry.path, entry.offset + first * row_bytes, data)
        yield _Piece(entry.name, entry.path, first, count, cols, format, 0, data)


def _packed_pieces(name: str, path: Path, matrix: Matrix) -> Iterator[_Piece]:
    for first, count, data in packed_pieces(matrix):
        format, group = matrix.format, matrix.group
        yield _Piece(name, path, first, count, matrix.cols, format, group, data)


def _blocks(piece: _Piece, format: str, type_name: str) -> Bytes:
    """Rows of GGUF blocks, [N, row bytes]: copied if the format stays, else rounded or widened.

    Args:
        piece: from the source.
        format: the file's; one that `gguf_plan` allows from the piece's.
        type_name: the file's tensor type.
    """
    if not piece.group:
        check_finite(piece.data, piece.format, piece.name, piece.path, piece.first * piece.cols)
        if format == piece.format:
            return piece.data.reshape(piece.rows, -1)
        if format == "f32":
            return to_float32(piece.data, piece.format).view(np.uint8).reshape(piece.rows, -1)
        return _quantised(piece, piece.data, piece.format, format)
    if format == piece.format:
        shape = (piece.rows, piece.cols)
        return blocks_of_packed(piece.data, format, *shape, piece.group, type_name)
    shape = (piece.rows, piece.cols)
    values: Bytes = unpack_values(piece.data, piece.format, shape, piece.group).view(np.uint8)
    if format == "f32":
        return values
    return _quantised(piece, values.reshape(-1), "f32", format)


def _quantised(piece: _Piece, values: Bytes, source: str, format: str) -> Bytes:
    """Round floating values, row after row, to a narrower format: by the container's own rules."""
    shape, group = (piece.rows, piece.cols), 1 if format in _FLOATING else BLOCK_VALUES
    first = piece.first * piece.cols
    packed = pack_values(values, shape, source, format, group, piece.name, piece.path, first)
    return blocks_of_packed(packed, format, *shape, group)
