"""`headrace convert`: a source checkpoint becomes a container of packed records."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import usage


def command(
    source: Annotated[Path, typer.Argument(help="a Hugging Face checkpoint directory")],
    dest: Annotated[Path, typer.Argument(help="the container to make")],
    experts: Annotated[str, typer.Option(help="format of experts: q4, q8, mxfp4 or bf16")] = "q4",
    group: Annotated[int, typer.Option(help="inputs per scale of q4: 32 or 64")] = 64,
    dense: Annotated[str, typer.Option(help="format of everything else: q8, q4 or bf16")] = "q8",
) -> None:
    """Write DEST, a container of SOURCE that is read without repacking.

    A conversion that was stopped goes on where it was when called again.
    """
    from headrace.cli.report import byte_progress, say
    from headrace.convert import Progress, Recipe, convert
    from headrace.metrics import format_bytes

    with usage():
        recipe = Recipe(experts=experts, dense=dense, group=group)
    with byte_progress(sys.stderr.isatty()) as show:

        def tell(progress: Progress) -> None:
            show(progress.file, progress.done_bytes, progress.total_bytes)

        report = convert(source, dest, recipe, tell)
    if report.already_done:
        say(f"{dest} is complete already: nothing was done", style="")
        return
    kept = f", {report.kept_files} kept from an earlier run" if report.kept_files else ""
    say(f"{dest}: {format_bytes(report.total_bytes)} in {report.num_files} files{kept}", style="")


command.__name__ = "convert"
