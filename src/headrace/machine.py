"""What the machine says of itself: processor, memory, swap, huge pages, pressure, stolen time.

Reads /proc and /sys and nothing else. Every fact may be missing and is then None: other kernels,
containers and other systems leave files out. Tests pass a directory of fake files as `root`.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path("/")


def read_text(path: Path) -> str | None:
    """Return what a file of the kernel holds, without the line's end; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def read_number(path: Path) -> int | None:
    """Return the whole number that a file holds; None for anything else."""
    text = read_text(path) or ""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(text) < 20 else None


def processor_name(root: Path = ROOT) -> str:
    """Return the processor's name, or its architecture where no name is given."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def describe_machine(root: Path = ROOT) -> str:
    """Return processor, processors, memory and kernel in one line."""
    total = memory_info(root).get("MemTotal")
    memory = "memory not known" if total is None else f"{total / (1 << 30):.1f} GiB memory"
    return (
        f"{processor_name(root)}, {os.cpu_count()} processors, {memory}, "
        f"{platform.system()} {platform.release()}"
    )


def memory_info(root: Path = ROOT) -> Mapping[str, int]:
    """Return the byte counts of /proc/meminfo by name; empty where there is none."""
    found = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdecimal() and unit == "kB":
            found[name] = int(number) * 1024
    return found


def huge_pages(root: Path = ROOT) -> str | None:
    """Return the chosen mode of transparent huge pages: always, madvise or never."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    start, end = text.find("["), text.find("]")
    return text[start + 1 : end] if 0 <= start < end else None


@dataclass(frozen=True)
class Pressure:
    """Shares of the last minute (0 to 1) in which tasks waited: some of them, or all at once."""

    some: float
    full: float


def pressure(resource: str, root: Path = ROOT) -> Pressure | None:
    """Read the kernel's pressure stall information of `cpu`, `memory` or `io`."""
    shares: dict[str, float] = {}
    for line in (read_text(root / "proc/pressure" / resource) or "").splitlines():
        kind, *values = line.split()
        for value in values:
            name, _, number = value.partition("=")
            if name == "avg60":
                try:
                    shares[kind] = float(number) / 100
                except ValueError:
                    return None
    return Pressure(shares["some"], shares.get("full", 0.0)) if "some" in shares else None


def stalled_us(path: Path) -> int | None:
    """Return the microseconds in which some task waited, from a pressure file of the kernel."""
    for line in (read_text(path) or "").splitlines():
        kind, *values = line.split()
        total = next((v.removeprefix("total=") for v in values if v.startswith("total=")), "")
        if kind == "some" and total.isascii() and total.isdecimal() and len(total) < 20:
            return int(total)
    return None


def major_faults(root: Path = ROOT) -> int | None:
    """Return the page faults of this process that had to read from a drive or from swap."""
    # After the command's name, which may hold anything: state is the first field, these the tenth.
    fields = (read_text(root / "proc/self/stat") or "").rpartition(")")[2].split()
    return int(fields[9]) if len(fields) > 9 and fields[9].isdecimal() else None


def drive_bytes_read(root: Path = ROOT) -> int | None:
    """Return the bytes that this process has caused to be fetched from block devices.

    Reads that the page cache answered are not among them, which is how they are told apart.
    """
    for line in (read_text(root / "proc/self/io") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes" and value.strip().isdecimal():
            return int(value)
    return None


VOID_SHARE = 0.05
"""What is timed while the host takes more of the processors says more of the host."""


class Steal:
    """Share of processor time the host took in the `with` block."""

    share = 0.0

    @property
    def is_void(self) -> bool:
        """Whether what was timed in the block says more of the host than of the run."""
        return self.share > VOID_SHARE

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def __enter__(self) -> Self:
        self._before = self._ticks()
        return self

    def __exit__(self, *_: object) -> None:
        stolen, total = (
            after - before for after, before in zip(self._ticks(), self._before, strict=True)
        )
        self.share = stolen / max(1, total)

    def _ticks(self) -> tuple[int, int]:
        """Stolen and total time since boot; zeros where the system does not say."""
        lines = (read_text(self._root / "proc/stat") or "").splitlines()
        fields = [int(x) for x in lines[0].split()[1:] if x.isdecimal()] if lines else []
        return (fields[7], sum(fields[:8])) if len(fields) > 7 else (0, 0)
