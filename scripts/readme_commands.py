"""Runs the shell commands of a Markdown file, so that the README cannot go stale.

Every line that starts with `$ ` inside a ```console block is run with bash in one fresh folder, in
order. Installing is left to the caller: lines that start with `$ pip ` are skipped, and so is a
block that follows the comment `<!-- not run: reason -->`, whose reason is printed.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]*) -->\n)?```console\n(?P<body>.*?)```", re.DOTALL
)


def commands(text: str) -> list[str]:
    """The commands of the console blocks, in order, without those that install or are marked."""
    found: list[str] = []
    for block in BLOCK.finditer(text):
        lines = [line[2:] for line in block["body"].splitlines() if line.startswith("$ ")]
        if block["reason"]:
            print(f"not run ({block['reason']}): {len(lines)} commands")
            continue
        found += [line for line in lines if not line.startswith("pip ")]
    return found


def main() -> int:
    """Run them; the first failure ends the run with its status."""
    found = commands(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if not found:
        print("no command found: the README lost its examples", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for command in found:
            print(f"$ {command}", flush=True)
            status = subprocess.run(["bash", "-c", command], cwd=folder, check=False).returncode
            if status:
                print(f"failed with status {status}: {command}", file=sys.stderr)
                return status
    print(f"{len(found)} README commands ran")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
