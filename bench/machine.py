"""What every benchmark says of its circumstances: machine, commit, and time the host stole."""

import os
import subprocess

from headrace import _core
from headrace.machine import Steal, processor_name

__all__ = ["Steal", "describe"]


def describe() -> str:
    """Processor, cores, threads, instruction set and commit, in one line."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{processor_name()}, {os.cpu_count()} processors, "
        f"{_core.num_threads()} threads, {_core.isa()}, commit {commit or 'unknown'}"
    )
