"""`headrace tune`: find the settings that make a model fastest here, and keep them."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import MODEL_HELP, Json, takes
from headrace.config import LOSSY_OPTIONS, TUNE_MINUTES, TUNE_TOKENS, EngineConfig

if TYPE_CHECKING:
    from headrace.tune import Found, Row


@takes(EngineConfig, without=("sequences", "profile", "trace", "tuned", *LOSSY_OPTIONS))
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    minutes: Annotated[float, typer.Option(min=0, help="time for all measurements")] = TUNE_MINUTES,
    tokens: Annotated[int, typer.Option(min=2, help="tokens decoded in each run")] = TUNE_TOKENS,
    as_json: Json = False,
    *,
    engine: EngineConfig,
) -> None:
    """Find the settings that make MODEL fastest on this machine; later runs use them."""
    from headrace.cli.report import say
    from headrace.tune import tune

    say("each line is a run or, where it looks like a gain, three; options given stay as they are")

    def show(row: "Row") -> None:
        if not as_json and sys.stderr.isatty():
            say(f"{row.name} {row.value}: {row.verdict}")

    found, where = tune(model, engine, minutes=minutes, tokens=tokens, progress=show)
    if as_json:
        print(json.dumps({"model": model, **where, **_report(found)}, ensure_ascii=False))
    else:
        _print(model, found, where["saved"])


def _report(found: "Found") -> dict[str, Any]:
    return {
        "settings": dict(found.settings),
        "seconds_before": found.before.seconds,
        "seconds_after": found.after.seconds,
        "is_complete": found.is_complete,
        "rows": [asdict(row) for row in found.rows],
    }


def _print(model: str, found: "Found", saved: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from headrace.cli.report import stdout
    from headrace.tune import LEAST_SECONDS
    from headrace.tuned import describe_settings

    console = stdout()
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "value", "seconds", "gain", ""):
        table.add_column(name, justify="right" if name in ("value", "seconds", "gain") else "left")
    before = found.before
    table.add_row("as it is", "", f"{before.seconds:.2f}", "", "")
    for row in found.rows:
        table.add_row(
            row.name.replace("_", "-"),
            str(row.value),
            "" if row.seconds is None else f"{row.seconds:.2f}",
            "" if row.gain is None else f"{100 * row.gain:+.1f} %",
            row.verdict,
            style="bold" if row.is_taken else None,
        )
    console.print(Text(f"settings of {model} on this machine", style="bold"))
    console.print(table)
    if not found.is_complete:
        console.print(Text("time was up before every candidate was tried: more `--minutes`"))
    if before.seconds < 20 * LEAST_SECONDS:
        console.print(Text("runs this short tell little: more `--tokens`"))
    gain = 100 * (before.seconds / found.after.seconds - 1)
    result = (
        f"{describe_settings(found.settings)}: {gain:+.1f} %, used from now on by run, chat and LLM"
        if found.settings
        else "nothing was faster by 3 % twice: the defaults stay"
    )
    console.print(Text(result))
    if saved is not None:
        console.print(Text(f"kept in {saved}", style="dim"))


command.__name__ = "tune"
