"""The conversion itself: one file after the other, one record or tensor in memory at a time.

Order: check the source, check the space, dense file, one file per layer, the small files, manifest,
rename. Every step can be repeated; `journal.py` says what was done before.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.arrays import Bytes
from headrace.checkpoint import HuggingFaceCheckpoint
from headrace.checkpoint.journal import Journal, is_published
from headrace.checkpoint.layout import (
    DENSE_NAME,
    FORMAT_VERSION,
    DenseTensor,
    Recipe,
    dense_header,
    expert_file_name,
    expert_header,
    make_manifest,
)
from headrace.checkpoint.records import EXPERT_ROLES, FLOAT_FORMATS, MatrixLayout, RecordTable
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import (
    check_finite,
    pack_range,
    read_range,
    unpack_values,
)
from headrace.checkpoint.writer import (
    write_bytes,
    write_dense_file,
    write_error,
    write_expert_file,
)
from headrace.convert.importance import Importance
from headrace.convert.plan import ConvertPlan, make_plan
from headrace.convert.quantise import Quantiser
from headrace.convert.source import (
    FLOATING,
    OpenedSource,
    dense_entries,
    num_ahead,
    open_records,
    packed_pieces,
    plain_rows,
    read_records,
    record_entries,
    table_of,
)
from headrace.errors import ConfigError, ExpertReadError
from headrace.quant_search import SEARCH_VERSION

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a conversion is, in bytes of the container."""

    file: str
    """The file being written or, after a kill, verified."""
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did."""

    dest: Path
    total_bytes: int
    num_files: int
    kept_files: int
    """Files that an earlier, interrupted run had finished; verified, not written again."""
    already_done: bool
    """The destination was a finished container of the same source and recipe."""
    losses: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)
    """By class of tensors, what quantising cost; of the files that this run wrote."""
    requantised: Mapping[str, str] = field(default_factory=dict)
    """By class of tensors, the codes of the source that were rounded a second time."""


class Supply(Protocol):
    """Where the source's data come from if they are not all on the drive at once."""

    def bring(self, entries: Sequence[TensorEntry]) -> None:
        """Have the data of these tensors in their files; returns when they are there."""

    def release(self, entries: Sequence[TensorEntry]) -> None:
        """The data of these tensors are no longer needed."""


def convert(
    source: Path | OpenedSource,
    dest: Path,
    recipe: Recipe,
    progress: Callable[[Progress], None] = lambda _: None,
    importance: Importance | None = None,
    supply: Supply | None = None,
) -> ConvertReport:
    """Write a container.

    The directory `DEST.partial` holds the work until it is complete; then it gets its name. The
    same call resumes a killed conversion. The same source and recipe give the same bytes.

    A directory `DEST.partial` of another source or recipe is begun anew, with a notice in the log,
    if nothing in it is finished, or if its source lay at the same path and has changed since, as
    when a damaged weight was repaired: none of its files can be completed any more. Else it may be
    somebody's work of hours, and the call is refused; the message says how to go on.

    Args:
        source: directory of a Hugging Face checkpoint, or a GGUF file; only read. Its path, or
            what `open_source` made of it.
        dest: the container to make. It must not exist, unless it is a finished container of the
            same source and recipe: then nothing is done.
        recipe: how weights are stored.
        progress: called often.
        importance: what an error of each input counts; its checksum becomes part of the recipe.
        supply: brings the source's data as they are needed; None if all are there.

    Raises:
        ConfigError: the destination exists, belongs to another conversion or lies in the source.
        CheckpointError: the source is damaged, has no tokenizer that works, holds a NaN or
            infinity, or the drive is full.
        UnsupportedModelError: nothing here computes the model.
    """
    dest = dest.resolve()
    path = source if isinstance(source, Path) else source.path
    if path.resolve() in dest.parents:
        raise ConfigError(
            f"destination lies inside the source: {dest}\n"
            "hint: a source is only read; choose a destination beside it"
        )
    if importance is not None:
        recipe = replace(recipe, importance=importance.checksum)
    plan = make_plan(source, recipe)
    for kind, held in plan.requantised.items():
        _log.warning("%s: quantised twice: the source holds codes, %s", kind, held)
    quantiser = Quantiser(recipe)
    binding = _binding(plan)
    total = sum(plan.file_bytes().values())
    if is_published(dest, binding):
        return ConvertReport(dest, total, len(plan.file_bytes()), 0, already_done=True)
    try:
        with Journal(dest) as journal:
            journal.require_space(plan.file_bytes(), plan.other_bytes())
            version = SEARCH_VERSION if recipe.scales == "search" else None
            journal.begin(binding, str(path.resolve()), version)
            conversion = _Conversion(plan, journal, quantiser, importance, progress, supply)
            kept = conversion.run(binding)
    except ExpertReadError:  # an OSError as well, of the source
        raise
    except OSError as error:
        raise write_error(dest, error) from error
    num_files = len(plan.file_bytes())
    losses = {kind: loss.as_dict() for kind, loss in sorted(quantiser.losses.items())}
    return ConvertReport(
        dest, total, num_files, kept, False, losses=losses, requantised=plan.requantised
    )


def _binding(plan: ConvertPlan) -> dict[str, Any]:
    """Return what the manifest says of recipe and source, and what a resume must agree with."""
    return {
        "version": FORMAT_VERSION,
        "recipe": plan.recipe.describe(),
        "source": {"kind": plan.source.kind, "fingerprint": plan.source.fingerprint},
    }


class _Conversion:
    """One run, from a begun journal to the renamed directory."""

    def __init__(
        self,
        plan: ConvertPlan,
        journal: Journal,
        quantiser: Quantiser,
        importance: Importance | None,
        progress: Callable[[Progress], None],
        supply: Supply | None,
    ) -> None:
        self.supply = supply
        self.plan, self.journal, self.quantiser = plan, journal, quantiser
        self.importance = importance or Importance()
        self.progress = progress
        self.total = sum(plan.file_bytes().values())
        self.done, self.kept = 0, 0

    def run(self, binding: dict[str, Any]) -> int:
        """Do what is left; return the number of files kept from an earlier run."""
        plan, partial = self.plan, self.journal.partial
        if self.journal.is_complete:
            self.journal.publish(None)
            return len(plan.file_bytes())
        dense = self._dense()
        records = {layer: self._records(layer) for layer in plan.layouts}
        for name, data in plan.files.items():
            write_bytes(partial / name, data)
        manifest = make_manifest(
            model_type=plan.model_type,
            recipe=plan.recipe,
            source=binding["source"],
            tensors=plan.tensors,
            dense_checksums=dense,
            num_experts=plan.num_experts,
            layouts=plan.layouts,
            record_checksums=records,
            files=plan.files,
        )
        self.journal.publish(manifest)
        return self.kept

    def _step(self, name: str) -> Callable[[int], None]:
        def advance(num_bytes: int) -> None:
            self.done += num_bytes
            self.progress(Progress(name, self.done, self.total))

        return advance

    def _dense(self) -> list[int]:
        """Write the dense tensors unless they are there; return their checksums."""
        tensors, advance = self.plan.tensors, self._step(DENSE_NAME)
        checksums, is_kept = self.journal.keep_or_write(
            DENSE_NAME,
            dense_header(tensors),
            [(t.nbytes, t.stored_bytes) for t in tensors],
            advance,
            lambda: self._supplied(
                lambda: [e for t in tensors for e in dense_entries(self.plan.source, t.name)],
                lambda: write_dense_file(
                    self.journal.partial / DENSE_NAME, tensors, self._load_dense, advance
                ),
            ),
        )
        self.kept += is_kept
        return checksums

    def _supplied(
        self, needed: Callable[[], Sequence[TensorEntry]], write: Callable[[], list[int]]
    ) -> list[int]:
        """Write a file while the data it is made of are there."""
        if self.supply is None:
            return write()
        entries = needed()
        self.supply.bring(entries)
        checksums = write()
        self.supply.release(entries)
        return checksums

    def _load_dense(self, tensor: DenseTensor) -> Bytes:
        source = self.plan.source
        if tensor.kind == "vector":
            return source.load_vector(tensor.name).view(np.uint8)
        info, entry = source.info(tensor.name), plain_rows(source, tensor.name)
        if tensor.kind == "rows":
            assert entry is not None, "rows are stored as a source has them"
            out = np.empty(entry.nbytes, np.uint8)
            read_range(entry.path, entry.offset, out)
            check_finite(out, tensor.format, tensor.name, entry.path)
            return out
        if (tensor.format, tensor.group) == (info.format, info.group):
            return source.load_matrix(tensor.name).data
        out = np.empty(tensor.nbytes, np.uint8)
        rows, cols = tensor.shape
        pack = partial(
            self.quantiser.pack,
            kind=self.plan.class_of(tensor),
            importance=self.importance.of_dense(tensor.name, cols),
        )
        if entry is not None:
            pack_range(
                entry.path, entry.offset, (rows, cols), info.format, tensor.format, tensor.group,
                out, tensor.name, pack,
            )  # fmt: skip
            return out
        matrix, at = source.load_matrix(tensor.name), 0
        for first, count, piece in packed_pieces(matrix):
            values = unpack_values(piece, matrix.format, (count, cols), matrix.group)
            packed = pack(
                values.reshape(-1).view(np.uint8), (count, cols), "f32", tensor.format,
                tensor.group, tensor.name, source.path, first * cols,
            )  # fmt: skip
            out[at : at + len(packed)] = packed
            at += len(packed)
        return out

    def _records(self, layer: int) -> list[int]:
        """Write a layer's file unless it is there; return its checksums."""
        plan = self.plan
        name, record_bytes = expert_file_name(layer), plan.layouts[layer].record_bytes
        advance = self._step(name)
        checksums, is_kept = self.journal.keep_or_write(
            name,
            expert_header(layer, plan.num_experts, record_bytes),
            [(record_bytes, record_bytes)] * plan.num_experts,
            advance,
            lambda: self._supplied(
                lambda: record_entries(plan.source, layer),
                lambda: write_expert_file(
                    self.journal.partial / name,
                    layer,
                    plan.num_experts,
                    record_bytes,
                    self._pack_records(layer),
                    advance,
                ),
            ),
        )
        self.kept += is_kept
        return checksums

    def _pack_records(self, layer: int) -> Iterator[Bytes]:
        """Pack a layer's experts in id order, reading a few ahead of the packing."""
        source, table = self.plan.source, table_of(self.plan.source, layer)
        if isinstance(source, HuggingFaceCheckpoint) and table.repack in FLOATING:
            experts = source.experts[layer]
            ahead = _read_ahead(experts[e] for e in range(self.plan.num_experts))
            for expert, values in enumerate(ahead):
                yield self._pack_record(layer, expert, values)
            return
        with open_records(source, layer) as store:
            for expert, record in enumerate(read_records(store, layer)):
                yield self._take_record(layer, expert, table, record)

    def _take_record(self, layer: int, expert: int, table: RecordTable, packed: Bytes) -> Bytes:
        """Take over a record as its reader packed it, but for matrices of another format."""
        layout = self.plan.layouts[layer]
        record = np.zeros(layout.record_bytes, np.uint8)
        matrices = zip(EXPERT_ROLES, table.layout_of(layer).matrices, layout.matrices, strict=True)
        for role, held, stored in matrices:
            data = packed[held.offset : held.offset + held.nbytes]
            if (held.format, held.group) != (stored.format, stored.group):
                data = self._pack_again(data, held, stored, layer, expert, role)
            record[stored.offset : stored.offset + stored.nbytes] = data
        return record

    def _pack_again(
        self,
        data: Bytes,
        held: MatrixLayout,
        stored: MatrixLayout,
        layer: int,
        expert: int,
        role: str,
    ) -> Bytes:
        """Pack a matrix by the real numbers that its present form stands for."""
        shape = (held.rows, held.cols)
        values = unpack_values(data, held.format, shape, held.group)
        return self.quantiser.pack(
            values.reshape(-1).view(np.uint8), shape, "f32", stored.format, stored.group,
            f"{role} of layer {layer}, expert {expert}", self.plan.source.path,
            kind=f"experts.{role}",
            importance=self.importance.of_expert(layer, expert, role, held.cols),
        )  # fmt: skip

    def _pack_record(
        self, layer: int, expert: int, values: Sequence[tuple[TensorEntry, Bytes]]
    ) -> Bytes:
        layout = self.plan.layouts[layer]
        record = np.zeros(layout.record_bytes, np.uint8)
        for role, matrix, (entry, data) in zip(EXPERT_ROLES, layout.matrices, values, strict=True):
            source = FLOAT_FORMATS[entry.dtype]
            shape = (matrix.rows, matrix.cols)
            packed = self.quantiser.pack(
                data, shape, source, matrix.format, matrix.group, entry.name, entry.path,
                kind=f"experts.{role}",
                importance=self.importance.of_expert(layer, expert, role, matrix.cols),
            )  # fmt: skip
            record[matrix.offset : matrix.offset + matrix.nbytes] = packed
        return record


def _read_ahead(
    experts: Iterable[Mapping[str, TensorEntry]],
) -> Iterator[list[tuple[TensorEntry, Bytes]]]:
    """Yield gate, up and down of each expert, reading a few experts ahead of the consumer."""
    with ThreadPoolExecutor(1, "convert-read") as reader:
        pending: deque[Future[list[tuple[TensorEntry, Bytes]]]] = deque()
        try:
            for by_role in experts:
                pending.append(reader.submit(_read_expert, by_role))
                if len(pending) > num_ahead(sum(entry.nbytes for entry in by_role.values())):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _read_expert(by_role: Mapping[str, TensorEntry]) -> list[tuple[TensorEntry, Bytes]]:
    values = []
    for entry in (by_role[role] for role in ("gate", "up", "down")):
        data = np.empty(entry.nbytes, np.uint8)
        read_range(entry.path, entry.offset, data)
        values.append((entry, data))
    return values
