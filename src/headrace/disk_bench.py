"""The curve of a drive: bandwidth by size of a read, readers and mode, at a model's record size.

Finds or makes something to read, measures each setting in several windows, and says what the
figures rest on. A figure whose bytes came from a cache of this machine is left out. Prints nothing.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.checkpoint.layout import MANIFEST_NAME
from headrace.drive import Drive, find_drive
from headrace.errors import ConfigError
from headrace.experts.drive_cache import DriveCache, DriveRecord, remembered
from headrace.experts.probe import (
    ALIGNMENT,
    READERS,
    ColdPlaces,
    Probed,
    Rate,
    ReadSetting,
    choose,
    measure_rates,
    measure_window,
    probe,
)
from headrace.inspect import open_model
from headrace.machine import Steal, describe_machine
from headrace.metrics import format_bytes

RECORD_BYTES = 4 << 20  # where no model says otherwise: between Qwen3-30B's 2.5 and gpt-oss' 13 MB
SIZES = (256 << 10, 1 << 20)  # and the whole record
MAX_READ_BYTES = 8 << 30
SCRATCH_BYTES = 4 << 30
PROBE_BYTES = 512 << 20  # read to know no more than the drive's speed
WINDOWS = 5
WINDOW_S = 0.25  # longest, but for slow drives: a window is never less than a record per reader
RESERVE_BYTES = 1 << 30  # left free beside a scratch file
RECENT_S = 600  # what was written since may still be in the cache of a host or of the drive
PIECE_BYTES = 64 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Target:
    """What is read: the records of a model, a file, or a scratch file."""

    path: Path
    kind: str  # model | file | scratch
    files: tuple[Path, ...]
    places: ColdPlaces
    drive: Drive
    age_s: float  # since the youngest file was written


@contextlib.contextmanager
def open_target(
    path: Path, record_bytes: int | None, max_read_bytes: int, progress: Progress, seed: int
) -> Iterator[Target]:
    """Find something cold to read at a path; a directory that is no model gets a scratch file.

    Args:
        path: a model, a file or a directory.
        record_bytes: length of one record; None is the model's, or 4 MiB.
        max_read_bytes: a scratch file is not longer than this.
        progress: told of the writing: name, bytes done, bytes in all.
        seed: of the order of reading.

    Raises:
        ConfigError: there is nothing to read, no space, or the directory cannot be written.
        CheckpointError, UnsupportedModelError: a model that cannot be opened.
    """
    length = -(-(record_bytes or RECORD_BYTES) // ALIGNMENT) * ALIGNMENT
    if _is_model(path):
        yield _model_target(path, record_bytes, length, seed)
    elif path.is_dir():
        with _scratch(path, min(max_read_bytes, SCRATCH_BYTES), progress) as file:
            yield _target(path, "scratch", ColdPlaces.of_files([file], length, seed))
    elif path.is_file():
        yield _target(path, "file", ColdPlaces.of_files([path], length, seed))
    else:
        raise ConfigError(
            f"nothing to read: {path}\nexpected a model, a file or a directory\n"
            "hint: a directory gets a scratch file, which is removed afterwards"
        )


def _is_model(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".gguf"
    return (path / "config.json").is_file() or (path / MANIFEST_NAME).is_file()


def _model_target(path: Path, record_bytes: int | None, length: int, seed: int) -> Target:
    records = open_model(path)[1].records
    if records is not None and record_bytes is None:
        return _target(path, "model", ColdPlaces.of_table(records, seed))
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return _target(path, "model", ColdPlaces.of_files(files, length, seed))


def _target(path: Path, kind: str, places: ColdPlaces) -> Target:
    files = places.files
    written = max((file.stat().st_mtime for file in files), default=0.0)
    drive = find_drive(files[0] if files else path)
    return Target(path, kind, files, places, drive, max(0.0, time.time() - written))


def measure_drive(
    folder: Path, record_bytes: int, progress: Progress = lambda *_: None
) -> DriveRecord | None:
    """What is remembered of a folder's drive, else measured now and remembered.

    Args:
        folder: a scratch file of at most PROBE_BYTES is written into it, and removed.
        record_bytes: length of the records to be read.
        progress: told of the writing: name, bytes done, bytes in all.

    Returns:
        None if no read came from the drive.

    Raises:
        ConfigError: no space, or the folder cannot be written.
    """
    drive = find_drive(folder)
    cache = DriveCache()
    entry = cache.find(drive, record_bytes)
    if entry is not None:
        return entry
    with open_target(folder, record_bytes, PROBE_BYTES, progress, seed=0) as target:
        probed = probe(target.places, drive, max_memory_bytes=PROBE_BYTES)
    if probed is None:
        return None
    entry = remembered(probed, drive)
    cache.remember(drive, entry)
    return entry


@contextlib.contextmanager
def _scratch(folder: Path, num_bytes: int, progress: Progress) -> Iterator[Path]:
    """A file of random bytes on the drive; removed whatever happens."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + RESERVE_BYTES:
        raise ConfigError(
            f"too little free space for a scratch file: {folder}\n"
            f"expected {format_bytes(num_bytes)} and {format_bytes(RESERVE_BYTES)} to spare, "
            f"got {format_bytes(free)}\nhint: give a smaller `--max-read`, or a file to read"
        )
    # Named before it is made, so that no moment is left at which a signal would leave it behind.
    path = folder / f".headrace-disk-{secrets.token_hex(8)}"
    try:
        _fill_random(path, num_bytes, progress)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fill_random(path: Path, num_bytes: int, progress: Progress) -> None:
    random = np.random.default_rng()  # before the file: its import swallows what a signal raises
    try:
        file = path.open("xb")
    except OSError as error:
        raise ConfigError(
            f"cannot write a scratch file: {path.parent}: {error.strerror}\n"
            "hint: name a directory that can be written, or a file to read"
        ) from None
    with file:
        for at in range(0, num_bytes, PIECE_BYTES):
            file.write(random.bytes(min(PIECE_BYTES, num_bytes - at)))
            progress("writing a scratch file", min(num_bytes, at + PIECE_BYTES), num_bytes)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class DiskReport:
    """The curve, and what it rests on."""

    target: Target
    machine: str
    rates: tuple[Rate, ...]
    num_windows: int  # asked of each setting
    bytes_read: int
    seconds: float
    steal: float
    memory_bytes_per_s: float
    chosen: Probed | None
    notes: tuple[str, ...]

    @property
    def is_verified(self) -> bool:
        """Whether the kernel's own count says that every figure came from the drive."""
        windows = [w for rate in self.rates for w in rate.windows]
        return bool(windows) and all(w.from_drive for w in windows)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {
            "path": str(self.target.path),
            "kind": self.target.kind,
            "machine": self.machine,
            "drive": asdict(self.target.drive),
            "record_bytes": self.target.places.record_bytes,
            "bytes_read": self.bytes_read,
            "seconds": self.seconds,
            "steal": self.steal,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "is_verified": self.is_verified,
            "rates": [_rate_dict(rate) for rate in self.rates],
            "chosen": None if self.chosen is None else asdict(self.chosen),
            "notes": list(self.notes),
        }


def _rate_dict(rate: Rate) -> dict[str, Any]:
    slowest, fastest = rate.spread or (None, None)
    return {
        "mode": "direct" if rate.setting.direct else "buffered",
        "block_bytes": rate.setting.block_bytes,
        "readers": rate.setting.readers,
        "bytes_per_s": rate.bytes_per_s,
        "slowest_bytes_per_s": slowest,
        "fastest_bytes_per_s": fastest,
        "latency_s": rate.latency_s,
        "num_windows": len(rate.windows),
        "num_cached": rate.num_cached,
        "num_refused": rate.num_refused,
    }


def measure_curve(
    target: Target,
    *,
    sizes: Sequence[int] = (),
    readers: Sequence[int] = (),
    num_windows: int = WINDOWS,
    max_read_bytes: int = MAX_READ_BYTES,
    progress: Progress = lambda *_: None,
) -> DiskReport:
    """Measure every size with every number of readers, direct and buffered.

    A record is read in blocks of the size, by all readers together; every offset is read once.

    Args:
        target: what to read.
        sizes: of a block in bytes; empty: 256 KiB, 1 MiB and the whole record.
        readers: threads that read; empty: 1, 2, 4 and 8.
        num_windows: per setting; fewer if there is less to read.
        max_read_bytes: the whole measurement stops before it.
        progress: told of the reading: what, bytes done, bytes in all.

    Raises:
        ConfigError: there is less to read than one window of every setting takes.
        CheckpointError: a read failed.
    """
    record_bytes = target.places.record_bytes
    blocks = sorted({min(size, record_bytes) for size in (*sizes,)} or _usual_sizes(record_bytes))
    settings = [
        ReadSetting(count, size, direct)
        for direct in (True, False)
        for size in blocks
        for count in sorted(set(readers or READERS))
    ]
    budget = min(max_read_bytes, target.places.bytes_left)
    num_bytes, rounds = _divide(budget, settings, record_bytes, num_windows, target)
    memory = memory_bytes_per_s()
    start, done = time.perf_counter(), 0
    with Steal() as steal:
        first = measure_window(
            target.places, settings[0], target.drive, num_bytes=settings[0].readers * record_bytes
        )
        if first is not None:
            num_bytes = min(num_bytes, max(ALIGNMENT, round(first.bytes_per_s * WINDOW_S)))
            done = first.bytes_read
        total = rounds * sum(_window_bytes(s, record_bytes, num_bytes) for s in settings)

        def see(count: int) -> None:
            nonlocal done
            done += count
            progress("reading", min(done, total), total)

        rates = measure_rates(
            target.places,
            settings,
            target.drive,
            rounds=rounds,
            window_bytes=num_bytes,
            memory_bytes_per_s=memory,
            on_window=see,
        )
    best = choose(rates)
    report = DiskReport(
        target=target,
        machine=describe_machine(),
        rates=tuple(rates),
        num_windows=rounds,
        bytes_read=done,
        seconds=time.perf_counter() - start,
        steal=steal.share,
        memory_bytes_per_s=memory,
        chosen=None if best is None else Probed.of(best, record_bytes),
        notes=(),
    )
    return replace(report, notes=tuple(_notes(report, num_windows)))


def _usual_sizes(record_bytes: int) -> set[int]:
    return {size for size in SIZES if size < record_bytes} | {record_bytes}


def _window_bytes(setting: ReadSetting, record_bytes: int, num_bytes: int) -> int:
    """What `measure_window` reads for at least `num_bytes`."""
    return max(setting.readers + 1, round(num_bytes / record_bytes)) * record_bytes


def _divide(
    budget: int,
    settings: Sequence[ReadSetting],
    record_bytes: int,
    num_windows: int,
    target: Target,
) -> tuple[int, int]:
    """Bytes of a window and windows per setting, so that all of it stays within the budget."""
    budget -= (settings[0].readers + 1) * record_bytes  # the window that sizes the others
    for rounds in range(num_windows, 0, -1):
        num_bytes = budget // (rounds * len(settings)) - record_bytes
        if rounds * sum(_window_bytes(s, record_bytes, num_bytes) for s in settings) <= budget:
            return num_bytes, rounds
    least = sum(_window_bytes(s, record_bytes, 0) for s in settings)
    if least <= budget:  # many readers need more than an equal part
        return ALIGNMENT, 1
    raise ConfigError(
        f"too little to read: {target.path}\n"
        f"expected {format_bytes(least)} for one window of each of {len(settings)} settings, each "
        f"offset once, got {format_bytes(max(0, budget))}\n"
        "hint: ask for fewer `--sizes` and `--readers`, a smaller `--record`, or name a larger file"
    )


def memory_bytes_per_s() -> float:
    """Return how fast one core copies memory: what a read from a cache looks like."""
    source, copy = np.ones(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)
    speeds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(copy, source)
        speeds.append(source.nbytes / (time.perf_counter() - start))
    return median(speeds)


def _notes(report: DiskReport, num_windows: int) -> Iterator[str]:
    target, rates = report.target, report.rates
    if target.age_s < RECENT_S:
        yield (
            f"the files were written {target.age_s / 60:.0f} min ago: a host or the drive may "
            "still hold them in a cache that nobody here can see; old files may read slower"
        )
    if any(rate.num_refused for rate in rates):
        yield "the filesystem refuses direct reads"
    if target.drive.is_memory:
        yield f"{target.drive.filesystem} is memory: there is no drive to measure here"
    elif cached := sum(rate.num_cached for rate in rates):
        yield f"{cached} windows were left out: a cache of this machine answered them"
    if not target.drive.is_memory and not report.is_verified and any(r.windows for r in rates):
        yield (
            f"the kernel does not count reads of {target.drive.filesystem}: whether they came from "
            "a drive is not known, only that they were slower than half a copy in memory"
        )
    if report.num_windows < num_windows:
        got = f"windows per setting: {report.num_windows}, not {num_windows}"
        yield f"{got}: there is no more to read"
    if report.steal > 0.05:
        yield f"the host took {report.steal:.0%} of the processors' time: measure again"
