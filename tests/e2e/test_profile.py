"""`--profile`: the parts of a step add up, name what limits, and change nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, ExpertConfig, SamplingParams
from headrace.engine.loop import EngineLoop
from headrace.models.blocks import Attention
from headrace.plan import MemoryPlan
from headrace.profile import PhaseProfile, what_limits

OPTIONS = ("-n", 6, "--temperature", 0, "--history", "off", "--memory", "4GiB", "--chunk", 4)
OFF = ExpertConfig(history="off")


@pytest.fixture
def plan(tiny: Path) -> MemoryPlan:
    with LLM(tiny, memory="4GiB", experts=OFF) as llm:
        return llm.plan


def test_the_parts_add_up_and_the_tokens_are_the_same(cli: Any, tiny: Path) -> None:
    plain = json.loads(cli("run", tiny, "hello there", *OPTIONS, "--json")[1])
    assert "profile" not in plain
    told = json.loads(cli("run", tiny, "hello there", *OPTIONS, "--profile", "--json")[1])
    assert told["ids"] == plain["ids"]
    phases = told["profile"]
    assert list(phases) == ["prefill", "decode"]
    assert phases["prefill"]["num_steps"] == 3  # 11 tokens in chunks of 4
    assert phases["decode"]["num_steps"] == told["receipt"]["decode_tokens"] == 5
    for phase in phases.values():
        names = ("attention_s", "dense_s", "experts_s", "waiting_s", "rest_s")
        assert sum(phase[name] for name in names) == pytest.approx(phase["wall_s"])
        assert phase["attention_s"] > 0 and phase["experts_s"] > 0
        assert 0 <= phase["drive_utilisation"] <= 1 and phase["limit"]
        waiting = phase["waiting_s"] / phase["wall_s"]
        assert phase["compute_utilisation"] == pytest.approx(1 - waiting)
    read = sum(phase["bytes_read"] for phase in phases.values())
    assert read >= told["receipt"]["bytes_read"]  # here with what is read on advice meanwhile
    assert sum(p["requests"] for p in phases.values()) == told["receipt"]["expert_requests"]


def test_people_get_lines_on_stderr(cli: Any, tiny: Path) -> None:
    status, out, err = cli("run", tiny, "hello", *OPTIONS, "--profile")
    assert status == 0 and "limited by" not in out
    assert "decode is limited by " in err and "ms per step of 5: attention" in err
    assert "limited by" not in cli("run", tiny, "hello", *OPTIONS)[2]


def test_without_a_profile_no_clock_is_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    init = EngineLoop.__init__

    def see(self: EngineLoop, model: Any, *arguments: Any, **options: Any) -> None:
        models.append(model)
        init(self, model, *arguments, **options)

    monkeypatch.setattr(EngineLoop, "__init__", see)
    for profile in (False, True):
        with LLM(tiny, memory="4GiB", experts=OFF, profile=profile) as llm:
            assert (llm.profile is not None) == profile
            llm.generate("hello", SamplingParams(max_tokens=2))
    plain, timed = (model.layers[0].attention for model in models)
    assert isinstance(plain, Attention) and not isinstance(timed, Attention)
    assert timed.scale == plain.scale


def sums(**values: Any) -> PhaseProfile:
    return replace(PhaseProfile("decode", num_steps=10, wall_s=1.0), **values)


def test_the_sentence_names_the_largest_part_and_an_option(plan: MemoryPlan) -> None:
    streamed = replace(plan, num_slots=5, num_records=105, record_bytes=1 << 20)
    busy = sums(waiting_s=0.6, experts_s=0.4, drive_busy_s=0.95, requests=10, hits=3)
    said = what_limits(busy, streamed)
    assert "60% of the time waiting, 30% hits" in said and "`--memory`" in said
    assert "100 MiB more" in said
    idle = what_limits(replace(busy, drive_busy_s=0.5), streamed)
    assert "busy for 50% only" in idle and "--readers" in idle
    resident = what_limits(busy, replace(streamed, num_slots=streamed.num_records))
    assert "read once" in resident and "`--memory`" not in resident
    for name, option in (("attention", "prompts"), ("dense", "--threads"), ("experts", "q4")):
        said = what_limits(sums(**{f"{name}_s": 0.7, "waiting_s": 0.2}), streamed)
        assert said.startswith(f"{name} (70% of the time)") and option in said
    assert what_limits(sums(), streamed).startswith("rest (100%")


def test_the_option_is_offered_only_where_it_does_something(cli: Any, tiny: Path) -> None:
    assert cli("plan", tiny, "--profile")[0] == 2


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("part", ["attention", "dense", "experts", "rest", "waiting"])
def test_every_option_it_names_is_one_of_run(
    cli: Any, plan: MemoryPlan, phase: str, part: str
) -> None:
    known = cli("run", "--help")[1]
    seconds = {} if part == "rest" else {f"{part}_s": 0.9}
    said = what_limits(PhaseProfile(phase=phase, num_steps=1, wall_s=1.0, **seconds), plan)
    named = re.findall(r"`(?!convert)(--[a-z-]+)", said)
    assert all(f" {name} " in known for name in named), said
    assert (phase, part) == ("prefill", "rest") or "--chunk" not in said
