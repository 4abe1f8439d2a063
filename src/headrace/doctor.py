"""What stands between this machine and a model that runs well: findings, each with what to do.

Reads what the system says, the headers of a model, and, when asked, every byte of it. What a system
does not say is "not known", which is no fault. Changes nothing but the memory of a drive's speed.
Prints nothing.
"""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from headrace import ops
from headrace.config import EngineConfig
from headrace.drive import Drive, find_drive
from headrace.errors import EngineError
from headrace.experts.reading import Reading, resolve_reading
from headrace.inspect import VerifyReport, describe, open_model, verify, verify_headers
from headrace.llm import plan_model, resolve_model
from headrace.machine import (
    ROOT,
    describe_machine,
    huge_pages,
    memory_info,
    pressure,
    read_text,
)
from headrace.metrics import available_memory_bytes, format_bytes, memory_limits
from headrace.plan import MemoryPlan

OK, WARNING, PROBLEM = "ok", "warning", "problem"
Progress = Callable[[str, int, int], None]

PROBE_BYTES = 512 << 20
"""Memory that measuring a drive may take."""
LEAST_AVAILABLE_BYTES = 1 << 30
SWAPPED_SHARE = 0.05
MEMORY_PRESSURE, IO_PRESSURE, CPU_PRESSURE = 0.01, 0.2, 0.3
"""Shares of the last minute. Waiting for memory is a fault at once; for a drive or a processor it
only says that somebody else uses them."""
LEAST_FREE_BYTES = 1 << 30
COOL_C = 5.0
"""A drive this close to its limit is about to slow down."""
SLOW_BYTES_PER_S = 0.5e9


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    subject: str
    level: str  # ok | warning | problem
    text: str
    advice: str | None = None  # what to do, if anything


def examine(
    model: str | None = None,
    *,
    is_deep: bool = False,
    root: Path = ROOT,
    progress: Progress = lambda *_: None,
) -> list[Finding]:
    """Look at the machine, and at a model if one is named.

    Args:
        model: a path or a name.
        is_deep: read every byte of the model and compare checksums.
        root: where `proc` and `sys` are found; tests pass fake files.
        progress: told of a deep reading: file, bytes done, bytes in all.
    """
    findings = [*_processor(root), *_memory(root), *_swap(root), *_pressure(root), *_cache_folder()]
    if model is None:
        return [*findings, *_drive(Path.cwd(), None, root)]
    try:
        path = resolve_model(model)
    except EngineError as error:
        return [*findings, _failed("model", error)]
    return [*findings, *_model(model, path, is_deep, root, progress)]


def _failed(subject: str, error: Exception) -> Finding:
    """A finding of an error's message; its hint is the advice."""
    text, _, hint = str(error).partition("\nhint: ")
    return Finding(subject, PROBLEM, text or type(error).__name__, hint or None)


def _processor(root: Path) -> Iterator[Finding]:
    used, offered = ops.isa(), ops.available_isas()
    text = f"{describe_machine(root)}; kernels: {used} (of {', '.join(offered)})"
    if used == "scalar":
        yield Finding(
            "processor", WARNING, text,
            "there are no vector kernels for this processor: expect a tenth of the speed",
        )  # fmt: skip
    else:
        yield Finding("processor", OK, text)
    flags = (read_text(root / "proc/cpuinfo") or "").split()
    if "amx_int8" in flags and "amx" not in offered:
        yield Finding(
            "processor", WARNING, "the processor has AMX, but the kernel gives no tiles",
            "run outside of the sandbox, or with a kernel of 5.16 and later: prompts gain most",
        )  # fmt: skip


def _memory(root: Path) -> Iterator[Finding]:
    total, available = memory_info(root).get("MemTotal"), available_memory_bytes(root)
    if available is None:
        yield Finding(
            "memory", WARNING, "what is available is not known", "give `--memory` to every run"
        )
    else:
        of = "" if total is None else f" of {format_bytes(total)}"
        is_little = available < LEAST_AVAILABLE_BYTES
        yield Finding(
            "memory", WARNING if is_little else OK, f"{format_bytes(available)} available{of}",
            "end what else holds memory" if is_little else None,
        )  # fmt: skip
    limits = memory_limits(root)
    for limit in limits:
        left = limit.limit_bytes - limit.used_bytes
        is_little = left < LEAST_AVAILABLE_BYTES
        yield Finding(
            "cgroup", WARNING if is_little else OK,
            f"limit {format_bytes(limit.limit_bytes)}, {format_bytes(max(0, left))} left "
            f"({limit.group})",
            "grant the container or the service more memory" if is_little else None,
        )  # fmt: skip
    if not limits:
        yield Finding("cgroup", OK, "no memory limit is known")
    pages = huge_pages(root)
    if pages == "never":
        yield Finding(
            "huge pages", WARNING, "never",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip
    else:
        yield Finding("huge pages", OK, pages or "not known")
    yield _memory_nodes(root)


def _memory_nodes(root: Path) -> Finding:
    """Large buffers are spread over the memory of all sockets, where the system allows it."""
    nodes = ops.memory_nodes(str(root / "sys"))
    if len(nodes) < 2:
        return Finding("memory nodes", OK, "1" if nodes else "not known")
    if ops.can_interleave(nodes):
        return Finding("memory nodes", OK, f"{len(nodes)}, weights and slots are spread over them")
    return Finding(
        "memory nodes", WARNING, f"{len(nodes)}, and weights and slots cannot be spread over them",
        "let the container call mbind (CAP_SYS_NICE): else most is read from one socket's memory",
    )  # fmt: skip


def _swap(root: Path) -> Iterator[Finding]:
    info = memory_info(root)
    total, free, memory = info.get("SwapTotal"), info.get("SwapFree"), info.get("MemTotal")
    if total is None or free is None or memory is None:
        yield Finding("swap", OK, "not known")
    elif total - free > SWAPPED_SHARE * memory:
        yield Finding(
            "swap", WARNING, f"{format_bytes(total - free)} of {format_bytes(total)} used",
            "grant less `--memory`: a slot that is swapped out is slower than none",
        )  # fmt: skip
    elif total == 0:
        yield Finding("swap", OK, "none")
    else:
        yield Finding("swap", OK, f"{format_bytes(total)}, {format_bytes(total - free)} used")


def _pressure(root: Path) -> Iterator[Finding]:
    advice = {
        "memory": "grant less `--memory`, or end what else holds memory",
        "io": "another process uses a drive: its reads take the place of yours",
        "cpu": "another process uses the processors: give `--threads` fewer of them",
    }
    most = {"memory": MEMORY_PRESSURE, "io": IO_PRESSURE, "cpu": CPU_PRESSURE}
    for resource, limit in most.items():
        seen = pressure(resource, root)
        if seen is None:
            yield Finding(f"{resource} pressure", OK, "not known")
            continue
        is_high = seen.some > limit
        yield Finding(
            f"{resource} pressure", WARNING if is_high else OK,
            f"tasks waited {seen.some:.1%} of the last minute",
            advice[resource] if is_high else None,
        )  # fmt: skip


def _cache_folder() -> Iterator[Finding]:
    folder = Path(platformdirs.user_cache_dir("headrace"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            "cache directory", WARNING, f"{folder} cannot be written: {error.strerror}",
            "set XDG_CACHE_HOME to a directory that can be: histories and measurements live there",
        )  # fmt: skip
    else:
        yield Finding("cache directory", OK, str(folder))


def _drive(path: Path, reading: Reading | None, root: Path) -> Iterator[Finding]:
    try:
        drive = find_drive(path, root)
    except OSError as error:
        yield Finding("drive", PROBLEM, f"{path}: {error.strerror}", "check the path")
        return
    yield _place(drive)
    yield from _space(path, drive)
    yield from _temperature(drive)
    yield _speed(reading)


def _place(drive: Drive) -> Finding:
    if drive.is_memory:
        return Finding(
            "drive", WARNING, drive.label,
            "this is memory, not a drive: a model here takes its size from what experts could have",
        )  # fmt: skip
    if not drive.is_counted:
        return Finding(
            "drive", WARNING, drive.label,
            "a drive of this machine's own is usually faster: copy the model there",
        )  # fmt: skip
    return Finding("drive", OK, drive.label)


def _space(path: Path, drive: Drive) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        yield Finding("free space", OK, "not known")
        return
    is_little = free < LEAST_FREE_BYTES and not drive.is_read_only
    yield Finding(
        "free space", WARNING if is_little else OK,
        format_bytes(free) + (", mounted read-only" if drive.is_read_only else ""),
        "make room: histories and conversions are written here" if is_little else None,
    )  # fmt: skip


def _temperature(drive: Drive) -> Iterator[Finding]:
    now, limit = drive.temperature_c, drive.limit_c
    if now is None:
        yield Finding("drive temperature", OK, "not known")
        return
    text = f"{now:.0f} °C" + ("" if limit is None else f", limit {limit:.0f} °C")
    if limit is not None and now >= limit - COOL_C:
        yield Finding(
            "drive temperature", PROBLEM if now >= limit else WARNING, text,
            "cool the drive: it reads slower when it is hot, and streaming keeps it busy",
        )  # fmt: skip
    else:
        yield Finding("drive temperature", OK, text)


def _speed(reading: Reading | None) -> Finding:
    entry = None if reading is None else reading.entry
    if reading is None or entry is None:
        return Finding("drive speed", OK, "not measured", "`headrace bench disk PATH` measures it")
    mode = "direct" if entry.direct else "buffered"
    text = (
        f"{entry.bytes_per_s / 1e9:.2f} GB/s ({entry.slowest_bytes_per_s / 1e9:.2f} to "
        f"{entry.fastest_bytes_per_s / 1e9:.2f}) in records of {format_bytes(entry.record_bytes)}: "
        f"{entry.readers} readers, {format_bytes(entry.block_bytes)} reads, {mode} "
        f"({reading.source})"
    )
    if not entry.direct:
        return Finding(
            "drive speed", WARNING, text,
            "direct reads are refused here or slower: another filesystem (ext4, xfs) has them",
        )  # fmt: skip
    if entry.bytes_per_s < SLOW_BYTES_PER_S:
        return Finding(
            "drive speed", WARNING, text,
            "an NVMe drive reads several times as fast, and tokens per second follow it",
        )  # fmt: skip
    return Finding("drive speed", OK, text)


def _model(
    name: str, path: Path, is_deep: bool, root: Path, progress: Progress
) -> Iterator[Finding]:
    try:
        summary = describe(path)
        records = open_model(path)[1].records
        report = verify(path, progress) if is_deep else verify_headers(path)
    except (EngineError, OSError) as error:
        yield _failed("model", error)
        yield from _drive(path, None, root)
        return
    yield Finding(
        "model", OK,
        f"{name}: {summary['model_type']}, {summary['num_hidden_layers']} layers, "
        f"{format_bytes(summary['file_bytes'])} in {len(summary['files'])} files",
    )  # fmt: skip
    yield from _health(name, report, is_deep)
    reading = resolve_reading(EngineConfig().experts, records, probe_bytes=PROBE_BYTES)
    yield from _drive(path if records is None else records.files[0], reading, root)
    yield _fit(name)


def _health(name: str, report: VerifyReport, is_deep: bool) -> Iterator[Finding]:
    how = "every byte" if is_deep else "headers"
    for damage in report.damaged:
        yield Finding(
            "model health", PROBLEM, damage.message,
            "get the file again, or convert the source again; the rest can stay",
        )  # fmt: skip
    if report.unrecorded:
        yield Finding(
            "model health", WARNING,
            f"not recorded in the manifest, so not compared: {', '.join(report.unrecorded)}",
            "remove what is not the model's, or convert the source again",
        )  # fmt: skip
    if report.is_sound:
        read = f": {report.num_checked} ranges, {format_bytes(report.checked_bytes)}"
        read = read if report.num_checked else ""  # what GGUF states has no checksum of its own
        unsure = " (no checksums here: looked for NaN and infinity)"
        yield Finding(
            "model health", OK,
            f"{how} sound" + read + (unsure if is_deep and not report.has_checksums else ""),
            None if is_deep else f"`headrace doctor {shlex.quote(name)} --deep` reads all of it",
        )  # fmt: skip


def _fit(name: str) -> Finding:
    try:
        plan = plan_model(name, EngineConfig())
    except EngineError as error:
        return _failed("fit", error)
    text = (
        f"`--memory auto` grants {format_bytes(plan.ceiling_bytes)}, "
        f"slots for {plan.num_slots} of {plan.num_records} records{_prediction(plan)}"
    )
    if plan.num_records and plan.num_slots < plan.working_set_records:
        return Finding(
            "fit", WARNING, text,
            "slots hold less than a token needs: free memory, or convert to fewer bits",
        )  # fmt: skip
    return Finding("fit", OK, text if plan.num_records else "a dense model, resident")


def _prediction(plan: MemoryPlan) -> str:
    if plan.is_resident or plan.drive_bytes_per_s is None:
        return ""
    speed = plan.tokens_per_s(plan.drive_bytes_per_s, plan.expected_hit_rate or 0.0)
    return "" if speed is None else f", at most {speed:.1f} tok/s by the drive"
