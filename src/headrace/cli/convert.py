"""`headrace convert`: a checkpoint becomes a container of packed records, or a GGUF file."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Group, Json, make_recipe, usage


def command(
    source: Annotated[
        Path,
        typer.Argument(help="a Hugging Face checkpoint directory; for GGUF any model, or `demo`"),
    ],
    dest: Annotated[
        Path, typer.Argument(help="the container to make, or a file that ends in .gguf")
    ],
    experts: Annotated[
        str | None,
        typer.Option(
            help="format of experts: q4, q8, mxfp4 or bf16; in GGUF also f32",
            show_default="q4; in GGUF as in the source",
        ),
    ] = None,
    group: Group = None,
    dense: Annotated[
        str | None,
        typer.Option(
            help="format of everything else: q8, q4 or bf16; in GGUF also mxfp4 and f32",
            show_default="q8; in GGUF as in the source",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write DEST, a container of SOURCE that is read without repacking.

    A conversion that was stopped goes on where it was when called again. If DEST ends in .gguf, one
    file for llama.cpp and its kin is written instead, by default without loss.
    """
    if dest.suffix == ".gguf":
        if group is not None:
            raise typer.BadParameter(
                f"--group {group} does nothing: q4 in a GGUF file always has 32 inputs per scale"
            )
        _write_gguf(source, dest, experts, dense, as_json)
    else:
        _write_container(source, dest, experts, group, dense, as_json)


def _write_container(
    source: Path,
    dest: Path,
    experts: str | None,
    group: int | None,
    dense: str | None,
    as_json: bool,
) -> None:
    from headrace.cli.report import byte_progress, say
    from headrace.convert import Progress, convert
    from headrace.metrics import format_bytes

    recipe = make_recipe(experts, group, dense)
    with byte_progress(sys.stderr.isatty()) as show:

        def tell(progress: Progress) -> None:
            show(progress.file, progress.done_bytes, progress.total_bytes)

        report = convert(source, dest, recipe, tell)
    if as_json:
        print(json.dumps({**vars(report), "dest": str(dest)}))
    elif report.already_done:
        say(f"{dest} is complete already: nothing was done", style="")
    else:
        kept = f", {report.kept_files} kept from an earlier run" if report.kept_files else ""
        size = format_bytes(report.total_bytes)
        say(f"{dest}: {size} in {report.num_files} files{kept}", style="")


def _write_gguf(
    source: Path, dest: Path, experts: str | None, dense: str | None, as_json: bool
) -> None:
    from headrace.cli.report import byte_progress, say
    from headrace.convert import GgufRecipe, Progress, convert_to_gguf
    from headrace.llm import resolve_model
    from headrace.metrics import format_bytes

    with usage():
        recipe = GgufRecipe(experts, dense)
    with byte_progress(sys.stderr.isatty()) as show:

        def tell(progress: Progress) -> None:
            show(progress.file, progress.done_bytes, progress.total_bytes)

        report = convert_to_gguf(resolve_model(source), dest, recipe, tell)
    if as_json:
        print(json.dumps({**vars(report), "dest": str(dest)}))
        return
    say(f"{dest}: {format_bytes(report.total_bytes)} in {report.num_tensors} tensors", style="")
    for note in report.notes:
        say(f"note: {note}", style="yellow")


command.__name__ = "convert"
