"""The application: its commands, and how every one of them ends.

stdout is data, everything else goes to stderr. A failure is one message and exit status 1, wrong
usage 2, Ctrl-C 130. No traceback reaches the user unless HEADRACE_DEBUG is set.
"""

import logging
import os
import sys
from typing import Annotated, Any

import typer

from headrace.cli import bench, chat, convert, doctor, inspect, plan, run, synth
from headrace.errors import EngineError

# Typer carries click along under changing names; its public BadParameter leads to the classes.
_UsageError: Any
_ClickException: Any
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]

app = typer.Typer(
    name="headrace",
    help="Run mixture-of-experts language models larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"headrace {version_of('headrace')}")
        raise typer.Exit


for _module in (run, chat, plan, convert, inspect, synth, doctor):
    app.command()(_module.command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line and exit."""
    _fill_closed_streams()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    sys.exit(_run(sys.argv[1:]))


def _fill_closed_streams() -> None:
    """Give a stream that the caller closed (`>&-`) to nowhere: Python has None in its place, and
    the first file opened would take its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _run(arguments: list[str]) -> int:
    try:
        _require_utf8(arguments)
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except _ClickException as error:
        error.show()
        return 2 if isinstance(error, _UsageError) else 1
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EngineError as error:
        return _fail(str(error))
    except (OSError, MemoryError) as error:
        return _fail(f"{type(error).__name__}: {error}")
    except Exception as error:
        if os.environ.get("HEADRACE_DEBUG"):
            raise
        return _fail(
            f"unexpected {type(error).__name__}: {error}\n"
            "hint: this is a bug in headrace; HEADRACE_DEBUG=1 shows where"
        )


def _require_utf8(arguments: list[str]) -> None:
    """Refuse bytes that are no text once, here: half of what takes names and prompts cannot."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(
                f"an argument is not valid UTF-8: {os.fsencode(argument)!r}"
            ) from None


def _fail(message: str) -> int:
    print(f"headrace: {message}", file=sys.stderr)
    return 1
