"""`headrace chat`: a conversation at the terminal, or from lines on stdin.

Ctrl-C ends the answer and not the program, Ctrl-D leaves. The session owns the messages; the pages
of earlier turns stay in the engine, so that a turn computes only what is new.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import MODEL_HELP, takes
from headrace.config import EngineConfig, SamplingParams
from headrace.errors import EngineError

if TYPE_CHECKING:
    from headrace.llm import LLM, Stream
    from headrace.metrics import Receipt

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (without TEXT: drop it) and forget the conversation
/stats         what the last answer and the whole session cost
/save FILE     write the conversation as JSON
/help          this list
/exit          leave, as Ctrl-D does
//...          a message that begins with /
A line that ends with \\ goes on, \"\"\" begins and ends several lines, Alt-Enter breaks a line.
Ctrl-C ends an answer."""
QUOTES = '"""'
LEAVE = ("exit", "quit")


@takes(EngineConfig, SamplingParams, without=("sequences", "profile"))
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "demo",
    system: Annotated[
        str | None, typer.Option(help="the system message", show_default=False)
    ] = None,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> None:
    """Talk with MODEL.

    A line is a message, and one that begins with / a command: /help lists them. Of two slashes the
    second begins a message: //etc sends /etc. Where stdin is no terminal, its lines are taken.
    """
    from headrace.cli.report import describe, say
    from headrace.cli.wait import loading
    from headrace.llm import LLM

    with loading(model):
        llm = LLM(model, engine)
    with llm:
        say(describe(llm, model))
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            say("/help lists what else can be said; Ctrl-D leaves")
        session = Session(llm, model, sampling, system)
        for text in _inputs(_terminal_reader() if is_terminal else _pipe_reader()):
            if not session.take(text):
                break


class Session:
    """One conversation and what it cost."""

    def __init__(
        self, llm: "LLM", model: str, sampling: SamplingParams, system: str | None = None
    ) -> None:
        self._llm = llm
        self._model = model
        self._sampling = sampling
        self._system = system
        self._receipts: list[Receipt] = []
        self.messages: list[dict[str, Any]] = []
        self._reset()

    def take(self, text: str) -> bool:
        """Obey a command or answer a message; False ends the session."""
        from headrace.cli.report import say

        if not text.strip():
            return True
        if not text.startswith("/") or text.startswith("//"):
            self._answer(text.removeprefix("/"))
            return True
        name, *rest = text[1:].split(maxsplit=1) or [""]
        actions: dict[str, Callable[[str], None]] = {
            "reset": self._forget,
            "system": self._set_system,
            "stats": self._stats,
            "save": self._save,
            "help": self._help,
        }
        if name not in (*actions, *LEAVE):
            say(f"unknown command /{name}; /help lists them, and //{name} is a message", style="")
        elif rest and name not in ("system", "save"):
            say(f"/{name} takes nothing; //{name} begins a message", style="")
        elif name in LEAVE:
            return False
        else:
            actions[name]("".join(rest).strip())
        return True

    def _answer(self, text: str) -> None:
        from headrace.cli.report import say, say_cut

        self.messages.append({"role": "user", "content": text})
        try:
            stream = self._llm.stream_chat(self.messages, self._sampling)
        except EngineError as error:
            self.messages.pop()
            say(f"headrace: {error}", style="")
            say("the conversation goes on without this message; /reset begins a new one")
            return
        _print_stream(stream)
        result = stream.result()
        self._receipts.append(result.receipt)
        is_empty = result.finish_reason == "cancelled" and not result.text
        if result.error is None and not is_empty:
            self.messages.append({"role": "assistant", "content": result.text})
            say_cut(result, self._sampling.max_tokens)
            return
        # A question without an answer would stand beside the next one, which templates refuse.
        self.messages.pop()
        if result.error is not None:
            say(f"headrace: {result.error}", style="")
        say("the conversation goes on without this message; ask again")

    def _help(self, _: str) -> None:
        from headrace.cli.report import say

        say(HELP, style="")

    def _reset(self) -> None:
        self.messages = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def _forget(self, _: str = "") -> None:
        from headrace.cli.report import say

        self._reset()
        about = "the system message stays" if self._system else "no system message"
        say(f"a new conversation; {about}")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._forget()

    def _stats(self, _: str) -> None:
        from headrace.cli.report import say, say_receipt

        if not self._receipts:
            say("nothing was answered yet", style="")
            return
        say_receipt(self._receipts[-1])
        prompt = sum(r.prompt_tokens for r in self._receipts)
        cached = sum(r.cached_tokens for r in self._receipts)
        answered = sum(r.completion_tokens for r in self._receipts)
        seconds = sum(r.prefill_s + r.decode_s for r in self._receipts)
        say(
            f"session: answers {len(self._receipts)}, {prompt} prompt tokens ({cached} cached), "
            f"{answered} answer tokens, {seconds:.1f} s"
        )

    def _save(self, name: str) -> None:
        from headrace.cli.report import say

        if not name:
            say("usage: /save FILE", style="")
            return
        content = {"model": self._model, "messages": self.messages}
        try:
            Path(name).expanduser().write_text(
                json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
        except (OSError, ValueError, RuntimeError) as error:  # or the name is no path
            say(f"headrace: conversation not saved: {error}", style="")
            return
        say(f"saved {len(self.messages)} messages to {name}")


def _print_stream(stream: "Stream") -> None:
    """Write an answer as it comes; Ctrl-C ends it between two steps, a second one at once."""
    from headrace.cli.wait import Progress

    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with Progress(stream) as progress:
            while not stream.is_finished and not pressed:
                text = stream.advance()
                progress.update()
                if text:
                    progress.stop()
                    sys.stdout.write(text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()
        signal.signal(signal.SIGINT, before)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _inputs(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Join lines into messages.

    Args:
        read: gives the next line, or None at the end; its argument says that a message goes on.
    """
    while (line := read(False)) is not None:
        if line.lstrip().startswith(QUOTES):
            yield _quoted(line.lstrip()[len(QUOTES) :], read)
            continue
        while line.endswith("\\"):
            more = read(True)
            line = line[:-1] + "\n" + (more or "")
            if more is None:
                break
        yield line


def _quoted(line: str, read: Callable[[bool], str | None]) -> str:
    lines: list[str] = []
    while QUOTES not in line:
        lines.append(line)
        more = read(True)
        if more is None:
            return "\n".join(lines)
        line = more
    lines.append(line[: line.index(QUOTES)])
    return "\n".join(lines).strip("\n")


def _pipe_reader() -> Callable[[bool], str | None]:
    def read(goes_on: bool) -> str | None:
        line = sys.stdin.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None

    return read


def _terminal_reader() -> Callable[[bool], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=_history(), key_bindings=keys)

    def read(goes_on: bool) -> str | None:
        while True:
            try:
                return session.prompt("... " if goes_on else "> ")
            except KeyboardInterrupt:  # clears the line, as in a shell
                continue
            except EOFError:
                return None

    return read


def _history() -> Any:
    import platformdirs
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = Path(platformdirs.user_state_dir("headrace"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "chat-history"
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


command.__name__ = "chat"
