"""`headrace doctor`: what stands between this machine and a model that runs well."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from headrace.cli.options import MODEL_HELP, Json

if TYPE_CHECKING:
    from headrace.doctor import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"look at it, too: {MODEL_HELP}", show_default=False),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="read every byte of MODEL and compare checksums")
    ] = False,
    as_json: Json = False,
) -> int:
    """Look at this machine, and at MODEL: findings, and what to do about them."""
    from headrace.cli.report import byte_progress
    from headrace.doctor import PROBLEM, examine

    if deep and model is None:
        raise typer.BadParameter("--deep does nothing without a MODEL")
    with byte_progress(deep and sys.stderr.isatty()) as show:
        findings = examine(model, is_deep=deep, progress=show)
    if as_json:
        report = {"model": model, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(findings)
    return 1 if any(finding.level == PROBLEM for finding in findings) else 0


def _print(findings: "list[Finding]") -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.level:<8}", style=_STYLES[finding.level])
        indent = " " * (width + 10)
        body = finding.text.replace("\n", f"\n{indent}")
        line.append(f"{finding.subject:<{width}}  {body}", style="default")
        console.print(line)
        if finding.advice is not None:
            console.print(Text(f"{indent}-> {finding.advice}", style="dim"))


command.__name__ = "doctor"
