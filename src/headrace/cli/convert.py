"""`headrace convert`: a source checkpoint becomes a container of packed records."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import DenseFormat, ExpertFormat, Group, make_recipe


def command(
    source: Annotated[Path, typer.Argument(help="a Hugging Face checkpoint directory")],
    dest: Annotated[Path, typer.Argument(help="the container to make")],
    experts: ExpertFormat = None,
    group: Group = None,
    dense: DenseFormat = None,
) -> None:
    """Write DEST, a container of SOURCE that is read without repacking.

    A conversion that was stopped goes on where it was when called again.
    """
    from headrace.cli.report import byte_progress, say
    from headrace.convert import Progress, convert
    from headrace.metrics import format_bytes

    recipe = make_recipe(experts, group, dense)
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
