"""What was measured of each drive: one small file in the user's cache directory.

It is advice: a file that is missing or damaged is put aside with one logged warning and never stops
a run. An entry belongs to a drive's identity and a class of record sizes, and is forgotten when a
run reads at another speed than it says.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from headrace.drive import Drive
from headrace.experts.history import write_atomically
from headrace.experts.probe import Probed, ReadSetting

_log = logging.getLogger(__name__)

FILE_NAME = "drives.json"
FORMAT = "headrace drives"
FORMAT_VERSION = 1
DRIFT_FACTOR = 2.0
"""A run that reads this many times faster or slower than the entry says ends the entry. Windows of
a virtual drive differ by as much, whole runs do not."""
DRIFT_BYTES = 512 << 20
"""Runs that read less say nothing about a drive."""
_MAX_FILE_BYTES = 4 << 20


def default_path() -> Path:
    """Return where the file lives: the user's cache directory, whatever the model."""
    return Path(platformdirs.user_cache_dir("headrace")) / FILE_NAME


@dataclass(frozen=True)
class DriveRecord:
    """What is remembered of one drive at one class of record sizes."""

    drive: str  # its label, for people
    readers: int
    block_bytes: int
    direct: bool
    bytes_per_s: float
    slowest_bytes_per_s: float
    fastest_bytes_per_s: float
    record_bytes: int
    measured_at: float  # seconds since 1970

    @property
    def setting(self) -> ReadSetting:
        """How to read."""
        return ReadSetting(self.readers, self.block_bytes, self.direct)


def remembered(probed: Probed, drive: Drive) -> DriveRecord:
    """Make an entry of a probe's result, measured now."""
    return DriveRecord(
        drive=drive.label,
        **asdict(probed.setting),
        bytes_per_s=probed.bytes_per_s,
        slowest_bytes_per_s=probed.slowest_bytes_per_s,
        fastest_bytes_per_s=probed.fastest_bytes_per_s,
        record_bytes=probed.record_bytes,
        measured_at=time.time(),
    )


class DriveCache:
    """The entries of all drives. Reading and writing never raise; what fails is logged."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if there is one.

        Args:
            path: the file; None is the user's.
        """
        self.path = path or default_path()
        self._is_damaged = False
        self._entries = self._read()

    def find(self, drive: Drive, record_bytes: int) -> DriveRecord | None:
        """Return what is known of a drive at about this record size."""
        return self._entries.get(_key(drive, record_bytes))

    def remember(self, drive: Drive, entry: DriveRecord) -> None:
        """Keep an entry and write the file."""
        self._entries = self._read() | {_key(drive, entry.record_bytes): entry}
        self._write()

    def observe(
        self, drive: Drive, record_bytes: int, *, bytes_read: int, busy_s: float
    ) -> DriveRecord | None:
        """Compare a run with the entry, and forget the entry if it drifted.

        Args:
            drive: that was read.
            record_bytes: of the model.
            bytes_read: of the run.
            busy_s: seconds in which at least one read was in flight.

        Returns:
            The entry that was forgotten; None if there is none, or it still holds.
        """
        entry = self.find(drive, record_bytes)
        if entry is None or bytes_read < DRIFT_BYTES or busy_s <= 0:
            return None
        ratio = bytes_read / busy_s / entry.bytes_per_s
        if 1 / DRIFT_FACTOR <= ratio <= DRIFT_FACTOR:
            return None
        self._entries = self._read()
        self._entries.pop(_key(drive, record_bytes), None)
        self._write()
        _log.info("drive measured anew at the next start: %.2f of its speed", ratio)
        return entry

    def _read(self) -> dict[str, DriveRecord]:
        """The file as it is now: another process may have written it since."""
        if self._is_damaged:
            return self._entries
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
            return _parse(json.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._is_damaged = True
            _log.warning("measurements of drives ignored: %s: %s", self.path, error)
            return {}

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "drives": {key: asdict(entry) for key, entry in sorted(self._entries.items())},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            _log.warning("measurements of drives not saved: %s: %s", self.path, error)


def _key(drive: Drive, record_bytes: int) -> str:
    """Records within a factor of two are one class: 2^k up to less than 2^(k+1) bytes."""
    return f"{drive.identity} 2^{record_bytes.bit_length() - 1}"


def _parse(content: object) -> dict[str, DriveRecord]:
    """Check a parsed file; ValueError says what is wrong."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("not a file of this kind")
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(f"version {content.get('version')!r}, expected {FORMAT_VERSION}")
    drives = content.get("drives")
    if not isinstance(drives, dict):
        raise ValueError("`drives` is missing")
    return {str(key): _entry(value) for key, value in drives.items()}


def _entry(value: Any) -> DriveRecord:
    names = {item.name for item in fields(DriveRecord)}
    if not isinstance(value, Mapping) or set(value) != names:
        raise ValueError("an entry has other fields")
    entry = DriveRecord(**value)
    numbers = (entry.bytes_per_s, entry.slowest_bytes_per_s, entry.fastest_bytes_per_s)
    counts = (entry.readers, entry.block_bytes, entry.record_bytes)
    if (
        not all(type(x) is int and x > 0 for x in counts)
        or not all(type(x) in (int, float) and 0 < x < 1e15 for x in numbers)
        or type(entry.direct) is not bool
        or type(entry.measured_at) not in (int, float)
        or entry.readers > 256
        or entry.block_bytes % 4096
        or entry.block_bytes > 1 << 30
    ):
        raise ValueError("an entry holds a value out of range")
    return entry
