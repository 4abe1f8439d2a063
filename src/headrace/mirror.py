"""Copies of a model's hottest records for a second drive: which, written safely, and verified.

A mirror is a folder of files in the container's own form (docs/format.md) and a note of whose they
are. It never holds anything that the model does not: losing it costs speed. The model's own files
are only read.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.checkpoint import ContainerCheckpoint
from headrace.checkpoint.copies import (
    MIRROR_FORMAT,
    MIRROR_NAME,
    MIRROR_VERSION,
    make_record,
    read_copies,
    read_record,
    require_mirror,
)
from headrace.checkpoint.layout import (
    MANIFEST_NAME,
    expert_file_name,
    padded_header,
    record_name,
)
from headrace.checkpoint.records import RecordTable
from headrace.checkpoint.writer import whole_file, write_all
from headrace.config import EngineConfig
from headrace.disk_bench import measure_drive
from headrace.drive import find_drive
from headrace.errors import CheckpointError, ConfigError, UnsupportedModelError
from headrace.experts.history import write_atomically
from headrace.experts.spread import Floats, expected_reads
from headrace.inspect import open_model
from headrace.llm import open_history, plan_model, resolve_model
from headrace.metrics import format_bytes

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told of work on files: name, bytes done, bytes in all."""

RESERVE_BYTES = 1 << 30


@dataclass(frozen=True)
class MirrorPlan:
    """Which records to copy, and why so many."""

    model: Path
    folder: Path
    fingerprint: str
    bytes_per_s: tuple[float, float]  # of the model's drive and of the mirror's
    wanted_share: float  # of reads: B2 / (B1 + B2)
    reached_share: float  # of the reads expected
    has_history: bool
    num_slots: int  # records that memory holds, and that are not read
    num_records: int
    record_bytes: dict[int, int]  # of one record, by layer
    budget_bytes: int
    layers: dict[int, tuple[int, ...]]  # layer -> experts, ascending
    is_same_drive: bool
    is_resumed: bool  # goes on with what an earlier command chose
    asked: Mapping[
        str, object
    ]  # what the choice depends on, noted so that the same command goes on

    @property
    def mirror_bytes(self) -> int:
        """Bytes of the records chosen."""
        return sum(len(experts) * self.record_bytes[n] for n, experts in self.layers.items())

    @property
    def num_chosen(self) -> int:
        """Records chosen."""
        return sum(map(len, self.layers.values()))

    @property
    def bytes_per_s_together(self) -> float:
        """What both drives give at best: no more than reads outside the mirror leave, and one
        drive's rate where both folders are on it.
        """
        first, second = self.bytes_per_s
        if self.is_same_drive:
            return first
        own = 1 - self.reached_share
        return first + second if own <= 0 else min(first + second, first / own)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "model": str(self.model),
            "drive": str(self.folder),
            "fingerprint": self.fingerprint,
            "bytes_per_s": list(self.bytes_per_s),
            "bytes_per_s_together": self.bytes_per_s_together,
            "wanted_share": self.wanted_share,
            "reached_share": self.reached_share,
            "has_history": self.has_history,
            "num_slots": self.num_slots,
            "num_records": self.num_records,
            "num_chosen": self.num_chosen,
            "mirror_bytes": self.mirror_bytes,
            "budget_bytes": self.budget_bytes,
            "is_same_drive": self.is_same_drive,
            "layers": {str(layer): list(experts) for layer, experts in self.layers.items()},
        }


def plan_mirror(
    model: str | Path,
    folder: Path,
    config: EngineConfig,
    *,
    budget_bytes: int | None = None,
    reserve_bytes: int = RESERVE_BYTES,
    bytes_per_s: tuple[float, float] | None = None,
    progress: Progress = lambda *_: None,
) -> MirrorPlan:
    """Choose the records that are read most, until the second drive's share of reads is its share
    of the bandwidth, or the budget is used. A mirror that was begun is gone on with.

    Args:
        model: a container.
        folder: of the mirror; made by `stage`.
        config: memory and history: what memory holds is not read.
        budget_bytes: most bytes of records; None leaves only the reserve.
        reserve_bytes: free space that stays free.
        bytes_per_s: of the two drives; None takes what was measured, or measures.
        progress: told of a scratch file being written.

    Raises:
        UnsupportedModelError: records that are read in place have no copies.
        ConfigError: the folder cannot be a mirror, or a drive cannot be measured.
        CheckpointError: the model, or a mirror of another one in the folder.
    """
    path = resolve_model(model)
    folder = folder.expanduser().absolute()
    checkpoint, table = open_packed(path)
    note = _require_place(path, folder, checkpoint.fingerprint)
    plan = plan_model(path, config)
    history = open_history(path, checkpoint, config)
    has_history = history is not None and history.num_tokens > 0
    counts = history.counts if history is not None and has_history else None
    reads = expected_reads(counts, table, plan.num_slots)
    first, second = bytes_per_s or (
        plan.drive_bytes_per_s or _measure(path, table.read_bytes, progress),
        _measure(folder, table.read_bytes, progress),
    )
    wanted = second / (first + second)
    free = shutil.disk_usage(_existing(folder)).free + _held_bytes(folder, table)
    budget = max(0, free - reserve_bytes)
    budget = budget if budget_bytes is None else min(budget, budget_bytes)
    asked = {"budget": budget_bytes, "rates": None if bytes_per_s is None else list(bytes_per_s)}
    begun = _begun(note, folder, table, asked)
    if begun is not None and _choice_bytes(begun, table) > budget:
        begun = None  # less is free than was, or more is to stay free
    layers = begun or choose(reads, table, wanted, budget)
    chosen = sum(
        float(reads[table.layers.index(layer), list(experts)].sum())
        for layer, experts in layers.items()
        if experts
    )
    return MirrorPlan(
        model=path,
        folder=folder,
        fingerprint=checkpoint.fingerprint,
        bytes_per_s=(first, second),
        wanted_share=wanted,
        reached_share=chosen / float(reads.sum()),
        has_history=has_history,
        num_slots=plan.num_slots,
        num_records=table.num_records,
        record_bytes={n: table.layout_of(n).record_bytes for n in table.layers},
        budget_bytes=budget,
        layers=layers,
        is_same_drive=find_drive(table.files[0]).shares_with(find_drive(_existing(folder))),
        is_resumed=begun is not None,
        asked=asked,
    )


def open_packed(path: Path) -> tuple[ContainerCheckpoint, RecordTable]:
    """Open a container with experts.

    Raises:
        UnsupportedModelError: it is another kind of checkpoint, or has no experts.
    """
    checkpoint = open_model(path)[1]
    if checkpoint.records is None:
        raise UnsupportedModelError(
            f"no experts to copy: {path}\na dense model is in memory, nothing is read while it runs"
        )
    if not isinstance(checkpoint, ContainerCheckpoint):
        raise UnsupportedModelError(
            f"no packed records to copy: {path}\n"
            f"expected a container with experts, got {checkpoint.kind}\n"
            "hint: `headrace convert SOURCE DEST` packs a checkpoint's experts"
        )
    return checkpoint, checkpoint.records


def _require_place(model: Path, folder: Path, fingerprint: str) -> dict[str, object] | None:
    """The folder is a mirror of this model, or empty, or to be made; returns the mirror's note."""
    mine, other = folder.resolve(), model.resolve()
    if mine == other or mine.is_relative_to(other) or other.is_relative_to(mine):
        raise ConfigError(
            f"a mirror may not lie in its model's folder, nor around it: {folder}\n"
            "hint: name a folder of its own on the other drive"
        )
    if not folder.exists():
        return None
    note = require_mirror(folder, fingerprint)
    if note is None and (not folder.is_dir() or any(folder.iterdir())):
        what = "a model" if (folder / MANIFEST_NAME).exists() else f"no {MIRROR_NAME}"
        raise ConfigError(
            f"not an empty folder, and no mirror: {folder}\nexpected a new folder, got {what} in it"
        )
    return note


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _held_bytes(folder: Path, table: RecordTable) -> int:
    files = (folder / expert_file_name(layer) for layer in table.layers)
    return sum(file.stat().st_size for file in files if file.is_file())


def _begun(
    note: dict[str, object] | None, folder: Path, table: RecordTable, asked: Mapping[str, object]
) -> dict[int, tuple[int, ...]] | None:
    """What an earlier command that asked for the same chose and did not finish."""
    if note is None or any(note.get(name) != value for name, value in asked.items()):
        return None
    layers = parse_choice(note, folder, table)
    is_finished = all(is_staged(folder, layer, experts, table) for layer, experts in layers.items())
    return None if is_finished else layers


def _choice_bytes(layers: dict[int, tuple[int, ...]], table: RecordTable) -> int:
    return sum(len(experts) * table.layout_of(n).record_bytes for n, experts in layers.items())


def parse_choice(
    note: dict[str, object], folder: Path, table: RecordTable
) -> dict[int, tuple[int, ...]]:
    """Read which experts of each layer a mirror is to hold.

    Raises:
        CheckpointError: the note is malformed.
    """
    layers = note.get("layers")
    known = {str(layer) for layer in table.layers}
    if not isinstance(layers, dict) or set(layers) != known:
        raise CheckpointError(f"malformed mirror: field `layers`, file {folder / MIRROR_NAME}")
    for experts in layers.values():
        if not isinstance(experts, list) or not all(
            type(e) is int and 0 <= e < table.num_experts for e in experts
        ):
            raise CheckpointError(
                f"malformed mirror: field `layers`, file {folder / MIRROR_NAME}\n"
                f"expected experts 0..{table.num_experts - 1}, got {str(experts)[:80]}"
            )
    return {layer: tuple(sorted(set(layers[str(layer)]))) for layer in table.layers}


def is_staged(folder: Path, layer: int, experts: Sequence[int], table: RecordTable) -> bool:
    """Whether a layer's file is there and holds exactly these experts."""
    path = folder / expert_file_name(layer)
    if not experts or not path.is_file():
        return not experts and not path.exists()
    try:
        return sorted(read_copies(path, layer, table)) == list(experts)
    except CheckpointError:
        return False


def choose(
    reads: Floats, table: RecordTable, share: float, budget_bytes: int
) -> dict[int, tuple[int, ...]]:
    """Take of each layer the records read most, until they make up a share of its reads.

    By layer, since a step waits for the reads of one layer at a time: a drive helps only where it
    has something of that layer. A budget lowers the share of all layers alike.
    """
    order = np.argsort(-reads, axis=1, kind="stable")
    before = np.cumsum(np.take_along_axis(reads, order, axis=1), axis=1)
    before = np.concatenate([np.zeros((len(reads), 1)), before[:, :-1]], axis=1)
    part = before / reads.sum(axis=1, keepdims=True)  # of its layer's reads, without the record

    def numbers(wanted: float) -> npt.NDArray[np.int64]:
        return np.asarray((part < wanted * (1 - 1e-12)).sum(axis=1), np.int64)

    most = budget_bytes // table.record_bytes
    low, high = 0.0, share
    if numbers(share).sum() > most:
        for _ in range(60):
            middle = (low + high) / 2
            if numbers(middle).sum() > most:
                high = middle
            else:
                low = middle
        share = low
    return {
        layer: tuple(sorted(int(e) for e in order[row, :count]))
        for row, (layer, count) in enumerate(zip(table.layers, numbers(share), strict=True))
    }


def _measure(path: Path, record_bytes: int, progress: Progress) -> float:
    """The bandwidth of a folder's drive: remembered, or measured now and remembered."""
    place = _existing(path)
    entry = measure_drive(place, record_bytes, progress)
    if entry is None:
        raise ConfigError(
            f"the drive cannot be measured: {place}\n"
            "hint: give both bandwidths with `--rates`, such as 1.2GB/s,3GB/s"
        )
    return entry.bytes_per_s


def stage(plan: MirrorPlan, progress: Progress = lambda *_: None) -> int:
    """Write the records of a plan, each layer's file whole or not at all; returns bytes copied.

    What is there already and fits is kept, so a killed command goes on where it was. Every record
    is compared with the model's checksum on its way.

    Args:
        plan: what to copy.
        progress: file, bytes done and bytes in all.

    Raises:
        CheckpointError: a record of the model is damaged, or the mirror cannot be written.
    """
    _, table = open_packed(plan.model)
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {plan.folder}: {error.strerror}") from None
    note = {
        "format": MIRROR_FORMAT,
        "version": MIRROR_VERSION,
        "fingerprint": plan.fingerprint,
        **plan.asked,
        "layers": {str(layer): list(experts) for layer, experts in plan.layers.items()},
    }
    write_atomically(plan.folder / MIRROR_NAME, (json.dumps(note, indent=1) + "\n").encode())
    copied = done = 0
    for layer, experts in plan.layers.items():
        path = plan.folder / expert_file_name(layer)
        if is_staged(plan.folder, layer, experts, table):
            done += len(experts) * plan.record_bytes[layer]
        elif not experts:
            path.unlink()
        else:
            for nbytes in _write_layer(path, layer, experts, table):
                copied += nbytes
                done += nbytes
                progress(path.name, done, plan.mirror_bytes)
    return copied


def _write_layer(path: Path, layer: int, experts: Sequence[int], table: RecordTable) -> Any:
    """Copy records into a layer's file; yields the bytes of each."""
    nbytes = table.layout_of(layer).record_bytes
    data = make_record(table)
    names = [record_name(layer, expert) for expert in experts]
    with whole_file(path) as file:
        write_all(file, padded_header((name, "U8", (nbytes,), nbytes) for name in names))
        for expert in experts:
            write_all(file, read_record(table, layer, expert, data))
            yield nbytes


@dataclass(frozen=True)
class MirrorCheck:
    """What `verify` found."""

    num_good: int
    num_missing: int  # chosen, and in no file
    problems: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether every record that was chosen is there and right."""
        return not self.problems and self.num_missing == 0


def verify_mirror(
    model: str | Path, folder: Path, progress: Progress = lambda *_: None
) -> MirrorCheck:
    """Read every record of a mirror and compare it with the model's checksum.

    Raises:
        CheckpointError: there is no mirror of this model in the folder.
        UnsupportedModelError: as `open_packed`.
    """
    checkpoint, table = open_packed(resolve_model(model))
    note = require_mirror(folder, checkpoint.fingerprint)
    if note is None:
        raise CheckpointError(f"no mirror: {folder} has no {MIRROR_NAME}")
    layers = parse_choice(note, folder, table)
    data = make_record(table)
    total = sum(map(len, layers.values()))
    good, seen, problems = 0, 0, []
    for layer, experts in layers.items():
        path = folder / expert_file_name(layer)
        if not experts or not path.is_file():
            continue
        try:
            copies = read_copies(path, layer, table)
        except CheckpointError as error:
            problems.append(str(error).partition("\nhint:")[0])
            seen += len(experts)
            continue
        for expert in sorted(copies.keys() & set(experts)):
            try:
                read_record(table, layer, expert, data, (path, copies[expert]))
                good += 1
            except CheckpointError as error:  # its hint is for the model's own records
                problems.append(str(error).partition("\nhint:")[0])
            seen += 1
            progress(path.name, seen * data.nbytes, total * data.nbytes)
    return MirrorCheck(good, total - seen, tuple(problems))


def describe_plan(plan: MirrorPlan) -> list[str]:
    """Write a plan for people."""
    first, second = (rate / 1e9 for rate in plan.bytes_per_s)
    lines = [
        f"model's drive {first:.2f} GB/s, mirror's {second:.2f} GB/s: "
        f"{100 * plan.wanted_share:.1f} % of reads should go to the mirror",
        f"copies of {plan.num_chosen} of {plan.num_records} records, "
        f"{format_bytes(plan.mirror_bytes)} of {format_bytes(plan.budget_bytes)} allowed, "
        f"would be {100 * plan.reached_share:.1f} % of reads beyond {plan.num_slots} slots "
        + (
            "by the history" if plan.has_history else "if all experts are wanted alike (no history)"
        ),
        f"together at most {plan.bytes_per_s_together / 1e9:.2f} GB/s",
    ]
    if plan.is_resumed:
        lines.append("an earlier choice was not finished: it is gone on with")
    if plan.num_slots >= plan.num_records:
        lines.append("note: every record has a slot, so nothing is read that a mirror could give")
    if plan.is_same_drive:
        lines.append("note: both folders lie on one drive: a mirror there gains nothing")
    return lines
