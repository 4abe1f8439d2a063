"""`headrace synth`: a checkpoint with the shapes of a real model and random weights."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import DenseFormat, ExpertFormat, Group, make_recipe, usage


def command(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="a named model, such as qwen3-30b-a3b")
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="the directory to make")],
    layers: Annotated[
        int | None, typer.Option(help="fewer layers than the model has", show_default="all")
    ] = None,
    format: Annotated[
        str, typer.Option(help="container, or hf: a bf16 Hugging Face checkpoint")
    ] = "container",
    experts: ExpertFormat = None,
    group: Group = None,
    dense: DenseFormat = None,
    seed: Annotated[int, typer.Option(help="of the weights: same seed, same bytes")] = 0,
    skew: Annotated[
        float,
        typer.Option(help="how unevenly experts are chosen; 0: evenly, the worst case of a cache"),
    ] = 0.6,
) -> None:
    """Write DEST, to measure a machine before downloading a model.

    The text of such a model means nothing; its routing is skewed as in real models.
    """
    from headrace.cli.report import byte_progress, say
    from headrace.metrics import format_bytes
    from headrace.synth import find_shape, require_arguments, synthesize

    with usage():
        require_arguments(format, seed, skew)
        chosen = find_shape(shape).with_layers(layers)
    given = {"--experts": experts, "--group": group, "--dense": dense}
    idle = [name for name, value in given.items() if value is not None]
    if format == "hf" and idle:
        raise typer.BadParameter(
            f"{', '.join(idle)} does nothing with --format hf: such a checkpoint is bf16 throughout"
        )
    recipe = make_recipe(experts, group, dense)
    with byte_progress(sys.stderr.isatty()) as show:
        report = synthesize(
            chosen, dest, recipe=recipe, seed=seed, skew=skew, format=format, progress=show
        )
    if report.already_done:
        say(f"{dest} is complete already: nothing was done", style="")
        return
    say(f"{dest}: {format_bytes(report.total_bytes)} in {report.num_files} files", style="")


command.__name__ = "synth"
