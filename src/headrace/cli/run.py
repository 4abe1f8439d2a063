"""`headrace run`: one prompt, one answer, streamed; the receipt goes to stderr."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import MODEL_HELP, Json, takes
from headrace.config import EngineConfig, SamplingParams
from headrace.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.llm import LLM, Completion, Stream

# The tag asks the demo for the manner that it knows best; its card names the others.
DEMO_PROMPT = "<austen>Elizabeth was surprised, and"
DEFAULT_PROMPT = "Once upon a time"


@takes(EngineConfig, SamplingParams, without=("sequences",))
def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default="demo"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="the text, in quotes; `-` reads it from stdin. Alone, several words are a "
            "PROMPT for the demo, and one word is MODEL",
            show_default="the beginning of a story",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="put the prompt into the model's chat template, or take it as it stands",
            show_default="chat if the model has a template",
        ),
    ] = None,
    as_json: Json = False,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> int:
    """Answer PROMPT with MODEL."""
    model, prompt = _model_and_prompt(model, prompt)
    from headrace.cli.report import describe, say, say_cut, say_receipt
    from headrace.cli.wait import loading
    from headrace.llm import LLM

    with loading(model):
        llm = LLM(model, engine)
    with llm:
        stream, form = _start(llm, prompt, chat, sampling)
        say(f"{describe(llm, model)} · {form} prompt")
        is_continued = form == "raw" and sys.stdout.isatty()
        result = _follow(stream, not as_json, prompt if is_continued else "")
        if as_json:
            _print_json(model, result, llm)
        else:
            say_cut(result, sampling.max_tokens)
            say_receipt(result.receipt)
            for line in [] if llm.profile is None else llm.profile.lines(llm.plan):
                say(line)
    if result.error is not None:
        say(f"headrace: {result.error}", style="")
        return 1
    return 130 if result.finish_reason == "cancelled" else 0


def _model_and_prompt(first: str | None, second: str | None) -> tuple[str, str]:
    """Tell `run PROMPT` from `run MODEL`, and read a prompt of `-` from stdin.

    Raises:
        CheckpointError: a word alone that names no model. It is more often a slip in MODEL than a
            prompt, and taken for one it would run another model than was meant.
    """
    from headrace.cli.report import say
    from headrace.llm import DEMO, find_model, no_such_model

    if first is not None and second is None and first != DEMO and find_model(first) is None:
        if not _is_text(first):
            raise CheckpointError(
                f"{no_such_model(first)}\n"
                "hint: a word alone is MODEL; if it is a prompt, `headrace run demo PROMPT`"
            )
        say("no MODEL is named: a prompt for the demo")
        first, second = DEMO, first
    model = DEMO if first is None else first
    if second == "-":
        return model, sys.stdin.read()
    if second is None:
        return model, DEMO_PROMPT if model == DEMO else DEFAULT_PROMPT
    return model, second


def _is_text(argument: str) -> bool:
    """Whether what names no model is a prompt: several words that do not begin as a path does,
    none, or the `-` that stands for stdin.
    """
    is_path = argument.startswith(("./", "../", "/", "~"))
    return argument in ("", "-") or (not is_path and any(map(str.isspace, argument)))


def _start(
    llm: "LLM", prompt: str, chat: bool | None, sampling: SamplingParams
) -> "tuple[Stream, str]":
    if chat is None:
        chat = llm.tokenizer.has_chat_template
    if chat:
        return llm.stream_chat([{"role": "user", "content": prompt}], sampling), "chat"
    return llm.stream(prompt, sampling), "raw"


def _follow(stream: "Stream", show: bool, start: str) -> "Completion":
    """Write the answer as it comes; `start` goes before it on stderr, once the progress is gone
    that would wipe its line.
    """
    from headrace.cli.report import say
    from headrace.cli.wait import Progress

    try:
        with Progress(stream) as progress:
            while not stream.is_finished:
                text = stream.advance()
                progress.update()
                if show and text:
                    progress.stop()
                    if start:
                        say(start, end="")
                        start = ""
                    sys.stdout.write(text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()
    if show:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return stream.result()


def _print_json(model: str, result: "Completion", llm: "LLM") -> None:
    report: dict[str, Any] = {
        "model": model,
        "text": result.text,
        "ids": list(result.ids),
        "finish_reason": result.finish_reason,
        "receipt": result.receipt.as_dict(),
    }
    if llm.profile is not None:
        report["profile"] = llm.profile.as_dict(llm.plan)
    print(json.dumps(report, ensure_ascii=False))


command.__name__ = "run"
