"""The commands: the only place that reads the environment, prints and exits.

Each command is one small file; `app.py` gathers them. Heavy imports wait until a command needs
them, so that `--help` is quick.
"""

from headrace.cli.app import main

__all__ = ["main"]
