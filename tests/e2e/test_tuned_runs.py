"""`headrace tune` on a small model: real processes, and a start that uses what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.app import _run
from headrace.config import EngineConfig, ExpertConfig, SamplingParams
from headrace.errors import ConfigError, EngineError
from headrace.inspect import open_model
from headrace.llm import LLM, plan_model
from headrace.tune import Runner, search, tune
from headrace.tuned import Tuned, default_path, machine_identity, save_tuned

OFF = ExpertConfig(history="off")
MEMORY = 1 << 30


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def keep(model: Path, **settings: int | str) -> None:
    _, checkpoint = open_model(model)
    entry = Tuned(MEMORY, settings, 2.0, 1.0, 0.0)
    path = default_path(checkpoint.fingerprint)
    save_tuned(path, checkpoint.fingerprint, machine_identity(checkpoint), entry)


def test_a_start_uses_what_was_kept_and_answers_the_same(tiny: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(tiny, memory=MEMORY, experts=OFF) as llm:
        assert llm.tuned == {}
        plain = llm.generate("ok", params)
    keep(tiny, slots=6, chunk=3, readers=2, policy="lru", read_ahead=1)
    with LLM(tiny, memory=MEMORY, experts=OFF) as llm:
        got = llm.generate("ok", params)
        assert llm.store is not None and llm.store.policy == "lru"
        assert (llm.plan.num_slots, llm.plan.chunk, llm.plan.readers) == (6, 3, 2)
        assert any(note.startswith("tuned: slots 6, chunk 3") for note in llm.plan.notes)
    assert got.ids == plain.ids
    assert got.receipt.readers_from == "tuned"
    made = plan_model(tiny, EngineConfig(memory=MEMORY, slots=7))
    assert made.num_slots == 7 and made.chunk == 3, "an option wins, by itself"
    assert sum(count for _, count in made.parts()) == made.ceiling_bytes


def test_modules_in_the_working_folder_are_not_taken(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's folder often holds Python files."""
    for name in ("pickle.py", "numpy.py", "headrace.py"):
        (tmp_path / name).write_text("raise SystemExit('not me')\n")
    path = [str(Path(entry).resolve()) for entry in sys.path if entry]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.chdir(tmp_path)
    runner = Runner(tiny.resolve(), EngineConfig(memory=MEMORY, experts=OFF), tokens=2)
    assert len(runner({}).ids) == 2


def test_runs_in_processes_of_their_own(tiny: Path) -> None:
    config = EngineConfig(memory=MEMORY, experts=OFF)
    runner = Runner(tiny, config, tokens=4)
    first, second = runner({}), runner({"slots": 6, "policy": "lru"})
    assert first.ids == second.ids and len(first.ids) == 4
    assert (second.num_slots, second.policy) == (6, "lru")
    # The second candidate is refused by the plan, not by the search.
    found = search(runner, EngineConfig(memory=MEMORY), seconds=0)
    assert not found.is_complete and found.rows == ()


def test_the_command_reports_and_keeps_no_empty_find(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", str(tiny), "--memory", str(MEMORY), "--minutes", "0.001"]
    assert _run([*arguments, "--tokens", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ceiling_bytes"] == MEMORY and not report["is_complete"]
    assert report["settings"] == {}
    assert report["saved"] is None, "time was up at once: what an earlier search found stays"
    assert _run([*arguments, "--tokens", "2"]) == 0
    assert "time was up" in capsys.readouterr().out


def test_a_crash_is_no_refusal(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny, EngineConfig(memory=MEMORY, experts=OFF), tokens=2)
    with pytest.raises(ConfigError, match="slots"):
        runner({"slots": 1})
    killed = subprocess.CompletedProcess([], -9, b"", b"")
    monkeypatch.setattr("headrace.tune.subprocess.run", lambda *_, **__: killed)
    with pytest.raises(EngineError, match="status -9") as failure:
        runner({})
    assert not isinstance(failure.value, ConfigError), "a search would go on without a word"


def test_a_model_that_cannot_run_says_why(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"below the floor.*\n(.*\n)+hint: "):
        tune(tiny, EngineConfig(memory=1 << 20, experts=OFF), minutes=0)
