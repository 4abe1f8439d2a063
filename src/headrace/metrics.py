"""What is measured: the receipt of an answer, and memory as the system reports it.

Owns no counters: the parts count, this module only names and freezes what they counted.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True)
class Receipt:
    """What one answer cost. Seconds, bytes and counts; expert counters are those of its steps.

    A step computes all running sequences together and reads each expert once for all of them: its
    counters go whole to each of these sequences, and `shared_steps` says how many steps were so.
    The first token comes from the prefill, so `decode_tokens` is `completion_tokens` - 1.
    """

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in pages of earlier requests
    completion_tokens: int
    prefill_s: float
    prefill_tokens_per_s: float
    decode_tokens: int
    decode_s: float
    decode_tokens_per_s: float
    expert_requests: int
    expert_hits: int
    expert_misses: int
    expert_hit_rate: float
    bytes_read: int
    prefill_bytes_read: int
    decode_bytes_read: int
    bytes_read_per_token: float  # decode_bytes_read per decoded token
    drive_busy_s: float  # time with at least one read in flight
    drive_bytes_per_s: float  # bytes_read / drive_busy_s, of all drives / of the busiest
    drives: tuple[dict[str, Any], ...]  # of several: path, bytes_read, share, failed copies
    prefetch_bytes: int  # read on advice: warming from the history, lookahead
    stall_s: float  # time computing waited for bytes
    lookahead_precision: float  # share of the experts it named that the layer then asked for
    lookahead_recall: float  # share of the experts asked for that it had named
    lookahead_wasted_bytes: int  # part of prefetch_bytes: given up without use
    lookahead_saved_s: float  # time in which nobody waited and the drive read what was then used
    steps: int
    shared_steps: int
    peak_memory_bytes: int  # of the whole process, as the system reports it
    huge_pages_bytes: int  # of what the process holds: weights want to lie in such pages
    locked_bytes: int  # reserved so that it is never swapped out
    memory_ceiling_bytes: int
    read_mode: str  # direct | buffered | resident
    readers: int  # threads that read
    block_bytes: int  # largest single read
    readers_from: (
        str  # option | tuned | measured (at this start) | remembered (of the drive) | default
    )
    num_slots: int
    record_bytes: int
    seed: int
    isa: str
    threads: int
    lossy: dict[str, Any] | None = None  # null: nothing lossy was on
    slots_given_back: int = 0  # since the start: memory was short, or more of them was slower
    slots_taken_again: int = 0
    give_backs: int = 0  # times

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt as plain values for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Write the receipt for people, in three calm lines."""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        speed = (
            f"decode {self.decode_tokens} tok {self.decode_s:.2f} s, "
            f"{self.decode_tokens_per_s:.1f} tok/s"
        )
        lines = [
            f"prefill {self.prompt_tokens} tok{cached} {self.prefill_s:.2f} s, "
            f"{self.prefill_tokens_per_s:.1f} tok/s · {speed}"
        ]
        if self.expert_requests:
            lines.append(
                f"experts {self.expert_requests} asked, {100 * self.expert_hit_rate:.1f} % hit · "
                f"read {format_bytes(self.bytes_read)} ({self.read_mode}), "
                f"{format_bytes(self.bytes_read_per_token)}/token{self._ahead()}, "
                f"{self.drive_bytes_per_s / 1e9:.2f} GB/s by {self.readers} readers "
                f"({self.readers_from}) · stall {self.stall_s:.2f} s"
            )
        if self.drives:
            lines.append("drives " + " · ".join(map(_drive_text, self.drives)))
        lines.append(
            f"memory peak {format_bytes(self.peak_memory_bytes)} "
            f"of {format_bytes(self.memory_ceiling_bytes)} granted"
            + (
                f" · {self.slots_given_back} slots given back, {self.slots_taken_again} taken again"
                if self.slots_given_back
                else ""
            )
            + (f" · lossy: {_lossy_text(self.lossy)}" if self.lossy else "")
        )
        return lines

    def _ahead(self) -> str:
        if not self.prefetch_bytes:
            return ""
        wasted = f", {format_bytes(self.lookahead_wasted_bytes)} of it in vain"
        return f" + {format_bytes(self.prefetch_bytes)} ahead" + (
            wasted if self.lookahead_wasted_bytes else ""
        )


_LOSSY_COST = ("checked_tokens", "mean_kl", "flip_rate", "ended")


def _lossy_text(lossy: Mapping[str, Any]) -> str:
    modes = (f"{n.replace('_', '-')} {v}" for n, v in lossy.items() if n not in _LOSSY_COST)
    text = ", ".join(modes)
    if lossy.get("checked_tokens"):
        text += (
            f", mean KL {lossy['mean_kl']:.3g} nats and {100 * lossy['flip_rate']:.1f} % flips "
            f"in {lossy['checked_tokens']} checked tokens"
        )
    elif "checked_tokens" in lossy:
        text += ", no token checked"
    return text + (", ended" if lossy.get("ended") else "")


def _drive_text(drive: dict[str, Any]) -> str:
    text = f"{drive['path']} {format_bytes(drive['bytes_read'])} ({100 * drive['share']:.0f} %)"
    if drive["failed_copies"]:
        word = "copy" if drive["failed_copies"] == 1 else "copies"
        text += f", {drive['failed_copies']} {word} failed"
    return text + (", given up" if drive["is_given_up"] else "")


def format_bytes(count: float) -> str:
    """Write a byte count for people, three digits: `2.5 GiB`, `512 MiB`, `96 KiB`."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, bigger
    return f"{value:.3g} {unit}"


def peak_memory_bytes() -> int:
    """Return the most resident memory this process ever had: VmHWM, elsewhere ru_maxrss."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return 0
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int | None:
    """Return the memory this process holds now (VmRSS), or None where the system does not say."""
    return _status_bytes("VmRSS")


def locked_bytes() -> int:
    """Return how much this process has locked in memory (VmLck); 0 where nothing says so."""
    return _status_bytes("VmLck") or 0


def huge_pages_bytes() -> int:
    """Return how much of this process's memory lies in huge pages; 0 where nothing says so."""
    return _status_bytes("AnonHugePages", "smaps_rollup") or 0


def _status_bytes(key: str, file: str = "status") -> int | None:
    for line in (_read_text(Path("/proc/self") / file) or "").splitlines():
        if line.startswith(key + ":"):
            kib = _number(line.removeprefix(key + ":").removesuffix("kB"))
            return None if kib is None else kib * 1024
    return None


@dataclass(frozen=True)
class MemoryLimit:
    """A cgroup's limit on memory; page cache that the kernel would drop first is not used."""

    group: str  # its folder
    limit_bytes: int
    used_bytes: int


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process may still take: the least of MemAvailable and each cgroup's rest.

    Every cgroup from this process's own up to the root counts, v1 and v2.

    Args:
        root: where `proc` and `sys` are found; tests pass a directory of fake files.

    Returns:
        Bytes, or None where neither source exists.
    """
    rests = [limit.limit_bytes - limit.used_bytes for limit in memory_limits(root)]
    meminfo = _read_text(root / "proc/meminfo")
    for line in (meminfo or "").splitlines():
        kib = _number(line.removeprefix("MemAvailable:").removesuffix("kB"))
        if line.startswith("MemAvailable:") and kib is not None:
            rests.append(kib * 1024)
    return max(0, min(rests)) if rests else None


def memory_groups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's own cgroups (v2) that exist."""
    found = []
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            parts = [part for part in line[3:].split("/") if part and part != ".."]
            mounts = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
            found += [mount.joinpath(*parts) for mount in mounts]
    return [group for group in found if _is_folder(group)]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limit of each cgroup that has one, from this process's own up to the root."""
    text = _read_text(root / "proc/self/cgroup")
    limits = []
    names: tuple[tuple[str, ...], str, str]
    for line in (text or "").splitlines():
        if line.count(":") < 2:
            continue  # not what the kernel writes: nothing is known of this group
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            names = (("memory.max", "memory.high"), "memory.current", "inactive_file")
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            names = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            limits += _walk_up(mount, path, names)
    return limits


def _walk_up(mount: Path, path: str, names: tuple[tuple[str, ...], str, str]) -> list[MemoryLimit]:
    """Collect the limit of each group from `path` up to the mount.

    Above `memory.high` a group is slowed down rather than stopped; that is no place to be either.

    Inside a container the path may be the host's and not exist here: what exists still counts.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    found = []
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limits = [_number(_read_text(group / name)) for name in names[0]]  # `max` is no number
        numbers = [limit for limit in limits if limit is not None]
        usage = _number(_read_text(group / names[1]))
        if usage is None or min(numbers, default=_UNLIMITED) >= _UNLIMITED:
            continue
        droppable = 0
        for line in (_read_text(group / "memory.stat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == names[2]:
                droppable = _number(value) or 0
        found.append(MemoryLimit(str(group), min(numbers), max(0, usage - droppable)))
    return found


def processor_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time the tightest cgroup of this process grants; None: no limit.

    Every cgroup from this process's own up to the root counts, v1 and v2. Which processors it may
    run on is another matter, which the native threads know.
    """
    quotas = []
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        if line.count(":") < 2:
            continue
        hierarchy, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if hierarchy == "0" and not controllers:
            mounts = [base, base / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [base / "cpu", base / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            quotas += [_quota(mount.joinpath(*parts[:depth])) for mount in mounts]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Processors of one group: time granted in each period over its length; `max` is no number."""
    granted, _, period = (_read_text(group / "cpu.max") or "").strip().partition(" ")
    if not granted:
        granted = _read_text(group / "cpu.cfs_quota_us") or ""
        period = _read_text(group / "cpu.cfs_period_us") or ""
    time, length = _number(granted), _number(period)
    return time / length if time and length else None


def _number(text: str | None) -> int | None:
    """The count a file holds; None if it is missing or holds anything else."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # or a NUL in the path it was told
        return None
