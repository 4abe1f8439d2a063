"""The rooms keep their doors: who may import the native module, and what the package exports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import headrace

SOURCE = Path(headrace.__file__).parent
MAY_IMPORT_CORE = {"ops", "experts", "state", "checkpoint"}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names} | {str(node.module)}
    return found


def test_only_four_rooms_import_the_native_module() -> None:
    users = {
        path.relative_to(SOURCE).with_suffix("").parts[0]
        for path in SOURCE.rglob("*.py")
        if "headrace._core" in _imports(path)
    }
    assert users == MAY_IMPORT_CORE


def test_every_public_name_is_there_and_is_no_surprise() -> None:
    for name in headrace.__all__:
        assert getattr(headrace, name).__name__ == name
    listed = [name for names in headrace._HOMES.values() for name in names]
    assert sorted(headrace.__all__) == sorted(listed)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import headrace, sys; print([m for m in ('numpy', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
