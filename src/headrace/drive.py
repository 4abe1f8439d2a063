"""Which drive a path lies on, and what the system says of it. Reads no data of the path.

A drive's `identity` is what measurements are remembered by: it must stay the same from one start to
the next, and must not be another drive's. Every fact may be missing and is then None. Tests pass a
directory of fake files as `root`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.machine import ROOT, read_number, read_text

SECTOR_BYTES = 512  # the unit of /sys/block/*/size, whatever the drive's own sectors are
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
# Filesystems whose reads do not pass through this process's block requests, so that the kernel's
# count of bytes fetched says nothing of them.
UNCOUNTED_FILESYSTEMS = re.compile(r"fuse.*|virtiofs|9p|nfs.*|cifs|smb.*|ceph|lustre|zfs|gpfs|afs")


@dataclass(frozen=True)
class Drive:
    """A block device, or whatever else holds a path, as far as the system tells."""

    device: str  # major:minor of the filesystem that holds the path
    name: str | None  # of the whole drive, such as `nvme0n1`; None: no block device is known
    model: str | None
    serial: str | None
    size_bytes: int | None
    is_rotational: bool | None
    scheduler: str | None
    read_ahead_bytes: int | None
    filesystem: str | None
    source: str | None  # what is mounted
    mount_point: str | None
    is_read_only: bool
    parts: tuple[str, ...]  # names of the drives below a stacked one (LVM, RAID, encryption)
    temperature_c: float | None
    limit_c: float | None  # where the drive begins to slow down or to suffer

    @property
    def is_memory(self) -> bool:
        """Whether the files are in memory and no drive is read at all."""
        return self.filesystem in MEMORY_FILESYSTEMS

    @property
    def is_counted(self) -> bool:
        """Whether the kernel counts what this process fetches from it."""
        return UNCOUNTED_FILESYSTEMS.fullmatch(self.filesystem or "") is None

    def shares_with(self, other: "Drive") -> bool:
        """Whether reads from both take turns: another folder or partition of the same drive."""
        return (self.name or self.device) == (other.name or other.device)

    @property
    def identity(self) -> str:
        """The key of what was measured: model, serial and size, or the next best there is."""
        if self.name is None:
            return f"{self.filesystem} {self.source}"
        own = [self.model, self.serial, None if self.size_bytes is None else str(self.size_bytes)]
        if self.serial is None:  # model and size alone would be the twin's, too
            own += [self.name, self.device]
        return " ".join([*(part for part in own if part), *self.parts, str(self.filesystem)])

    @property
    def label(self) -> str:
        """The drive and its filesystem for people."""
        if self.name is None:
            return f"{self.filesystem or 'unknown filesystem'} from {self.source or 'unknown'}"
        kind = {True: "rotational", False: "solid state", None: "kind not known"}
        below = f" on {', '.join(self.parts)}" if self.parts else ""
        model = f" {self.model}" if self.model else ""
        size = f", {self.size_bytes / 1e9:.0f} GB" if self.size_bytes else ""
        return (
            f"{self.name}{below}{model} ({kind[self.is_rotational]} by its own word{size}), "
            f"{self.filesystem or 'filesystem not known'} at {self.mount_point or 'not known'}"
        )


def find_drive(path: Path, root: Path = ROOT, device: tuple[int, int] | None = None) -> Drive:
    """Describe the drive that holds a path.

    Args:
        path: a file or directory that exists.
        root: where `proc` and `sys` are found.
        device: major and minor number instead of those of the path; for tests.

    Raises:
        OSError: the path cannot be looked at.
    """
    path = path.resolve()
    if device is None:
        number = path.stat().st_dev
        device = os.major(number), os.minor(number)
    mount = _find_mount(path, device, root)
    block = _block_folder(device, mount, root)
    temperature, limit = (None, None) if block is None else _temperature(block)
    rotational = None if block is None else read_number(block / "queue/rotational")
    ahead = None if block is None else read_number(block / "queue/read_ahead_kb")
    sectors = None if block is None else read_number(block / "size")
    return Drive(
        device=f"{device[0]}:{device[1]}",
        name=None if block is None else block.name,
        model=_first(block, "device/model", "dm/name", "md/level"),
        serial=_first(block, "serial", "device/serial", "wwid", "device/wwid", "dm/uuid"),
        size_bytes=None if sectors is None else sectors * SECTOR_BYTES,
        is_rotational=None if rotational is None else rotational != 0,
        scheduler=_chosen(_first(block, "queue/scheduler")),
        read_ahead_bytes=None if ahead is None else ahead * 1024,
        filesystem=mount.filesystem if mount else None,
        source=mount.source if mount else None,
        mount_point=mount.point if mount else None,
        is_read_only=mount is not None and "ro" in mount.options,
        parts=() if block is None else _parts(block),
        temperature_c=temperature,
        limit_c=limit,
    )


@dataclass(frozen=True)
class _Mount:
    device: str
    point: str
    options: tuple[str, ...]
    filesystem: str
    source: str


def _find_mount(path: Path, device: tuple[int, int], root: Path) -> _Mount | None:
    """The deepest mount above the path, of its device if there is one.

    Some filesystems (btrfs) give their files another device number than their mount.
    """
    above = [m for m in _mounts(root) if path.is_relative_to(m.point)]
    same = [m for m in above if m.device == f"{device[0]}:{device[1]}"]
    return max(same or above, key=lambda m: len(m.point), default=None)


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        front, back = before.split(), after.split()
        if len(front) >= 6 and len(back) >= 2:
            point = _unescaped(front[4])
            options = tuple(front[5].split(","))
            mounts.append(_Mount(front[2], point, options, back[0], _unescaped(back[1])))
    return mounts


def _unescaped(text: str) -> str:
    """Undo the octal escapes that the kernel writes for spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _block_folder(device: tuple[int, int], mount: _Mount | None, root: Path) -> Path | None:
    """The whole drive's folder in sysfs, from a partition's, too."""
    folder = root / f"sys/dev/block/{device[0]}:{device[1]}"
    if not folder.exists() and mount is not None and mount.source.startswith("/dev/"):
        folder = root / "sys/class/block" / Path(mount.source).resolve().name
    if not folder.exists():
        return None
    folder = folder.resolve()
    return folder.parent if (folder / "partition").exists() else folder


def _parts(block: Path) -> tuple[str, ...]:
    """The whole drives below a stacked device."""
    try:
        return tuple(sorted(part.name for part in (block / "slaves").iterdir()))
    except OSError:
        return ()


def _temperature(block: Path) -> tuple[float | None, float | None]:
    """Degrees Celsius now and at the limit, from the drive's hardware monitor."""
    for pattern in ("device/hwmon*/temp1_input", "device/hwmon/hwmon*/temp1_input"):
        for path in sorted(block.glob(pattern)):
            now = read_number(path)
            limit = read_number(path.with_name("temp1_max"))
            if limit is None:
                limit = read_number(path.with_name("temp1_crit"))
            if now is not None:
                return now / 1000, None if limit is None else limit / 1000
    return None, None


def _first(block: Path | None, *names: str) -> str | None:
    texts = (read_text(block / name) for name in names) if block is not None else ()
    return next((text for text in texts if text), None)


def _chosen(text: str | None) -> str | None:
    """The word in brackets of a list of choices."""
    match = re.search(r"\[(\S+)\]", text or "")
    return match[1] if match else text
