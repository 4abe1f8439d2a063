"""Keeps two processes from working in one folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def folder_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder.

    The system drops it when its holder is killed, so none is ever left behind. Where there is no
    `flock`, nothing keeps two processes apart.

    Raises:
        BlockingIOError: another process holds it, and this one is not to wait.
        OSError: there is no such folder.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
