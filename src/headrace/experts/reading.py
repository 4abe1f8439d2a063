"""How the records of a model are read: what the caller said, else what was measured of the drive.

Turns "auto" into numbers once, before the store opens. A drive is measured at the first start that
streams from it, for about a second; later starts remember. It never stops a run.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.checkpoint.records import RecordTable
from headrace.config import DEFAULT_READERS, ExpertConfig
from headrace.drive import Drive, find_drive
from headrace.errors import CheckpointError
from headrace.experts.drive_cache import DriveCache, DriveRecord, remembered
from headrace.experts.probe import LEAST_RECORDS_BYTES, ColdPlaces, probe
from headrace.experts.store import UNKNOWN_BYTES_PER_S, DriveReading

_log = logging.getLogger(__name__)

GIVEN = ("option", "tuned")
"""Sources of readers that are not the measurement's, which a run then says nothing about."""


@dataclass(frozen=True)
class Reading:
    """How to read, and why so."""

    experts: ExpertConfig  # with nothing left to "auto" if anything was measured
    source: str  # option | tuned | measured (now) | remembered (measured earlier) | default
    entry: DriveRecord | None = None  # the measurement
    drive: Drive | None = None
    drives: tuple[DriveReading, ...] = ()  # of each, the model's own first; empty of one alone

    @property
    def num_readers(self) -> int:
        """Threads that read, of all drives."""
        return sum(drive.readers for drive in self.drives) or self.experts.num_readers

    @property
    def drive_bytes_per_s(self) -> float | None:
        """Bandwidth that was measured; None without a measurement."""
        return None if self.entry is None else self.entry.bytes_per_s


def resolve_reading(
    config: ExpertConfig, table: RecordTable | None, *, probe_bytes: int = 0
) -> Reading:
    """Fill in what the caller left open, for each drive.

    Args:
        config: options given win, each by itself.
        table: the records; None for a model without experts.
        probe_bytes: memory a probe may take if nothing is remembered; 0 forbids one.
    """
    reading = _resolve_own(config, table, probe_bytes)
    return reading if table is None else replace(reading, drives=_drives(config, reading, table))


def _resolve_own(config: ExpertConfig, table: RecordTable | None, probe_bytes: int) -> Reading:
    """How the model's own drive is read."""
    is_open = config.readers == "auto" or config.block_bytes == "auto" or config.direct is None
    if table is None or not is_open:
        return Reading(config, "default" if is_open else "option")
    try:
        drive = find_drive(table.files[0])
    except OSError as error:
        _log.warning("drive not known: %s", error)
        return Reading(config, _source_of(config, "default"))
    cache = DriveCache()
    entry, source = cache.find(drive, table.read_bytes), "remembered"
    if entry is None and probe_bytes > 0:
        entry, source = _probe(config, table, drive, probe_bytes), "measured"
        if entry is not None:
            cache.remember(drive, entry)
    if entry is None:
        return Reading(config, _source_of(config, "default"), drive=drive)
    filled = _fill(config, entry, is_in_place=table.repack is not None)
    return Reading(filled, _source_of(config, source), entry, drive)


def _drives(config: ExpertConfig, reading: Reading, table: RecordTable) -> tuple[DriveReading, ...]:
    """Readers and bandwidth of each drive of a table; empty if there is one only.

    What is remembered of a drive, or else as of the model's: a guess only orders the first few
    reads. Folders on one drive share its bandwidth.
    """
    if not table.drives:
        return ()
    cache = DriveCache()
    own = reading.drive_bytes_per_s or UNKNOWN_BYTES_PER_S
    drives = [_find(folder) for folder in table.drives]
    found = []
    for number, drive in enumerate(drives):
        entry = cache.find(drive, table.read_bytes) if number and drive else None
        sharing = sum(bool(drive and other and drive.shares_with(other)) for other in drives)
        found.append(
            DriveReading(
                readers=entry.readers
                if entry is not None and config.readers == "auto"
                else reading.experts.num_readers,
                bytes_per_s=(own if entry is None else entry.bytes_per_s) / max(1, sharing),
            )
        )
    return tuple(found)


def _find(folder: Path) -> Drive | None:
    """None for a drive that is unplugged, which was said when the checkpoint was opened."""
    try:
        return find_drive(folder)
    except OSError:
        return None


def _source_of(config: ExpertConfig, otherwise: str) -> str:
    """Where the number of readers comes from: it names the source of the whole."""
    return otherwise if config.readers == "auto" else "option"


def _fill(config: ExpertConfig, entry: DriveRecord, *, is_in_place: bool) -> ExpertConfig:
    """Readers in place repack what they read, which the probe does not: they stay at least four."""
    readers = max(entry.readers, DEFAULT_READERS) if is_in_place else entry.readers
    return replace(
        config,
        readers=readers if config.readers == "auto" else config.readers,
        block_bytes=entry.block_bytes if config.block_bytes == "auto" else config.block_bytes,
        direct=entry.direct if config.direct is None else config.direct,
    )


def _probe(
    config: ExpertConfig, table: RecordTable, drive: Drive, max_memory_bytes: int
) -> DriveRecord | None:
    """Measure the drive, if the model is large enough for it to matter."""
    places = ColdPlaces.of_table(table, seed=0)
    if places.total_bytes < LEAST_RECORDS_BYTES:
        return None
    try:
        found = probe(places, drive, max_memory_bytes=max_memory_bytes, with_checksum=config.verify)
    except CheckpointError as error:
        _log.warning("drive not measured: %s", error)
        return None
    return None if found is None else remembered(found, drive)


def observe_run(reading: Reading, *, bytes_read: int, busy_s: float) -> None:
    """Compare a run's speed with the measurement it used, so that the next start measures anew.

    Args:
        reading: of the run.
        bytes_read: from the drive, by demand and on advice.
        busy_s: seconds in which at least one read was in flight.
    """
    entry, drive = reading.entry, reading.drive
    if entry is not None and drive is not None and reading.source not in GIVEN:
        DriveCache().observe(drive, entry.record_bytes, bytes_read=bytes_read, busy_s=busy_s)
