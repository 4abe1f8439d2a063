"""`headrace trace`: what a run records, a replay counts; and what is wrong is said."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import _run
from headrace.config import EngineConfig, ExpertConfig, SamplingParams
from headrace.experts import ExpertStore
from headrace.experts.policy import replay
from headrace.experts.trace import read_trace
from headrace.llm import LLM

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
QUIET = ("--history", "off", "--memory", "4GiB")


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = _run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def recorded(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    prompts = tmp_path / "prompts"
    prompts.write_text("hello\n\nthe other one\n")
    file = tmp_path / "tiny.hrt"
    options = ("-n", 12, "--temperature", 0, "--ignore-eos", *QUIET)
    status, _, err = call(capsys, "trace", "record", file, tiny, "--prompts", prompts, *options)
    assert status == 0 and "1 of 2" in err and "2 of 2" in err
    return file


def test_a_replay_predicts_what_the_run_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding token by token: misses to the record, for every policy the run may have."""
    monkeypatch.setattr(ExpertStore, "warm_all", lambda self: None)  # a replay begins cold
    for policy, tokens in (("next-use", 32), ("frequency", 32), ("frequency", 2), ("slru", 32),
                           ("lru", 32)):  # fmt: skip
        file = tmp_path / f"{policy}-{tokens}.hrt"
        experts = ExpertConfig(history="off", policy=policy, trace=file, half_life_tokens=tokens)
        with LLM(tiny, EngineConfig(memory=4 << 30, chunk=1, experts=experts)) as llm:
            assert llm.store is not None
            num_slots = llm.store.resize(max(3, llm.plan.working_set_records // 2))
            receipt = llm.generate([5, 6, 7, 8], GREEDY).receipt
        trace = read_trace(file)
        half_life = float(experts.half_life_tokens)
        got = replay(trace, policy, num_slots=num_slots, half_life_tokens=half_life)
        assert got.decode.tokens == receipt.decode_tokens
        assert got.prefill.tokens == receipt.prompt_tokens
        if policy in ("lru", "frequency"):  # the others also look at the slots opened with
            assert got.misses == receipt.expert_misses > num_slots


def test_tokens_are_split_into_prefill_and_decode(recorded: Path) -> None:
    trace = read_trace(recorded)
    got = replay(trace, "lru", num_slots=8, half_life_tokens=32.0)
    assert got.decode.tokens == 2 * 11
    assert got.prefill.tokens + got.decode.tokens == trace.num_tokens


def test_replay_prints_a_row_for_each_memory_and_policy(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(
        capsys, "trace", "replay", recorded, "--slots", "4,8", "--drives", "1GB/s"
    )
    assert status == 0
    for word in ("next-use", "frequency", "slru", "lru", "belady", "at 1 GB/s", "tok/s", "slots"):
        assert word in out
    arguments = ("--memory", "1GiB,2GiB", "--policy", "lru", "--drives", "500MB,1GB", "--json")
    status, out, _ = call(capsys, "trace", "replay", recorded, *arguments)
    report = json.loads(out)
    assert status == 0
    assert [row["policy"] for row in report["replays"]] == ["lru", "belady"] * 2
    arguments = ("--slots", 8, "--policy", "frequency", "--half-life-tokens", 1, "--json")
    status, out, _ = call(capsys, "trace", "replay", recorded, *arguments)
    got = replay(read_trace(recorded), "frequency", num_slots=8, half_life_tokens=1.0)
    assert json.loads(out)["replays"][0]["hit_rate"] == got.decode.hit_rate
    assert report["pace"]["tokens"] == 2 * 11
    for row in report["replays"]:
        assert row["tokens_per_s"] is None or row["tokens_per_s"] > 0
        assert set(row["tokens_per_s_by_drive"]) == {"500000000", "1000000000"}


def test_the_pace_of_a_run_is_in_its_trace(tiny: Path, tmp_path: Path) -> None:
    """Time, stalls and misses of the decoding steps, as the receipt counts them."""
    file = tmp_path / "pace.hrt"
    experts = ExpertConfig(history="off", policy="lru", trace=file)
    with LLM(tiny, EngineConfig(memory=4 << 30, experts=experts)) as llm:
        assert llm.store is not None
        llm.store.resize(max(3, llm.plan.working_set_records // 2))
        receipt = llm.generate([5, 6, 7, 8], GREEDY).receipt
    pace = read_trace(file).pace
    assert pace.tokens == receipt.decode_tokens
    one_each = receipt.decode_tokens  # a step is kept in whole ns
    assert pace.step_ns == pytest.approx(receipt.decode_s * 1e9, rel=1e-6, abs=one_each)
    assert 0 < pace.misses <= receipt.expert_misses
    assert 0 < pace.stall_ns <= pace.step_ns


def test_replay_draws_a_plot_or_says_what_is_missing(
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot = tmp_path / "out.png"
    status, _, err = call(capsys, "trace", "replay", recorded, "--slots", "4,8", "--plot", plot)
    assert status == 1 and "headrace[bench]" in err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    status, _, _ = call(capsys, "trace", "replay", recorded, "--slots", "4,8", "--plot", plot)
    assert status == 0 and plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slots", "1"), "2 and more"),
        (("--policy", "mru"), "unknown policy"),
        (("--slots", "4", "--memory", "1GiB"), "one of them"),
        (("--memory", "1MiB"), "no room"),
    ],
)
def test_senseless_options_are_refused(
    recorded: Path, capsys: pytest.CaptureFixture[str], arguments: Any, words: str
) -> None:
    status, _, err = call(capsys, "trace", "replay", recorded, *arguments)
    assert status in (1, 2) and words in " ".join(err.replace("│", " ").split())


def test_a_ceiling_below_what_was_taken_besides_slots_says_so(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["trace", "replay", str(recorded), "--memory", "4GiB,1MiB"]) == 1
    message = capsys.readouterr().err
    assert "1 MiB leaves no room for slots: the recorded run took " in message
    assert "hint: record with `--memory`" in message


def test_a_damaged_trace_names_the_byte(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-5])
    status, _, err = call(capsys, "trace", "replay", recorded, "--slots", "4")
    assert status == 1 and "byte" in err and "--partial" in err
    status, _, err = call(capsys, "trace", "replay", recorded, "--slots", "4", "--partial")
    assert status == 1 and "no token in the trace" in err, "its one block is damaged"
    assert _run(["trace", "record", str(recorded), *QUIET]) == 1, "nothing goes behind the damage"


def test_nothing_is_recorded_behind_damage(
    recorded: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = recorded.read_bytes()[:-5]
    recorded.write_bytes(damaged)
    status, _, err = call(capsys, "trace", "record", recorded, tiny, "-n", 2, *QUIET)
    assert status == 1 and "name a new file" in err
    assert recorded.read_bytes() == damaged


@pytest.mark.skipif(sys.platform != "linux", reason="sizes of files are limited as on Linux")
def test_a_drive_that_fills_up_fails_the_recording_and_leaves_whole_blocks(
    recorded: Path, tiny: Path
) -> None:
    whole = recorded.read_bytes()
    program = (
        "import resource, sys\n"
        "from headrace.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)\n"
        "main()\n"
    )
    words = ("trace", "record", str(recorded), str(tiny), "-n", "2", *QUIET)
    done = subprocess.run(
        [sys.executable, "-c", program, str(len(whole) + 20), *words],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "the trace ends here" in done.stderr
    assert recorded.read_bytes() == whole
