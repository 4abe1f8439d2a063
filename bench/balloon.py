"""Leaves the rest of the machine a given amount of available memory, by locking all beyond it.

    python bench/balloon.py MIB SECONDS

Counts what the system calls available, page cache included, so that a program that maps its files
is held to the same amount as one that allocates. Prints `ready` and what is left, sleeps, and ends.
It is the first that the system kills, and a squeezed machine serves nobody else: run it alone and
briefly.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK_BYTES = 64 << 20


def available_mib() -> int:
    """Return MemAvailable in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    raise SystemExit("the system does not say what memory is available")


def inflate(target_mib: int) -> list[mmap.mmap]:
    """Lock memory until no more than the target is available; returns what holds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = []
    while available_mib() > target_mib + (BLOCK_BYTES >> 20):
        block = mmap.mmap(-1, BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(BLOCK_BYTES)):
            raise SystemExit(f"cannot lock memory: {os.strerror(ctypes.get_errno())}")
        held.append(block)
    return held


@contextmanager
def balloon(target_mib: int, seconds: float) -> Iterator[int]:
    """Hold the rest of the machine to `target_mib` within the block; gives what is available.

    Args:
        target_mib: what is left.
        seconds: life of the balloon, should nobody end it; a block that takes longer is void.
    """
    command = [sys.executable, __file__, str(target_mib), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if words[:1] != ["ready"]:
            raise SystemExit("the balloon could not be filled: it locks memory, which needs leave")
        try:
            yield int(words[1])
        finally:
            burst = process.poll() is not None
            process.kill()
    if burst:
        raise SystemExit("the balloon burst before the measurement ended: its figures are void")


def main() -> None:
    """Fill, say so, wait."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = inflate(int(sys.argv[1]))
    print("ready", available_mib(), flush=True)
    time.sleep(float(sys.argv[2]))
    held.clear()


if __name__ == "__main__":
    main()
