"""How fast a drive gives records, by readers, block size and mode; and which of them to use.

Measures with the readers that the store uses, at record size, at offsets that were not read before
in this run, in short windows that take turns, since drives are noisy. A window whose bytes did not
come from a drive, by the kernel's own count, is no measurement. Keeps nothing: `drive_cache.py`
remembers.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from headrace import _core
from headrace.checkpoint.records import RecordTable
from headrace.drive import Drive
from headrace.machine import drive_bytes_read

ALIGNMENT = 4096
READERS = (1, 2, 4, 8)
"""Depths tried: threads that read, each waiting for one block."""
USUAL_BLOCK_BYTES = 1 << 20
BLOCK_BYTES = (256 << 10, USUAL_BLOCK_BYTES, 8 << 20)
"""Largest single reads tried; a record that is smaller is one read."""
ROUNDS = 4
WINDOW_S = 0.03
PROBE_SECONDS = 1.2
"""A probe ends here, with the windows it has: what a first start may wait."""
FIRST_BYTES = 32 << 20
"""Read once to size the windows, and not counted: a sleeping drive wakes up first."""
LEAST_RECORDS_BYTES = 1 << 30
"""A model with fewer bytes of records is not probed at start: a second of reading would be much of
all it ever reads, and its offsets would run out."""
MARGIN = 0.1
"""Depths within this share of the best are alike. Another block size must win by as much."""
BUFFERED_MARGIN = 0.25
"""Buffered reads must win by this much: they cost a copy, and the page cache of everybody else."""
COUNTED_SHARE = 0.95
"""Share of a window's bytes that the kernel must have fetched from a drive."""


@dataclass(frozen=True)
class ReadSetting:
    """One way to read: what `--readers`, `--block-bytes` and `--direct` name."""

    readers: int
    block_bytes: int
    direct: bool


@dataclass(frozen=True)
class Window:
    """One measured stretch of reads."""

    bytes_read: int
    seconds: float
    latency_s: float  # mean over blocks
    is_direct: bool  # False where the filesystem refused
    from_drive: bool | None  # None: the kernel does not count this filesystem's reads

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the window."""
        return self.bytes_read / self.seconds


@dataclass
class Rate:
    """The windows of one setting; those that a cache answered, and those that were to be direct
    and were not, are only counted.
    """

    setting: ReadSetting
    windows: list[Window] = field(default_factory=list)
    num_cached: int = 0
    num_refused: int = 0

    def add(self, window: Window, memory_bytes_per_s: float) -> None:
        """Take a window in, or count why it is no measurement of this setting.

        Where the kernel does not count, what is half as fast as a copy in memory came from there.
        """
        if self.setting.direct and not window.is_direct:
            self.num_refused += 1
        elif window.from_drive is False or (
            window.from_drive is None and window.bytes_per_s > memory_bytes_per_s / 2
        ):
            self.num_cached += 1
        else:
            self.windows.append(window)

    @property
    def bytes_per_s(self) -> float | None:
        """Median over windows; None if none is left."""
        return median(w.bytes_per_s for w in self.windows) if self.windows else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """Slowest and fastest window, in bytes per second."""
        speeds = [w.bytes_per_s for w in self.windows]
        return (min(speeds), max(speeds)) if speeds else None

    @property
    def latency_s(self) -> float | None:
        """Median over windows of the mean time of one block."""
        return median(w.latency_s for w in self.windows) if self.windows else None


class ColdPlaces:
    """Record-sized places of files in random order, each given out once."""

    def __init__(
        self, files: Sequence[Path], places: Iterable[tuple[int, int]], record_bytes: int, seed: int
    ) -> None:
        self.files = tuple(files)
        self.record_bytes = record_bytes
        self._places = list(places)
        random.Random(seed).shuffle(self._places)
        self.total_bytes = len(self._places) * record_bytes

    @classmethod
    def of_table(cls, table: RecordTable, seed: int) -> "ColdPlaces":
        """The places of a model's records.

        Records in place are three ranges at any offset; the aligned range that begins at the first
        of them stands for the record, as far as its file goes.
        """
        length = -(-table.read_bytes // ALIGNMENT) * ALIGNMENT
        firsts = zip(table.file[:, :, 0].flat, table.offset[:, :, 0].flat, strict=True)
        sizes = [path.stat().st_size for path in table.files]
        places = {
            (int(file), int(offset) // ALIGNMENT * ALIGNMENT)
            for file, offset in firsts
            if int(offset) // ALIGNMENT * ALIGNMENT + length <= sizes[int(file)]
        }
        return cls(table.files, sorted(places), length, seed)

    @classmethod
    def of_files(cls, files: Sequence[Path], record_bytes: int, seed: int) -> "ColdPlaces":
        """Every place of the files that holds a whole record."""
        places = (
            (index, offset)
            for index, path in enumerate(files)
            for offset in range(0, path.stat().st_size - record_bytes + 1, record_bytes)
        )
        return cls(files, places, record_bytes, seed)

    @property
    def bytes_left(self) -> int:
        """Bytes that were not given out yet."""
        return len(self._places) * self.record_bytes

    def take(self, num_records: int) -> list[tuple[int, int]]:
        """Give out (file, offset) pairs that were not given out before; fewer at the end."""
        taken = self._places[-num_records:] if num_records > 0 else []
        del self._places[len(self._places) - len(taken) :]
        return taken


def measure_window(
    places: ColdPlaces,
    setting: ReadSetting,
    drive: Drive,
    *,
    num_bytes: int,
    with_checksum: bool = True,
) -> Window | None:
    """Read about `num_bytes` of cold records once; None when too few places are left.

    Buffered reads begin with those pages dropped from the page cache. Whether the bytes came from
    the drive is what the kernel counted for this process meanwhile.

    Raises:
        CheckpointError: a read failed.
    """
    record_bytes = places.record_bytes
    num_records = max(setting.readers + 1, round(num_bytes / record_bytes))
    if places.bytes_left < num_records * record_bytes:
        return None
    taken = places.take(num_records)
    paths = [str(path) for path in places.files]
    if not setting.direct:
        _drop_pages(places.files, taken, record_bytes)
    before = drive_bytes_read()
    count, elapsed_ns, num_reads, read_ns, is_direct = _core.probe_reads(
        paths,
        taken,
        record_bytes=record_bytes,
        block_bytes=setting.block_bytes,
        readers=setting.readers,
        direct=setting.direct,
        with_checksum=with_checksum,
    )
    after = drive_bytes_read()
    from_drive = None
    if drive.is_memory:
        from_drive = False
    elif before is not None and after is not None and drive.is_counted:
        from_drive = after - before >= COUNTED_SHARE * count
    return Window(count, max(1, elapsed_ns) / 1e9, read_ns / num_reads / 1e9, is_direct, from_drive)


def _drop_pages(
    files: Sequence[Path], places: Iterable[tuple[int, int]], record_bytes: int
) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.ExitStack() as stack:
        handles: dict[int, int] = {}
        for file, offset in places:
            if file not in handles:
                handles[file] = os.open(files[file], os.O_RDONLY)
                stack.callback(os.close, handles[file])
            os.posix_fadvise(handles[file], offset, record_bytes, os.POSIX_FADV_DONTNEED)


def measure_rates(
    places: ColdPlaces,
    settings: Sequence[ReadSetting],
    drive: Drive,
    *,
    rounds: int,
    window_bytes: int,
    with_checksum: bool = True,
    memory_bytes_per_s: float = float("inf"),
    until: float | None = None,
    on_window: Callable[[int], None] = lambda _: None,
) -> list[Rate]:
    """Measure settings in turns, every other round backwards, so that a drift touches all alike.

    Args:
        places: where to read; the measurement ends early when they run out.
        settings: what to compare.
        drive: that holds the files.
        rounds: windows per setting.
        window_bytes: least length of a window.
        with_checksum: sum every record on the reader thread, as the store does.
        memory_bytes_per_s: of a copy, to know a cache by where the kernel does not count.
        until: `time.perf_counter` at which no further round begins after the first.
        on_window: called with the bytes of each window.

    Returns:
        One rate per setting, in the order given.
    """
    rates = [Rate(setting) for setting in settings]
    for rate, number in _turns(rates, rounds):
        if until is not None and number > 0 and time.perf_counter() > until:
            break
        window = measure_window(
            places, rate.setting, drive, num_bytes=window_bytes, with_checksum=with_checksum
        )
        if window is None:
            break
        rate.add(window, memory_bytes_per_s)
        on_window(window.bytes_read)
    return rates


def _turns(rates: list[Rate], rounds: int) -> Iterator[tuple[Rate, int]]:
    for number in range(rounds):
        for rate in rates if number % 2 == 0 else reversed(rates):
            yield rate, number


def choose(rates: Sequence[Rate]) -> Rate | None:
    """Choose among measured settings.

    The second of the depths within MARGIN of the best, at the usual block size and mode: the fewest
    keep the drive busy only while each reader gets a core at once, which decoding denies it; still
    more only lengthen the time until a record is whole. Then another block size at that depth if it
    wins by MARGIN; then buffered reads, if they win by BUFFERED_MARGIN.

    Returns:
        The rate chosen; None if no setting was measured.
    """
    seen = [rate for rate in rates if rate.windows]
    direct = [rate for rate in seen if rate.setting.direct]
    first_mode = direct or seen
    if not first_mode:
        return None
    sizes = {rate.setting.block_bytes for rate in first_mode}
    usual = min(sizes, key=lambda size: (abs(size - USUAL_BLOCK_BYTES), size))
    chosen = _one_to_spare([r for r in first_mode if r.setting.block_bytes == usual])
    readers = chosen.setting.readers
    for rate in (r for r in first_mode if r.setting.readers == readers):
        chosen = _better(chosen, rate, MARGIN)
    for rate in (r for r in seen if r.setting == replace(chosen.setting, direct=False)):
        chosen = _better(chosen, rate, BUFFERED_MARGIN)
    return chosen


def _one_to_spare(rates: Sequence[Rate]) -> Rate:
    best = max(_speed(rate) for rate in rates)
    alike = [rate for rate in rates if _speed(rate) >= (1 - MARGIN) * best]
    return sorted(alike, key=lambda rate: rate.setting.readers)[:2][-1]


def _better(first: Rate, other: Rate, margin: float) -> Rate:
    return other if _speed(other) >= (1 + margin) * _speed(first) else first


def _speed(rate: Rate) -> float:
    return rate.bytes_per_s or 0.0


@dataclass(frozen=True)
class Probed:
    """What a probe found: the setting to use, and what it gave."""

    setting: ReadSetting
    bytes_per_s: float
    slowest_bytes_per_s: float
    fastest_bytes_per_s: float
    record_bytes: int

    @classmethod
    def of(cls, rate: Rate, record_bytes: int) -> "Probed":
        """Make it of a rate that was measured."""
        speed, spread = rate.bytes_per_s, rate.spread
        assert speed is not None and spread is not None, "a chosen rate was measured"
        return cls(rate.setting, speed, *spread, record_bytes)


def probe(
    places: ColdPlaces, drive: Drive, *, max_memory_bytes: int, with_checksum: bool = True
) -> Probed | None:
    """Choose readers, block size and mode for records of this size, in about a second.

    First the depth, by direct reads; then the block size at that depth; then buffered reads. Where
    the filesystem refuses direct reads, all of it is measured with buffered ones.

    Args:
        places: the model's records.
        drive: that holds them.
        max_memory_bytes: buffers may take this much: one record per reader, and one.
        with_checksum: as the store will read.

    Returns:
        The choice, or None if nothing could be measured: every read came out of memory, or there
        is too little to read.

    Raises:
        CheckpointError: a read failed.
    """
    start = time.perf_counter()
    depths = [n for n in READERS if (n + 1) * places.record_bytes <= max_memory_bytes]
    if not depths:
        return None
    usual = ReadSetting(min(4, depths[-1]), USUAL_BLOCK_BYTES, True)
    first = measure_window(places, usual, drive, num_bytes=FIRST_BYTES, with_checksum=with_checksum)
    if first is None:
        return None
    rates: list[Rate] = []

    def compare(settings: list[ReadSetting], share: float) -> ReadSetting | None:
        """Measure until this share of the time is over; return what is best so far."""
        rates.extend(
            measure_rates(
                places, settings, drive, rounds=ROUNDS, with_checksum=with_checksum,
                window_bytes=round(first.bytes_per_s * WINDOW_S),
                until=start + share * PROBE_SECONDS,
            )
        )  # fmt: skip
        best = choose(rates)
        return None if best is None else best.setting

    best = compare([replace(usual, readers=n, direct=first.is_direct) for n in depths], 0.5)
    if best is not None:
        best = compare([replace(best, block_bytes=size) for size in _other_blocks(places)], 0.8)
    if best is not None and best.direct:
        compare([replace(best, direct=False)], 1.0)
    chosen = choose(rates)
    return None if chosen is None else Probed.of(chosen, places.record_bytes)


def _other_blocks(places: ColdPlaces) -> list[int]:
    """Block sizes that cut a record otherwise than the usual one does."""
    usual = min(USUAL_BLOCK_BYTES, places.record_bytes)
    return [b for b in BLOCK_BYTES if min(b, places.record_bytes) != usual]
