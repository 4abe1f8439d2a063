"""What every benchmark says of its circumstances: machine, commit, and time the host stole."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headrace import EngineConfig, _core
from headrace.llm import plan_model
from headrace.machine import VOID_SHARE, Steal, processor_name

__all__ = ["VOID_SHARE", "Rounds", "Steal", "describe", "with_slots_of"]

LEFT_BEHIND_BYTES = 2 << 30
"""More than all models that a process opens one after another leave in its memory."""


def describe() -> str:
    """Processor, cores, threads, instruction set and commit, in one line."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{processor_name()}, {os.cpu_count()} processors, "
        f"{_core.num_threads()} threads, {_core.isa()}, commit {commit or 'unknown'}"
    )


def with_slots_of(model: Path, config: EngineConfig) -> EngineConfig:
    """Fix the slots that a first model of the process would get.

    What earlier models leave behind counts against the ceiling of later ones, which would get fewer
    slots and read more.
    """
    assert config.memory != "auto"
    slots = plan_model(model, config).num_slots
    return replace(config, memory=config.memory + LEFT_BEHIND_BYTES, slots=slots)


class Rounds:
    """Gives a `Steal` per round until `count` rounds are good, or as many are void."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Steal]:
        num_good = num_void = 0
        while num_good < self._count and num_void < self._count:
            steal = Steal()
            yield steal
            num_void += steal.is_void
            num_good += not steal.is_void

    @staticmethod
    def verdict(steal: Steal) -> str:
        """What the host took, and whether the round counts."""
        return f"steal {steal.share:.1%}" + (", void" if steal.is_void else "")
