"""What a checkpoint is, and whether its bytes are still the ones that were written.

`describe` reads headers only; `verify` reads everything. Prints nothing: the command line draws.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from headrace.arrays import Bytes
from headrace.checkpoint import (
    Checkpoint,
    ContainerCheckpoint,
    GgufCheckpoint,
    HuggingFaceCheckpoint,
    RecordTable,
    TensorInfo,
    open_checkpoint,
    read_config,
)
from headrace.checkpoint.base import CONFIG_NAME, GENERATION_CONFIG_NAME
from headrace.checkpoint.huggingface import TOKENIZER_FILES
from headrace.checkpoint.jsonfile import canonical_json
from headrace.checkpoint.layout import (
    DENSE_NAME,
    MANIFEST_NAME,
    dense_header,
    dense_order,
    describe_file,
    expert_file_name,
    expert_header,
    manifest_checksum,
    record_name,
)
from headrace.checkpoint.records import FLOAT_FORMATS
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import bytes_checksum, check_finite, read_range
from headrace.errors import CheckpointError
from headrace.models.registry import (
    check_weights,
    dense_names,
    embedding_name,
    expert_names,
    load_spec,
)
from headrace.models.spec import ModelSpec

PIECE_BYTES = 64 << 20
"""Tensors without a checksum are read in such pieces."""


def open_model(path: Path, drives: Sequence[Path] = ()) -> tuple[ModelSpec, Checkpoint]:
    """Open a checkpoint of any kind together with its spec, and compare the two.

    Args:
        path: of the checkpoint.
        drives: as `open_checkpoint` takes them.

    Raises:
        CheckpointError, ConfigError, UnsupportedModelError: as `load_spec` and `open_checkpoint`.
    """
    spec = load_spec(read_config(path), path)
    checkpoint = open_checkpoint(path, expert_names(spec), drives)
    check_weights(spec, checkpoint)
    return spec, checkpoint


def describe(path: Path) -> dict[str, Any]:
    """Summarise a checkpoint as JSON holds it. Every length is in bytes.

    Raises:
        CheckpointError, ConfigError, UnsupportedModelError: the checkpoint cannot be opened.
    """
    spec, checkpoint = open_model(path)
    records, mtp = checkpoint.records, checkpoint.mtp_records
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    summary: dict[str, Any] = {
        "path": str(path),
        "kind": checkpoint.kind,
        "model_type": spec.model_type,
        "fingerprint": checkpoint.fingerprint,
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "dense": _describe_dense(spec, checkpoint),
        "experts": None if records is None else _describe_records(records),
        "mtp_layers": [] if mtp is None else list(mtp.layers),
        "file_bytes": sum(p.stat().st_size for p in files),
        "files": [{"name": p.name, "bytes": p.stat().st_size} for p in files],
    }
    if records is not None and summary["experts"] is not None:
        active = spec.num_experts_per_tok * len(records.layers)
        summary["experts"]["num_experts_per_tok"] = spec.num_experts_per_tok
        summary["experts"]["working_set_bytes"] = active * records.record_bytes
        summary["experts"]["cold_token_read_bytes"] = active * records.read_bytes
    if isinstance(checkpoint, ContainerCheckpoint):
        summary["version"] = checkpoint.manifest["version"]
        summary["recipe"] = checkpoint.manifest["recipe"]
        summary["source"] = checkpoint.manifest.get("source")
    return summary


def _describe_dense(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    names = set(dense_names(spec)) & set(checkpoint.tensors)
    embedding = embedding_name(spec)
    matrices = {n: checkpoint.tensors[n] for n in names if len(checkpoint.tensors[n].shape) == 2}
    return {
        "num_tensors": len(names),
        "bytes": checkpoint.dense_nbytes(names),
        "matrix_bytes": sum(i.nbytes for n, i in matrices.items() if n != embedding),
        "embedding_bytes": checkpoint.tensors[embedding].nbytes,
        "vector_bytes": checkpoint.dense_nbytes(names - set(matrices)),
        "formats": _count_formats(matrices),
    }


def _count_formats(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    names = (i.format if i.group == 1 else f"{i.format} g{i.group}" for i in tensors.values())
    return dict(sorted(Counter(names).items()))


def _describe_records(table: RecordTable) -> dict[str, Any]:
    gate = table.shape.gate
    return {
        "format": gate.format,
        "formats": list(table.formats),
        "group": gate.group,
        "in_place": table.repack is not None,
        "num_layers": len(table.layers),
        "num_experts": table.num_experts,
        "num_records": table.num_records,
        "moe_intermediate_size": gate.rows,
        "record_bytes": table.record_bytes,
        "bytes": table.num_experts * sum(one.record_bytes for one in table.layouts),
    }


@dataclass(frozen=True)
class Damage:
    """One range of a file that does not hold what it should."""

    file: str
    tensor: str
    offset: int
    message: str


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`."""

    num_checked: int
    checked_bytes: int
    has_checksums: bool
    """False unless a container: only the values' being finite could be checked."""
    damaged: tuple[Damage, ...]
    unrecorded: tuple[str, ...] = ()
    """Files that a model is made of and the manifest has no checksum of: changes go unseen."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found."""
        return not self.damaged


def verify(path: Path, progress: Callable[[str, int, int], None] = lambda *_: None) -> VerifyReport:
    """Read every byte of a container and compare it with what the manifest says.

    Without checksums (Hugging Face, GGUF) the values are searched for NaN and infinity.

    Args:
        path: the checkpoint.
        progress: called with a file name, the bytes done and the bytes in all.

    Raises:
        CheckpointError: the checkpoint cannot be opened; damage to data is reported, not raised.
    """
    _, checkpoint = open_model(path)
    checks: list[_Check]
    if isinstance(checkpoint, ContainerCheckpoint):
        checks = [
            *_container_ranges(checkpoint),
            *_container_frames(checkpoint),
            *_container_files(checkpoint),
        ]
    elif isinstance(checkpoint, HuggingFaceCheckpoint):
        checks = [_Range(e, e.nbytes, None) for e in checkpoint.entries.values()]
    else:
        checks = [_Load(checkpoint, name) for name in checkpoint.tensors]
        if isinstance(checkpoint, GgufCheckpoint):
            checks += [_Experts(checkpoint, name) for name in checkpoint.expert_tensors()]
    return _run(checks, checkpoint, progress)


def verify_headers(path: Path) -> VerifyReport:
    """Read what describes the weights, not the weights: every header, length and small file.

    Raises:
        CheckpointError: the checkpoint cannot be opened, which reads the headers of other kinds.
    """
    _, checkpoint = open_model(path)
    checks: list[_Check] = []
    if isinstance(checkpoint, ContainerCheckpoint):
        checks = [*_container_frames(checkpoint), *_container_files(checkpoint)]
    return _run(checks, checkpoint, lambda *_: None)


def _run(
    checks: "list[_Check]", checkpoint: Checkpoint, progress: Callable[[str, int, int], None]
) -> VerifyReport:
    """Make every check, in the order of the drive."""
    checks.sort(key=lambda c: (c.entry.path, c.entry.offset))
    total, done = sum(c.nbytes for c in checks), 0
    damaged = []
    for check in checks:
        try:
            check.run()
        except CheckpointError as error:
            entry = check.entry
            damaged.append(Damage(entry.path.name, entry.name, entry.offset, str(error)))
        done += check.nbytes
        progress(check.entry.path.name, done, total)
    has_checksums = isinstance(checkpoint, ContainerCheckpoint)
    unrecorded = _unrecorded(checkpoint) if isinstance(checkpoint, ContainerCheckpoint) else ()
    return VerifyReport(len(checks), total, has_checksums, tuple(damaged), unrecorded)


@dataclass(frozen=True)
class _Range:
    """A tensor to check; `nbytes` is less than the entry's where padding follows."""

    entry: TensorEntry
    nbytes: int
    checksum: int | None

    def run(self) -> None:
        """Read the range; raise CheckpointError if it is damaged."""
        entry = self.entry
        if self.checksum is not None:
            data: Bytes = np.empty(entry.nbytes, np.uint8)
            read_range(entry.path, entry.offset, data)
            got = bytes_checksum(data[: self.nbytes])
            if got != self.checksum:
                raise CheckpointError(
                    f"checksum differs: {entry.name}, file {entry.path}\n"
                    f"expected {self.checksum:016x} for {self.nbytes} bytes at offset "
                    f"{entry.offset}, got {got:016x}"
                )
            if data[self.nbytes :].any():
                raise CheckpointError(
                    f"padding is not zero: after {entry.name}, file {entry.path}\n"
                    f"expected {entry.nbytes - self.nbytes} zeros at offset "
                    f"{entry.offset + self.nbytes}"
                )
            return
        for at in range(0, self.nbytes, PIECE_BYTES):
            data = np.empty(min(PIECE_BYTES, self.nbytes - at), np.uint8)
            read_range(entry.path, entry.offset + at, data)
            format = FLOAT_FORMATS.get(entry.dtype)
            if format is not None:
                first = at // (4 if format == "f32" else 2)
                check_finite(data, format, entry.name, entry.path, first)


@dataclass(frozen=True)
class _Frame:
    """The header of a weight file, which must be the one its tensors imply, and its length."""

    path: Path
    header: bytes
    data_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the header."""
        return len(self.header)

    @property
    def entry(self) -> TensorEntry:
        """The header as a range."""
        return TensorEntry("header", "U8", (self.nbytes,), self.path, 0, self.nbytes)

    def run(self) -> None:
        """Read the header; raise CheckpointError if it or the file's length is another."""
        expected, got = self.nbytes + self.data_bytes, self.path.stat().st_size
        if got != expected:
            raise CheckpointError(
                f"file has the wrong length: {self.path}\nexpected {expected} bytes, got {got}"
            )
        data: Bytes = np.empty(self.nbytes, np.uint8)
        read_range(self.path, 0, data)
        differs = np.flatnonzero(data != np.frombuffer(self.header, np.uint8))
        if len(differs):
            raise CheckpointError(
                f"header differs from the manifest: {self.path}\n"
                f"first at offset {differs[0]}, {len(differs)} bytes in all"
            )


@dataclass(frozen=True)
class _Whole:
    """A small file of a container and its entry in the manifest; None for the manifest itself."""

    checkpoint: ContainerCheckpoint
    name: str
    described: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the file, 0 if it is missing."""
        path = self.checkpoint.path / self.name
        return path.stat().st_size if path.is_file() else 0

    @property
    def entry(self) -> TensorEntry:
        """The file as a range."""
        path = self.checkpoint.path / self.name
        return TensorEntry("file", "U8", (self.nbytes,), path, 0, self.nbytes)

    def run(self) -> None:
        """Read the file; raise CheckpointError if it is missing or another."""
        path = self.checkpoint.path / self.name
        if not path.is_file():
            raise CheckpointError(f"file is missing: {path}")
        data = path.read_bytes()
        expected: Any
        got: Any
        if self.described is None:
            manifest = self.checkpoint.manifest
            expected, got = manifest.get("checksum"), manifest_checksum(manifest)
            if data != canonical_json(manifest):
                got = "other spaces or order than it was written with"
        else:
            expected, got = self.described, describe_file(data)
        if got != expected:
            raise CheckpointError(f"checksum differs: {path}\nexpected {expected}, got {got}")


@dataclass(frozen=True)
class _Load:
    """A tensor that is checked by loading it; the checkpoint alone knows where it lies."""

    checkpoint: Checkpoint
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes once loaded."""
        return self.checkpoint.info(self.name).nbytes

    @property
    def entry(self) -> TensorEntry:
        """The tensor, at an offset that is not known here."""
        info = self.checkpoint.info(self.name)
        return TensorEntry(self.name, info.format, info.shape, self.checkpoint.path, 0, info.nbytes)

    def run(self) -> None:
        """Load the tensor; raise CheckpointError if it is damaged."""
        if len(self.checkpoint.info(self.name).shape) == 2:
            self.checkpoint.load_matrix(self.name)
        else:
            self.checkpoint.load_vector(self.name)


@dataclass(frozen=True)
class _Experts:
    """A tensor of a GGUF file that holds the experts of a layer."""

    checkpoint: GgufCheckpoint
    name: str

    @property
    def entry(self) -> TensorEntry:
        """The tensor as a range."""
        t = self.checkpoint.expert_tensors()[self.name]
        return TensorEntry(self.name, t.type.name, t.shape, t.path, t.offset, t.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.entry.nbytes

    def run(self) -> None:
        """Read the tensor; raise CheckpointError if it is damaged."""
        self.checkpoint.check_experts(self.name)


_Check: TypeAlias = _Range | _Load | _Experts | _Whole | _Frame


def _container_files(checkpoint: ContainerCheckpoint) -> Iterator[_Whole]:
    yield _Whole(checkpoint, MANIFEST_NAME, None)
    files = checkpoint.manifest.get("files")
    for name, described in files.items() if isinstance(files, dict) else ():
        if Path(name).name == name:
            yield _Whole(checkpoint, name, described or {})


def _unrecorded(checkpoint: ContainerCheckpoint) -> tuple[str, ...]:
    recorded = checkpoint.manifest.get("files") or {}
    used = (CONFIG_NAME, GENERATION_CONFIG_NAME, *TOKENIZER_FILES)
    return tuple(n for n in used if n not in recorded and (checkpoint.path / n).exists())


def _container_frames(checkpoint: ContainerCheckpoint) -> Iterator[_Frame]:
    tensors = dense_order(list(checkpoint.dense.values()))
    num_bytes = sum(t.stored_bytes for t in tensors)
    yield _Frame(checkpoint.path / DENSE_NAME, dense_header(tensors), num_bytes)
    for table in (checkpoint.records, checkpoint.mtp_records):
        for layer in () if table is None else table.layers:
            assert table is not None, "it has layers"
            record_bytes = table.layout_of(layer).record_bytes
            header = expert_header(layer, table.num_experts, record_bytes)
            path = checkpoint.path / expert_file_name(layer)
            yield _Frame(path, header, table.num_experts * record_bytes)


def _container_ranges(checkpoint: ContainerCheckpoint) -> Iterator[_Range]:
    for name, entry in checkpoint.entries.items():
        yield _Range(entry, checkpoint.dense[name].nbytes, checkpoint.dense_checksums[name])
    for table in (checkpoint.records, checkpoint.mtp_records):
        if table is None:
            continue
        assert table.checksum is not None, "a container has a checksum per record"
        for i, layer in enumerate(table.layers):
            record_bytes = table.layouts[i].record_bytes
            for expert in range(table.num_experts):
                path = table.files[int(table.file[i, expert, 0])]
                entry = TensorEntry(
                    record_name(layer, expert),
                    "U8",
                    (record_bytes,),
                    path,
                    int(table.offset[i, expert, 0]),
                    record_bytes,
                )
                yield _Range(entry, record_bytes, int(table.checksum[i, expert]))
