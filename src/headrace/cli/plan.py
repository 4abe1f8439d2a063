"""`headrace plan`: what a model would get of the memory, without loading it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import MODEL_HELP, Json, takes, usage
from headrace.config import LOSSY_OPTIONS, EngineConfig, parse_bytes

if TYPE_CHECKING:
    from headrace.plan import MemoryPlan


def _rate(text: str) -> float:
    with usage():
        return float(parse_bytes(text.removesuffix("/s")))


@takes(EngineConfig, without=("trace", "profile", *LOSSY_OPTIONS))
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    drive_bytes_per_s: Annotated[
        Any,
        typer.Option(
            parser=_rate,
            metavar="RATE",
            help="bandwidth of the drive, or of all drives together, such as 2.4GB/s",
            show_default="as measured",
        ),
    ] = None,
    as_json: Json = False,
    *,
    engine: EngineConfig,
) -> None:
    """Show what each part of MODEL gets of the memory, and what follows.

    MODEL may be a hub id that was not pulled: its config and headers are asked for, no weights.
    """
    from headrace.cli.report import print_plan

    made = _plan(model, engine, is_speed_wanted=drive_bytes_per_s is None)
    if not as_json:
        print_plan(made, model, drive_bytes_per_s)
        return
    drive = drive_bytes_per_s or made.drive_bytes_per_s
    speed = made.predicted_tokens_per_s(drive_bytes_per_s)
    report = {"model": model, **made.as_dict(), "drive_bytes_per_s": drive}
    print(json.dumps({**report, "predicted_tokens_per_s": speed}, ensure_ascii=False))


def _plan(model: str, engine: EngineConfig, *, is_speed_wanted: bool) -> "MemoryPlan":
    from headrace.cli.remote import plan_remote
    from headrace.hub import find_pulled, is_hub_id, open_repository
    from headrace.llm import plan_model

    if not is_hub_id(model) or Path(model).exists() or find_pulled(model) is not None:
        return plan_model(model, engine)
    return plan_remote(open_repository(model), engine, is_speed_wanted=is_speed_wanted)


command.__name__ = "plan"
