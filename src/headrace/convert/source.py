"""What a conversion takes from its source, whatever kind of checkpoint that is.

A source's reader already says how each matrix is packed without loss; whatever is kept is asked
for in that form. Floating matrices of safetensors lie row after row and are packed from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.arrays import Bytes
from headrace.checkpoint import (
    Checkpoint,
    ContainerCheckpoint,
    GgufCheckpoint,
    HuggingFaceCheckpoint,
    Matrix,
    open_checkpoint,
    read_config,
)
from headrace.checkpoint.base import CONFIG_NAME, GENERATION_CONFIG_NAME
from headrace.checkpoint.huggingface import tokenizer_files
from headrace.checkpoint.records import FLOAT_FORMATS, RecordTable
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import BLOCK_ROWS, row_pieces
from headrace.config import ExpertConfig
from headrace.errors import CheckpointError
from headrace.experts import ExpertStore
from headrace.models.registry import check_weights, expert_names, load_spec
from headrace.models.spec import ModelSpec
from headrace.tokenizer import Tokenizer

FLOATING = frozenset(FLOAT_FORMATS.values())
AHEAD_BYTES = 64 << 20
MAX_AHEAD = 4
"""Experts read while earlier ones are packed and written: at least one, at most MAX_AHEAD, and no
more than fit AHEAD_BYTES."""


@dataclass(frozen=True)
class OpenedSource:
    """What is to be converted, its headers read and checked."""

    path: Path
    spec: ModelSpec
    checkpoint: Checkpoint


def open_source(source: Path | OpenedSource) -> OpenedSource:
    """Open what is to be converted, unless it is open, and check it as a model.

    Raises:
        CheckpointError: the source is damaged or incomplete (its tokenizer is part of it), or is a
            container already.
        UnsupportedModelError: nothing here computes the model, or a tensor's type is foreign.
        ConfigError: its config holds a field that is not understood.
    """
    if isinstance(source, OpenedSource):
        return source
    path, spec = source, load_spec(read_config(source), source)
    checkpoint = open_checkpoint(path, expert_names(spec))
    if isinstance(checkpoint, ContainerCheckpoint):
        raise CheckpointError(
            f"source is a container already: {path}\n"
            "hint: it runs as it is; to store it otherwise, convert from the original weights"
        )
    check_weights(spec, checkpoint)
    Tokenizer.of(checkpoint)  # refused now as it would be by whoever runs the container
    return OpenedSource(path, spec, checkpoint)


def is_quantised(source: Checkpoint) -> bool:
    """Whether a source holds any of its matrices in codes."""
    dense = {info.format for info in source.tensors.values() if len(info.shape) == 2}
    tables = [t for t in (source.records, source.mtp_records) if t is not None]
    experts = {format for table in tables for format in table.formats}
    return not dense | experts <= FLOATING


def small_files(source: Checkpoint) -> dict[str, bytes]:
    """Configs, tokenizer and chat template: copied, or written anew where they are in one file."""
    if isinstance(source, GgufCheckpoint):
        made = {
            CONFIG_NAME: source.config,
            GENERATION_CONFIG_NAME: source.generation_config,
            "tokenizer_config.json": source.tokenizer_config(),
        }
        files = {n: json.dumps(c, indent=1, sort_keys=True).encode() for n, c in made.items()}
        return {**files, "tokenizer.json": source.tokenizer_json().encode()}
    paths = dict(tokenizer_files(source.path))
    for name in (CONFIG_NAME, GENERATION_CONFIG_NAME):
        if (source.path / name).is_file():
            paths[name] = source.path / name
    return {name: path.read_bytes() for name, path in paths.items()}


def plain_rows(source: Checkpoint, name: str) -> TensorEntry | None:
    """Where a dense tensor's floating values lie row after row; None if they do not."""
    if source.info(name).format not in FLOATING:
        return None
    if isinstance(source, HuggingFaceCheckpoint):
        return source.entry(name)
    if isinstance(source, GgufCheckpoint) and not source.has_own_row_order(name):
        return source.rows_entry(name)
    return None


def dense_entries(source: Checkpoint, name: str) -> list[TensorEntry]:
    """The stored tensors that make up a dense tensor."""
    if isinstance(source, GgufCheckpoint):
        return [source.rows_entry(name)]
    assert isinstance(source, HuggingFaceCheckpoint), "a container is no source"
    return source.entries_of(name)


def table_of(source: Checkpoint, layer: int) -> RecordTable:
    """The record table that a layer's experts are in."""
    tables = [t for t in (source.records, source.mtp_records) if t is not None]
    return next(table for table in tables if layer in table.layers)


def record_entries(source: Checkpoint, layer: int) -> list[TensorEntry]:
    """The byte ranges that a layer's records are made of."""
    table = table_of(source, layer)
    row = table.layers.index(layer)
    places = zip(
        table.file[row].reshape(-1),
        table.offset[row].reshape(-1),
        table.length[row].reshape(-1),
        strict=True,
    )
    ranges = [
        TensorEntry(f"experts of layer {layer}", "U8", (int(n),), table.files[f], int(at), int(n))
        for f, at, n in places
    ]
    if table.factors is None:
        return ranges
    assert isinstance(source, HuggingFaceCheckpoint), "only these have factors"
    return ranges + source.factor_entries(layer)


def packed_pieces(matrix: Matrix) -> Iterator[tuple[int, int, Bytes]]:
    """Cut a packed matrix into whole blocks: (first row, rows, packed bytes)."""
    block_bytes = matrix.nbytes // -(-matrix.rows // BLOCK_ROWS)
    for first, count in row_pieces(matrix.rows, 4 * matrix.cols):
        begin = first // BLOCK_ROWS * block_bytes
        yield first, count, matrix.data[begin : begin - (-count // BLOCK_ROWS) * block_bytes]


def num_ahead(expert_bytes: int) -> int:
    """How many experts are read before they are needed."""
    return max(1, min(MAX_AHEAD, AHEAD_BYTES // expert_bytes))


@contextmanager
def open_records(source: Checkpoint, layer: int) -> Iterator[ExpertStore]:
    """Open the reader of a layer's records, with room for a few of them.

    Call it when the layer's data are there: numbers that all scales of a matrix share are read now.
    """
    table = table_of(source, layer)
    if table.factors is not None and isinstance(source, HuggingFaceCheckpoint):
        table = source.layer_table(layer)
    slots = 1 + num_ahead(table.record_bytes)
    with ExpertStore(table, num_slots=slots, readers=ExpertConfig()) as store:
        yield store


def read_records(store: ExpertStore, layer: int) -> Iterator[Bytes]:
    """Yield a layer's records in id order, packed as the source's reader does; each is gone when
    the next one is asked for.

    Raises:
        ExpertReadError: a range cannot be read, or holds a scale that is NaN or infinite.
    """
    num_experts = store.table.num_experts
    ready: dict[int, int] = {}
    with store.acquire(layer, np.arange(num_experts, dtype=np.int32)[:, None]) as lease:
        ids = lease.expert_ids
        for expert in range(num_experts):
            while expert not in ready:  # read in id order, so it is on its way before the later
                ready.update((int(ids[index]), index) for index in lease.next_ready())
            index = ready.pop(expert)
            yield lease.data(index)
            lease.done(index)
