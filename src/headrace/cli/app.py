"""The application: its commands, and how every one of them ends.

stdout is data, everything else goes to stderr. A failure is one message and exit status 1, wrong
usage 2, Ctrl-C 130, SIGTERM 143. No traceback reaches the user unless HEADRACE_DEBUG is set.
"""

import importlib
import io
import logging
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from headrace.cli.help import Command, CommandGroup
from headrace.errors import EngineError, hide_credentials

# Typer carries click along under changing names; its public BadParameter leads to the classes.
_UsageError: Any
_ClickException: Any
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]

COMMANDS = {
    "run": "Answer PROMPT with MODEL.",
    "chat": "Talk with MODEL.",
    "plan": "Show what each part of MODEL gets of the memory, and what follows.",
    "pull": "Download HUB_ID, after showing from its headers what fits and how fast it would run.",
    "convert": "Write DEST, a container of SOURCE that is read without repacking.",
    "inspect": "Describe MODEL from its headers; with --verify, read all of it.",
    "bench": "Measure this machine.",
    "doctor": "Look at this machine, and at MODEL: findings, and what to do about them.",
    "mirror": "Copy a model's hottest records to a second drive.",
    "tune": "Find the settings that make MODEL fastest on this machine; later runs use them.",
    "trace": "Record routing, and replay it against other memories and policies.",
    "synth": "Write DEST, to measure a machine before downloading a model.",
}
"""Name, which is also the module, and the first line of the command's own help."""


class _LazyGroup(CommandGroup):
    """Holds names only; a command's module and options are made when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find a command by its name, and load it."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name and found else found, rest


def _load(name: str) -> Any:
    module = importlib.import_module(f"headrace.cli.{name}")
    if hasattr(module, "app"):  # a command of commands
        return typer.main.get_command(module.app)
    alone = typer.Typer(add_completion=False, context_settings=_SETTINGS, rich_markup_mode=None)
    alone.command(name, cls=Command)(module.command)
    return typer.main.get_command(alone)


_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="headrace",
    cls=_LazyGroup,
    help="Run mixture-of-experts language models larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_SETTINGS,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"headrace {version('headrace')}")
        except PackageNotFoundError:
            typer.echo("headrace from a source tree: not installed, so without a version")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def _stand_in() -> None:
    """Stands for a command in the list of all."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_stand_in)


def main() -> None:
    """Run the command line and exit."""
    _fill_closed_streams()
    _use_utf8()
    _forget_no_width()
    _end_in_order()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.setLogRecordFactory(_record_without_credentials)
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


def _use_utf8() -> None:
    """Read and write UTF-8 whatever the locale says: answers hold every character, and a prompt
    with bytes that are no text is refused where prompts are checked. The mark that some editors
    begin a file with is no part of it. Names of files that are no text are written as they are.
    """
    for stream, encoding in ((sys.stdin, "utf-8-sig"), (sys.stdout, "utf-8")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="surrogateescape")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")


def _forget_no_width() -> None:
    """Drop a COLUMNS of 0, as terminals without a size set it: nothing would be shown at all."""
    if os.environ.get("COLUMNS", "").strip("0") == "":
        os.environ.pop("COLUMNS", None)


def _end_in_order() -> None:
    """Let a program that is told to end, or whose terminal is closed, save and remove as Ctrl-C
    does: histories, scratch files, processes of its own. Told twice, it ends at once.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _record_without_credentials(*args: Any, **options: Any) -> logging.LogRecord:
    """Make a log record; those of the hub's client name addresses as they are."""
    record = logging.LogRecord(*args, **options)
    record.msg, record.args = hide_credentials(record.getMessage()), None
    return record


def _run(arguments: list[str]) -> int:
    try:
        arguments = [_utf8(argument) for argument in arguments]
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except _ClickException as error:
        error.show()
        if "unexpected extra argument" in error.format_message():
            print("hint: a text of several words stands in quotes", file=sys.stderr)
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


def _utf8(argument: str) -> str:
    """Take an argument's bytes as UTF-8 where the locale's encoding could not read them.

    Bytes that are no text are refused once, here: half of what takes names and prompts cannot.
    """
    try:
        argument.encode()
        return argument
    except UnicodeEncodeError:
        pass
    raw = os.fsencode(argument)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"an argument is not valid UTF-8: {raw!r}") from None


def _fail(message: str) -> int:
    print(f"headrace: {hide_credentials(message)}", file=sys.stderr)
    return 1
