"""`headrace inspect`: what a checkpoint is, and whether its bytes are still those written."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import MODEL_HELP, Json

if TYPE_CHECKING:
    from headrace.inspect import VerifyReport


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    verify: Annotated[bool, typer.Option("--verify", help="read and check every byte")] = False,
    as_json: Json = False,
) -> int:
    """Describe MODEL from its headers; with --verify, read all of it."""
    from headrace.inspect import describe
    from headrace.llm import resolve_model

    path = resolve_model(model)
    summary = describe(path)
    report = _verify(path) if verify else None
    if as_json:
        if report is not None:
            summary["verify"] = _as_dict(report)
        print(json.dumps(summary, ensure_ascii=False))
    else:
        _print(summary, report)
    return 0 if report is None or report.is_sound else 1


def _verify(path: Path) -> "VerifyReport":
    from headrace.cli.report import byte_progress
    from headrace.inspect import verify

    with byte_progress(sys.stderr.isatty()) as show:
        return verify(path, show)


def _as_dict(report: "VerifyReport") -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(report), "is_sound": report.is_sound}


def _print(summary: dict[str, Any], report: "VerifyReport | None") -> None:
    from headrace.metrics import format_bytes

    dense, experts = summary["dense"], summary["experts"]
    kind = {
        "container": "headrace container",
        "huggingface": "Hugging Face directory",
        "gguf": "GGUF file",
    }
    print(f"{summary['path']}: {kind.get(summary['kind'], summary['kind'])}")
    print(
        f"{summary['model_type']}, {summary['num_hidden_layers']} layers, "
        f"hidden {summary['hidden_size']}, vocabulary {summary['vocab_size']}, "
        f"context {summary['max_position_embeddings']}"
    )
    formats = ", ".join(f"{name} x {count}" for name, count in dense["formats"].items())
    print(f"dense: {format_bytes(dense['bytes'])} in {dense['num_tensors']} tensors ({formats})")
    if experts is not None:
        formats = ", ".join(experts["formats"])
        if len(experts["formats"]) == 1 and experts["group"] > 1:
            formats += f" g{experts['group']}"
        print(
            f"experts: {format_bytes(experts['bytes'])} in {experts['num_records']} records "
            f"({experts['num_layers']} layers x {experts['num_experts']}), "
            f"{formats}, {format_bytes(experts['record_bytes'])} each"
        )
        print(
            f"working set of a token: {format_bytes(experts['working_set_bytes'])}, "
            f"{experts['num_experts_per_tok']} experts per layer"
        )
    print(f"files: {len(summary['files'])}, {format_bytes(summary['file_bytes'])}")
    print(f"fingerprint: {summary['fingerprint']}")
    if report is not None:
        _print_verified(report)


def _print_verified(report: "VerifyReport") -> None:
    from headrace.metrics import format_bytes

    how = "checksums" if report.has_checksums else "no checksums here: looked for NaN and infinity"
    state = "sound" if report.is_sound else f"{len(report.damaged)} DAMAGED"
    print(
        f"verified: {report.num_checked} ranges, {format_bytes(report.checked_bytes)} "
        f"({how}): {state}"
    )
    if report.unrecorded:
        print(f"not recorded, so not compared: {', '.join(report.unrecorded)}")
    for damage in report.damaged:
        print(damage.message)


command.__name__ = "inspect"
