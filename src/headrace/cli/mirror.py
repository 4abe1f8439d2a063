"""`headrace mirror`: copies of a model's hottest records for a second drive."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.help import Command, CommandGroup
from headrace.cli.options import Json, parsed_bytes
from headrace.metrics import format_bytes

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.mirror import MirrorPlan

app = typer.Typer(
    cls=CommandGroup,
    help="Copy a model's hottest records to a second drive.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="a container")]
_Drive = Annotated[Path, typer.Option("--drive", help="the mirror's folder on the other drive")]
_Budget = Annotated[
    Any,
    typer.Option(
        parser=parsed_bytes, metavar="SIZE", help="most bytes of copies", show_default="no limit"
    ),
]
_Reserve = Annotated[
    Any, typer.Option(parser=parsed_bytes, metavar="SIZE", help="free space that stays free")
]
_Memory = Annotated[
    Any,
    typer.Option(
        parser=parsed_bytes,
        metavar="SIZE",
        help="ceiling of the runs to come: what it holds is not read",
        show_default="auto",
    ),
]
_Rates = Annotated[
    str | None,
    typer.Option(
        metavar="B1,B2",
        help="bandwidths of the model's drive and the mirror's, such as 1.2GB/s,3GB/s",
        show_default="as measured",
    ),
]


@app.command(cls=Command)
def plan(
    model: _Model,
    drive: _Drive,
    budget: _Budget = None,
    reserve: _Reserve = "1GiB",
    memory: _Memory = None,
    rates: _Rates = None,
    as_json: Json = False,
) -> None:
    """Say which records would be copied, and what that gains. Copies nothing."""
    made = _plan(model, drive, budget, reserve, memory, rates)
    if as_json:
        print(json.dumps(made.as_dict(), ensure_ascii=False))
    else:
        _print_plan(made)


@app.command(cls=Command)
def stage(
    model: _Model,
    drive: _Drive,
    budget: _Budget = None,
    reserve: _Reserve = "1GiB",
    memory: _Memory = None,
    rates: _Rates = None,
    as_json: Json = False,
) -> None:
    """Copy the records. A killed command goes on where it was; MODEL is only read."""
    from headrace.cli.report import byte_progress
    from headrace.mirror import stage as copy

    made = _plan(model, drive, budget, reserve, memory, rates)
    if not as_json:
        _print_plan(made)
    with byte_progress(sys.stderr.isatty()) as show:
        copied = copy(made, show)
    if as_json:
        print(json.dumps({**made.as_dict(), "copied_bytes": copied}, ensure_ascii=False))
        return
    if not made.num_chosen:
        print(f"no record has room in {made.folder}: nothing to use")
        print("hint: free some space, or allow more with --budget or a smaller --reserve")
        return
    kept = made.mirror_bytes - copied
    already = f", {format_bytes(kept)} were there already" if kept else ""
    print(f"{made.folder}: {format_bytes(copied)} copied{already}")
    folder = shlex.quote(str(made.folder))
    print(f"use it: headrace run {shlex.quote(model)} --drive {folder}")


@app.command(cls=Command)
def verify(model: _Model, drive: _Drive, as_json: Json = False) -> int:
    """Read every record of a mirror and compare it with MODEL's checksum."""
    from headrace.cli.report import byte_progress
    from headrace.mirror import verify_mirror

    with byte_progress(sys.stderr.isatty()) as show:
        check = verify_mirror(model, drive, show)
    if as_json:
        report = {
            "good": check.num_good,
            "missing": check.num_missing,
            "problems": list(check.problems),
        }
        print(json.dumps(report, ensure_ascii=False))
    else:
        for problem in check.problems:
            print(problem)
        damaged = f", {len(check.problems)} problems" if check.problems else ""
        print(f"{check.num_good} records good, {check.num_missing} missing{damaged}")
        if not check.is_good:
            remove = "remove the files named, and " if check.problems else ""
            print(f"hint: {remove}run `headrace mirror stage` again")
    return 0 if check.is_good else 1


def _plan(
    model: str, drive: Path, budget: int | None, reserve: int, memory: int | None, rates: str | None
) -> "MirrorPlan":
    from headrace.cli.report import byte_progress
    from headrace.mirror import plan_mirror

    with byte_progress(sys.stderr.isatty()) as show:
        return plan_mirror(
            model,
            drive,
            _config(memory),
            budget_bytes=budget,
            reserve_bytes=reserve,
            bytes_per_s=_pair(rates),
            progress=show,
        )


def _config(memory: int | None) -> "EngineConfig":
    from headrace.config import EngineConfig

    return EngineConfig() if memory is None else EngineConfig(memory=memory)


def _pair(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    values = [float(parsed_bytes(part.strip().removesuffix("/s"))) for part in text.split(",")]
    if len(values) != 2:
        raise typer.BadParameter(f"expected two bandwidths such as 1.2GB/s,3GB/s, got `{text}`")
    return values[0], values[1]


def _print_plan(made: "MirrorPlan") -> None:
    from headrace.mirror import describe_plan

    for line in describe_plan(made):
        print(line)
