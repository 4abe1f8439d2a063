"""Lossy modes on a whole model: off is the exact one, on is named and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import _run
from headrace.config import ExpertConfig, SamplingParams
from headrace.errors import ConfigError
from headrace.llm import LLM, Completion

OFF = ExpertConfig(history="off")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3)


def answer(model: Path | str, prompt: str = "ok then", **options: Any) -> Completion:
    with LLM(model, memory="1GiB", experts=OFF, **options) as llm:
        return llm.generate(prompt, GREEDY)


@pytest.fixture(scope="module")
def exact(tiny: Path) -> Completion:
    return answer(tiny)


def test_off_is_null_in_the_receipt(exact: Completion) -> None:
    assert exact.receipt.lossy is None


@pytest.mark.parametrize(
    "mode",
    [{"expert_top_p": 1.0}, {"expert_top_k": 3}, {"cache_aware_routing": 0.0}, {"drop_cold": 1e-9}],
    ids=str,
)
def test_a_mode_that_changes_nothing_costs_nothing(
    tiny: Path, exact: Completion, mode: dict[str, Any]
) -> None:
    """The same bytes by the other road, and a KL of zero."""
    got = answer(tiny, lossy_check_every=1, **mode)
    assert got.ids == exact.ids and got.logprobs == exact.logprobs
    lossy = got.receipt.lossy
    assert lossy is not None and lossy["checked_tokens"] == 23
    assert lossy["mean_kl"] == 0.0 and lossy["flip_rate"] == 0.0


def test_a_mode_that_changes_something_says_how_much_and_asks_less(
    tiny: Path, exact: Completion
) -> None:
    got = answer(tiny, expert_top_k=1, lossy_check_every=8)
    lossy = got.receipt.lossy
    assert lossy is not None
    assert lossy["expert_top_k"] == 1 and lossy["checked_tokens"] == 3
    assert lossy["mean_kl"] > 0 and 0 <= lossy["flip_rate"] <= 1
    assert got.logprobs != exact.logprobs
    assert got.receipt.expert_requests < exact.receipt.expert_requests
    said = got.receipt.lines()[-1]
    assert "lossy: expert-top-k 1, mean KL " in said and said.endswith("in 3 checked tokens")


@pytest.mark.parametrize("mode", [{"drop_cold": 1.0}, {"cache_aware_routing": 100.0}], ids=str)
def test_a_check_sees_what_the_slots_before_it_cost(tiny: Path, mode: dict[str, Any]) -> None:
    """The exact step of a check reads the experts that the rules are about to leave out."""
    with LLM(tiny, memory="1GiB", experts=OFF, lossy_check_every=1, **mode) as llm:
        assert llm.store is not None
        llm.store.resize(llm.plan.working_set_records + 1)  # all that an exact step reads
        lossy = llm.generate("ok then", GREEDY).receipt.lossy
    assert lossy is not None and lossy["checked_tokens"] == 23
    assert lossy["mean_kl"] > 1e-6


def test_checks_leave_nothing_in_the_lossy_stream(tiny: Path) -> None:
    """However often it is checked, the lossy answer is the same to the bit."""
    often = answer(tiny, expert_top_k=1, lossy_check_every=1)
    seldom = answer(tiny, expert_top_k=1, lossy_check_every=1000)
    assert often.ids == seldom.ids and often.logprobs == seldom.logprobs


def test_max_kl_ends_it_and_says_so(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    got = answer(tiny, expert_top_k=1, lossy_check_every=1, max_kl=0.0)
    assert got.receipt.lossy is not None and got.receipt.lossy["ended"]
    assert got.receipt.lossy["checked_tokens"] == 1
    assert "lossy modes end" in caplog.text


def test_several_sequences_at_once(tiny: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"expert_top_p": 0.6, "memory": "1GiB", "experts": OFF}
    with LLM(tiny, sequences=3, **options) as llm:
        together = llm.generate_batch(["ok", "then so", "what"], params)
        assert llm.lossy is not None and llm.lossy.num_checks >= 3
    assert all(len(each.ids) == 8 for each in together)


def test_options_that_cannot_be(tiny: Path) -> None:
    for options, message in (
        ({"expert_top_k": 99}, "larger than the model's"),
        ({"expert_top_p": 0.0}, "above 0"),
        ({"max_kl": 0.1}, "a lossy mode beside it"),
        ({"lossy_check_every": 0}, "1 or more"),
        ({"lossy_check_every": 4}, "a lossy mode beside it"),
    ):
        with pytest.raises(ConfigError, match=message):
            answer(tiny, **options)  # type: ignore[arg-type]


def test_the_command_names_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(tiny), "ok", "--memory", "1GiB", "--history", "off", "-n", "4"]
    assert _run([*arguments, "--drop-cold", "0.4", "--expert-top-p", "0.9", "--json"]) == 0
    captured = capsys.readouterr()
    assert "LOSSY: expert-top-p 0.9, drop-cold 0.4" in captured.err
    lossy = json.loads(captured.out)["receipt"]["lossy"]
    assert lossy["expert_top_p"] == 0.9 and lossy["drop_cold"] == 0.4
