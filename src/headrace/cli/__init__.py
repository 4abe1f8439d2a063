"""The commands: the only place that reads the environment, prints and exits.

Each command is one small file; `app.py` gathers them. Heavy imports wait until a command needs
them, so that `--help` is quick.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit; Ctrl-C is heard from the first import on."""
    try:
        from headrace.cli import app
    except KeyboardInterrupt:
        sys.exit(130)
    app.main()
