"""Signs of life on a terminal while something takes long; silent when stderr is no terminal."""

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from headrace.cli.report import stderr

if TYPE_CHECKING:
    from headrace.llm import Stream

SPINS_PER_S = 12.5


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Say that a model is being loaded: at once, since loading may keep other threads out."""
    if not sys.stderr.isatty():
        yield
        return
    spinner = Spinner("dots", Text(f"loading {model}", style="dim"))
    with Live(spinner, console=stderr(), transient=True, refresh_per_second=SPINS_PER_S):
        yield


class Progress:
    """The prefill of an answer, shown until its first text."""

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        self._status = stderr().status("") if sys.stderr.isatty() else None
        self.update()

    def update(self) -> None:
        """Show how far the prompt is computed."""
        if self._status is not None:
            done, total = self._stream.progress
            self._status.update(f"prefill {done} of {total} tokens" if done < total else "decode")

    def stop(self) -> None:
        """Clear the line; text follows."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
