"""`headrace pull`: a model of the hub, looked at before it is downloaded."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Json, takes, usage
from headrace.config import LOSSY_OPTIONS, EngineConfig
from headrace.errors import CheckpointError, MemoryBudgetError

if TYPE_CHECKING:
    from headrace.checkpoint.layout import Recipe
    from headrace.hub import Repository
    from headrace.pull import PullReport


HUB_ID_HELP = "OWNER/NAME, or OWNER/NAME:LABEL for one of several GGUF models, such as :Q4_K_M"


@takes(EngineConfig, without=("trace", "profile", *LOSSY_OPTIONS))
def command(
    hub_id: Annotated[str, typer.Argument(metavar="HUB_ID", help=HUB_ID_HELP)],
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit", show_default="main")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="folder to make", show_default="in $HEADRACE_MODELS or the user's data folder"
        ),
    ] = None,
    recipe_name: Annotated[
        str | None,
        typer.Option(
            "--convert",
            metavar="RECIPE",
            help="convert on the way: small, balanced, faithful, or a recipe file; the drive "
            "never holds both copies",
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="only say whether the model is there")
    ] = False,
    as_json: Json = False,
    *,
    engine: EngineConfig,
) -> None:
    """Download HUB_ID, after showing from its headers what fits and how fast it would run.

    Only what a checkpoint needs is fetched: config, tokenizer and safetensors, or the files of one
    GGUF model. A pull that was cut goes on when called again. Afterwards HUB_ID names MODEL to run,
    chat, plan, inspect and tune, unless --to put it elsewhere.
    """
    from headrace.hub import find_pulled, is_offline, open_repository, pulled_folder
    from headrace.pull import PullReport, pull, pull_converted

    recipe = _recipe(recipe_name)
    if offline or is_offline():
        for option, value in {"--to": to, "--revision": revision, "--convert": recipe}.items():
            if value is not None:
                raise typer.BadParameter(f"{option} does nothing when the network is not allowed")
        path = find_pulled(hub_id)
        if path is None:
            raise CheckpointError(f"{hub_id} was not pulled yet, and the network is not allowed")
        _report(hub_id, PullReport(path, _folder_bytes(path), already_there=True), as_json)
        return
    repository = open_repository(hub_id, revision)
    folder = (to or pulled_folder(repository.model_id)).expanduser()
    _show_plan(repository, engine, as_json)
    from headrace.cli.report import byte_progress

    with byte_progress(sys.stderr.isatty()) as show:
        if recipe is None:
            report = pull(repository, folder, show)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            report = pull_converted(repository, folder, recipe, show)
    _report(repository.model_id, report, as_json)


def _recipe(name: str | None) -> "Recipe | str | None":
    from headrace.convert.recipe import PRESETS, read_recipe

    if name is None or name in PRESETS:
        return name
    path = Path(name)
    if not path.is_file():
        raise typer.BadParameter(
            f"unknown recipe {name!r}; expected {', '.join(PRESETS)}, or a recipe file"
        )
    with usage():
        return read_recipe(path)


def _show_plan(repository: "Repository", engine: EngineConfig, as_json: bool) -> None:
    """Say what the model would get here, as it is on the hub."""
    from headrace.cli.remote import plan_remote
    from headrace.cli.report import print_plan, say
    from headrace.metrics import format_bytes

    if as_json:
        return
    try:
        print_plan(plan_remote(repository, engine), repository.model_id, None)
    except MemoryBudgetError as error:
        say(f"note: as it is, it would not run here\n{error}", style="yellow")
    say(f"download: {format_bytes(repository.total_bytes)}", style="")


def _folder_bytes(path: Path) -> int:
    folder = path.parent if path.is_file() else path
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())


def _report(hub_id: str, report: "PullReport", as_json: bool) -> None:
    from headrace.cli.report import say
    from headrace.metrics import format_bytes

    if as_json:
        print(json.dumps({**vars(report), "path": str(report.path), "model": hub_id}))
        return
    size = format_bytes(report.total_bytes)
    state = "is there already" if report.already_there else "pulled"
    say(f"{hub_id} {state}: {report.path}, {size}", style="")


command.__name__ = "pull"
