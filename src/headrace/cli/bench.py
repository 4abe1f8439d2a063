"""`headrace bench`: what this machine gives. `disk` reads a drive as the expert store does."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.help import Command, CommandGroup
from headrace.cli.options import Json, parsed_bytes, usage
from headrace.errors import ConfigError
from headrace.metrics import format_bytes

if TYPE_CHECKING:
    from headrace.disk_bench import DiskReport, Target
    from headrace.experts.probe import Rate

app = typer.Typer(
    cls=CommandGroup,
    help="Measure this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _bench() -> None:
    """Keep `disk` a word of its own while it is the only one."""


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if not all(1 <= count <= 256 for count in counts):
        raise typer.BadParameter(f"expected numbers from 1 to 256 such as 1,2,4, got `{text}`")
    return counts


def _sizes(text: str) -> list[int]:
    return [_aligned(part) for part in text.split(",")]


def _aligned(text: str) -> int:
    size = parsed_bytes(text)
    if size % 4096 or size > 1 << 30:
        raise typer.BadParameter(f"expected a multiple of 4096 bytes up to 1 GiB, got `{text}`")
    return size


@app.command(cls=Command)
def disk(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="a model or its id, a file, or a directory to write in"
        ),
    ],
    record: Annotated[
        Any,
        typer.Option(
            parser=_aligned,
            metavar="SIZE",
            help="bytes of one record",
            show_default="the model's, or 4MiB",
        ),
    ] = None,
    sizes: Annotated[
        Any,
        typer.Option(
            parser=_sizes,
            metavar="SIZES",
            help="largest single reads, such as 256KiB,1MiB",
            show_default="256KiB, 1MiB, a record",
        ),
    ] = None,
    readers: Annotated[
        Any,
        typer.Option(
            parser=_counts,
            metavar="COUNTS",
            help="threads that read, such as 1,2,4",
            show_default="1,2,4,8",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, max=100, help="measurements of each setting")] = 5,
    max_read: Annotated[
        Any,
        typer.Option(
            parser=parsed_bytes, metavar="SIZE", help="most bytes read", show_default="8GiB"
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure the drive of PATH: size of a read x readers x direct or buffered.

    Whole records are read at random offsets, each once. A directory that is no model gets a scratch
    file, which is removed. For a model or a file the best setting is remembered for the drive,
    unless --sizes or --readers leave some out.
    """
    from headrace import disk_bench
    from headrace.cli.report import byte_progress
    from headrace.experts.drive_cache import DriveCache, remembered

    limit = max_read or disk_bench.MAX_READ_BYTES
    with (
        byte_progress(sys.stderr.isatty()) as show,
        disk_bench.open_target(_target_path(path), record, limit, show, seed=0) as target,
    ):
        report = disk_bench.measure_curve(
            target,
            sizes=sizes or (),
            readers=readers or (),
            num_windows=windows,
            max_read_bytes=limit,
            progress=show,
        )
    cache = DriveCache()
    is_whole = sizes is None and readers is None  # else a better setting may not have been tried
    is_kept = report.chosen is not None and target.kind != "scratch" and report.is_verified
    is_kept = is_kept and is_whole
    if report.chosen is not None and is_kept:
        cache.remember(target.drive, remembered(report.chosen, target.drive))
    if as_json:
        print(json.dumps({**report.as_dict(), "is_remembered": is_kept}, ensure_ascii=False))
    else:
        _print(report, is_kept)
    if report.chosen is None:
        raise ConfigError(
            f"no figure for {path}: no read came from a drive\n"
            "hint: name a path on the drive that holds your models"
        )
    return 0


def _target_path(text: str) -> Path:
    """A model's name or a path."""
    from headrace.hub import is_hub_id
    from headrace.llm import DEMO, resolve_model

    path = Path(text).expanduser()
    is_name = text == DEMO or (is_hub_id(text) and not path.exists())
    with usage():
        return resolve_model(text) if is_name else path


def _print(report: "DiskReport", is_kept: bool) -> None:
    target = report.target
    print(f"machine: {report.machine}")
    print(f"drive: {target.drive.label}{_queue(target)}")
    print(
        f"read: {format_bytes(report.bytes_read)} of {_what(target)} in {report.seconds:.1f} s, "
        f"records of {format_bytes(target.places.record_bytes)} at random offsets, each once; "
        f"steal {report.steal:.1%}; one core copies memory at "
        f"{report.memory_bytes_per_s / 1e9:.1f} GB/s"
    )
    for direct in (True, False):
        rates = [rate for rate in report.rates if rate.setting.direct == direct]
        _print_table("direct" if direct else "buffered", rates, report.num_windows)
    if report.chosen is not None:
        setting = report.chosen.setting
        print(
            f"best: {setting.readers} readers, blocks of {format_bytes(setting.block_bytes)}, "
            f"{'direct' if setting.direct else 'buffered'}: "
            f"{report.chosen.bytes_per_s / 1e9:.2f} GB/s "
            "(the second depth within 10 % of the fastest)"
            + ("; remembered for this drive" if is_kept else "; not remembered")
        )
    for note in report.notes:
        print(f"note: {note}")


def _queue(target: "Target") -> str:
    drive = target.drive
    ahead = "" if drive.read_ahead_bytes is None else format_bytes(drive.read_ahead_bytes)
    known = [("scheduler", drive.scheduler), ("read-ahead", ahead)]
    return "".join(f", {name} {value}" for name, value in known if value)


def _what(target: "Target") -> str:
    if target.kind == "scratch":
        return "a scratch file"
    return "the file" if len(target.files) == 1 else f"{len(target.files)} files of the model"


def _print_table(mode: str, rates: "list[Rate]", num_windows: int) -> None:
    counts = sorted({rate.setting.readers for rate in rates})
    print(f"{mode}, GB/s: median (slowest-fastest) of {num_windows} windows")
    print(f"{'readers':>10}" + "".join(f"{count:>18}" for count in counts))
    for size in sorted({rate.setting.block_bytes for rate in rates}):
        row = {r.setting.readers: r for r in rates if r.setting.block_bytes == size}
        cells = "".join(f"{_cell(row[count]):>18}" for count in counts)
        print(f"{format_bytes(size):>10}{cells}")


def _cell(rate: "Rate") -> str:
    if rate.spread is None:
        return "refused" if rate.num_refused else "cached" if rate.num_cached else "-"
    low, high = rate.spread
    return f"{(rate.bytes_per_s or 0) / 1e9:.2f} ({low / 1e9:.2f}-{high / 1e9:.2f})"
