"""The fixtures made anew by torch and transformers, compared with those in the repository."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "make_fixtures.py"


@pytest.mark.oracle
@pytest.mark.slow
def test_fixtures_are_what_transformers_computes_today() -> None:
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"NOT COMPARED LIVE: no {' and no '.join(missing)} (extra `oracle`)")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
