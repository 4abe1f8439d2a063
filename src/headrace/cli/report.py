"""What the commands write for people, to stderr or as a report to stdout."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.metrics import Receipt, format_bytes

if TYPE_CHECKING:
    from headrace.llm import LLM, Completion
    from headrace.plan import MemoryPlan

UNBOUNDED_WIDTH = 10_000


def stderr() -> Console:
    """A console on stderr; NO_COLOR is honoured by rich."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def stdout() -> Console:
    """A console on stdout. Lines stay whole; where no terminal sets a width, so do tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNBOUNDED_WIDTH
    return console


def say(text: str, style: str = "dim", end: str = "\n") -> None:
    """Write a remark to stderr."""
    stderr().print(Text(text, style=style), end=end)


def say_receipt(receipt: Receipt) -> None:
    """Write a receipt to stderr."""
    for line in receipt.lines():
        say(line)


def say_cut(answer: "Completion", max_tokens: int) -> None:
    """Say which limit cut an answer, if one did."""
    if answer.finish_reason != "length":
        return
    num_tokens = answer.receipt.completion_tokens
    what = "--max-tokens" if num_tokens >= max_tokens else "the context is full: --context"
    say(f"the answer was cut after {num_tokens} tokens: {what}")


@contextlib.contextmanager
def byte_progress(is_shown: bool, unit: str = "bytes") -> Iterator[Callable[[str, int, int], None]]:
    """A bar for long work on files; gives a function of file, bytes done and bytes in all.

    With another unit, what is counted is that.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *(
            (DownloadColumn(binary_units=True), TransferSpeedColumn())
            if unit == "bytes"
            else (MofNCompleteColumn(), TextColumn(unit))
        ),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr(), disable=not is_shown) as bar:
        task = bar.add_task("", total=None)

        def show(file: str, done: int, total: int) -> None:
            bar.update(task, description=file, completed=done, total=total)

        yield show


def describe(llm: "LLM", name: str) -> str:
    """One line on what runs and how: model, experts, slots, reads."""
    spec, plan = llm.spec, llm.plan
    parts = [name, f"{spec.model_type}, {spec.num_hidden_layers} layers"]
    if llm.store is not None and llm.checkpoint.records is not None:
        parts += [
            f"{spec.num_experts} experts, {spec.num_experts_per_tok} per token, "
            f"{', '.join(llm.checkpoint.records.formats)}",
            f"slots for {plan.num_slots} of {plan.num_records}, "
            + (
                "resident"
                if plan.is_resident
                else f"{llm.store.stats().read_mode} reads by {plan.readers} "
                f"({plan.readers_from}), policy {llm.store.policy}"
            ),
        ]
    parts.append(f"memory {format_bytes(plan.ceiling_bytes)}")
    if llm.config.lossy_modes:
        modes = (f"{n.replace('_', '-')} {v:g}" for n, v in llm.config.lossy_modes.items())
        parts.append(f"LOSSY: {', '.join(modes)}")
    if llm.tuned:
        from headrace.tuned import describe_settings

        parts.append(f"tuned: {describe_settings(llm.tuned)}")
    return " · ".join(parts)


def print_plan(plan: "MemoryPlan", name: str, drive_bytes_per_s: float | None) -> None:
    """Write a memory plan to stdout."""
    console = stdout()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for part, count in plan.parts():
        if count:
            table.add_row(part, format_bytes(count), f"{100 * count / plan.ceiling_bytes:.1f} %")
    table.add_row("ceiling", format_bytes(plan.ceiling_bytes), plan.ceiling_from, style="bold")
    console.print(Text(f"memory of {name}", style="bold"))
    console.print(table)
    for line in _plan_lines(plan, drive_bytes_per_s):
        console.print(Text(line))
    for note in plan.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _plan_lines(plan: "MemoryPlan", drive_bytes_per_s: float | None) -> list[str]:
    from headrace.plan import mib_up

    lines = [f"floor {mib_up(plan.floor_bytes)}, context {plan.context} tokens"]
    if not plan.num_records:
        return lines
    share = 100 * plan.num_slots / plan.num_records
    lines += [
        f"slots hold {plan.num_slots} of {plan.num_records} records ({share:.1f} %), "
        f"{format_bytes(plan.record_bytes)} each{_stored(plan)}",
        f"working set of a token: {plan.working_set_records} records, "
        f"{format_bytes(plan.working_set_bytes)}",
        f"read per token, cold: {format_bytes(plan.cold_bytes_per_token)}",
    ]
    rate = plan.expected_hit_rate
    lines.append(
        "expected hit rate: "
        + ("not known, no history" if rate is None else f"{100 * rate:.1f} % {_source(plan)}")
        if not plan.is_resident
        else "expected hit rate: 100 % once read"
    )
    lines.append(_reading_line(plan))
    lines += _repack_lines(plan)
    lines.append(_speed_line(plan, drive_bytes_per_s))
    return lines


def _stored(plan: "MemoryPlan") -> str:
    """What a record takes in the files, where it takes more in memory."""
    stored = plan.cold_bytes_per_token // max(plan.working_set_records, 1)
    return f" ({format_bytes(stored)} in the files)" if stored < 0.98 * plan.record_bytes else ""


def _source(plan: "MemoryPlan") -> str:
    if plan.forecast is None:
        return "from the history"
    return f"by a replay of the last {plan.forecast.tokens} tokens ({plan.forecast.policy})"


def _reading_line(plan: "MemoryPlan") -> str:
    speed = plan.drive_bytes_per_s
    measured = "" if speed is None else f", which gave {speed / 1e9:.2f} GB/s"
    if plan.drive_rates:
        each = ", ".join(f"{rate / 1e9:.2f}" for rate in plan.drive_rates)
        measured += f" from {len(plan.drive_rates)} drives of {each}"
    return (
        f"readers: {plan.readers}, largest read {format_bytes(plan.block_bytes)} "
        f"({plan.readers_from}{measured})"
    )


def _repack_lines(plan: "MemoryPlan") -> list[str]:
    rate, seconds = plan.repack_bytes_per_s, plan.repack_seconds_per_token
    if rate is None or seconds is None:
        return []
    cores = ""
    if plan.drive_bytes_per_s is not None:
        cores = f"; {plan.drive_bytes_per_s / rate:.2f} cores keep up with the drive"
    return [
        f"packing what is read: {rate / 1e9:.2f} GB/s per core here, {1e3 * seconds:.0f} ms of a "
        f"core per token, cold{cores}"
    ]


def _speed_line(plan: "MemoryPlan", drive_bytes_per_s: float | None) -> str:
    if plan.is_resident:
        return "predicted speed: not bound by the drive"
    speed = plan.predicted_tokens_per_s(drive_bytes_per_s)
    if plan.forecast is not None and speed is not None:
        drive = drive_bytes_per_s or (plan.drive_bytes_per_s if plan.drive_rates else None)
        on = "as recorded" if drive is None else f"at {drive / 1e9:.2f} GB/s"
        return (
            f"predicted speed: {speed:.2f} tok/s {on}, reading "
            f"{format_bytes(plan.forecast.bytes_per_token)} per token and computing meanwhile"
        )
    drive_bytes_per_s = drive_bytes_per_s or plan.drive_bytes_per_s
    if drive_bytes_per_s is None:
        return (
            "predicted speed: drive not measured (a run or `headrace bench disk FOLDER` does, "
            "or `plan --drive-bytes-per-s` tells it)"
        )
    if speed is None:
        return "predicted speed: not bound by the drive, as the experts used so far have slots"
    hit_rate = plan.expected_hit_rate or 0.0
    return (
        f"predicted speed: the drive alone allows {speed:.2f} tok/s = "
        f"{drive_bytes_per_s / 1e9:.2f} GB/s / "
        f"({1 - hit_rate:.3f} missed x {format_bytes(plan.cold_bytes_per_token)})"
    )
