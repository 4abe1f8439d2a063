"""What every benchmark says of its circumstances: machine, commit, and time the host stole."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Self

from headrace import _core


def describe() -> str:
    """Processor, cores, threads, instruction set and commit, in one line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} processors, "
        f"{_core.num_threads()} threads, {_core.isa()}, commit {commit or 'unknown'}"
    )


class Steal:
    """Share of processor time the host took in the `with` block; above 0.05 a run is void."""

    share = 0.0

    def __enter__(self) -> Self:
        self._before = self._ticks()
        return self

    def __exit__(self, *_: object) -> None:
        stolen, total = (
            after - before for after, before in zip(self._ticks(), self._before, strict=True)
        )
        self.share = stolen / max(1, total)

    @staticmethod
    def _ticks() -> tuple[int, int]:
        """Stolen and total time since boot; zeros where the system does not say."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0, 0
        fields = [int(x) for x in stat.read_text().splitlines()[0].split()[1:]]
        return fields[7], sum(fields[:8])
