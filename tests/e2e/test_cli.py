"""The commands, as a user types them: what they print where, and how they exit."""

import importlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_model

import headrace.llm
from headrace.cli.app import COMMANDS, _run
from headrace.cli.run import DEMO_PROMPT
from headrace.engine.loop import EngineLoop
from headrace.errors import ExpertReadError

QUIET = ("--history", "off", "--memory", "4GiB")
RECEIPT_KEYS = {
    "prompt_tokens", "prefill_s", "decode_tokens", "decode_s", "decode_tokens_per_s",
    "expert_requests", "expert_hits", "expert_misses", "bytes_read", "bytes_read_per_token",
    "drive_bytes_per_s", "stall_s", "peak_memory_bytes", "memory_ceiling_bytes", "read_mode",
    "lossy",
}  # fmt: skip


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Result:
        status = _run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    return put


def test_words_without_quotes_get_a_hint(cli: Any) -> None:
    result = cli("run", "Once", "upon", "a", "time")
    assert result.status == 2
    assert "quotes" in result.err


def test_run_streams_text_and_tells_the_cost_on_stderr(cli: Any, tiny: Path) -> None:
    result = cli("run", tiny, "hello", "-n", 8, "--temperature", 0, *QUIET)
    assert result.status == 0
    assert len(result.out) > 8 and result.out.endswith("\n")
    assert "raw prompt" in result.err and "tok/s" in result.err and "memory peak" in result.err


def test_run_json_is_one_object_and_nothing_else(cli: Any, tiny: Path) -> None:
    plain = cli("run", tiny, "hello", "-n", 8, "--temperature", 0, *QUIET)
    result = cli("run", tiny, "hello", "-n", 8, "--temperature", 0, "--json", *QUIET)
    report = json.loads(result.out)
    assert list(report) == ["model", "text", "ids", "finish_reason", "receipt"]
    assert report["text"] + "\n" == plain.out
    assert len(report["ids"]) == 8 and report["finish_reason"] == "length"
    assert set(report["receipt"]) >= RECEIPT_KEYS
    assert report["receipt"]["lossy"] is None
    assert report["receipt"]["memory_ceiling_bytes"] == 4 << 30


def test_words_that_are_no_model_are_a_prompt_for_the_demo(
    cli: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.llm, "__file__", str(tmp_path / "llm.py"))
    missing = cli("run", "Once upon a time", *QUIET)
    assert missing.status == 1
    assert "holds no demo model" in missing.err and "Traceback" not in missing.err
    (tmp_path / "demo").symlink_to(tiny)
    told = cli("run", "Once upon", "--json", "-n", 2, *QUIET)
    assert json.loads(told.out)["model"] == "demo"
    assert json.loads(told.out)["receipt"]["prompt_tokens"] == 9
    assert "no MODEL is named: a prompt for the demo" in told.err
    alone = json.loads(cli("run", "--json", "-n", 2, *QUIET).out)
    asked = json.loads(cli("run", DEMO_PROMPT, "--json", "-n", 2, *QUIET).out)
    assert alone["receipt"]["prompt_tokens"] == asked["receipt"]["prompt_tokens"] > 15
    only_model = json.loads(cli("run", tiny, "--json", "-n", 2, *QUIET).out)
    assert only_model["receipt"]["prompt_tokens"] == 15  # "Once upon a time"


@pytest.mark.parametrize(
    "word", ["qwen3-30b", "hello", "model.gguf", "./missing", "~/of nobody", "owner/name"]
)
def test_a_word_alone_is_a_model_and_never_quietly_a_prompt(
    cli: Any, word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path))
    result = cli("run", word, *QUIET)
    assert result.status == 1 and result.out == ""
    assert f"no such model: {word}\nexpected a directory" in result.err
    assert "if it is a prompt, `headrace run demo PROMPT`" in result.err
    assert ("headrace pull owner/name" in result.err) == (word == "owner/name")
    assert cli("run", "demo", word, "-n", 1, *QUIET).status == 0


def test_a_folder_with_a_space_in_its_name_is_a_model(
    cli: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    assert json.loads(cli("run", "my model", "--json", "-n", 1, *QUIET).out)["model"] == "my model"


def test_an_answer_that_a_limit_cut_says_so(
    cli: Any, feed: Any, tiny: Path, tiny_chat: Path
) -> None:
    cut = cli("run", tiny, "hello", "-n", 8, "--ignore-eos", *QUIET).err
    assert "the answer was cut after 8 tokens: --max-tokens" in cut
    full = cli("run", tiny, "hello", "--context", 16, "--ignore-eos", *QUIET).err
    assert re.search(r"cut after \d+ tokens: the context is full: --context", full)
    feed("hello\n/reset\n/system be brief\n/system\n")
    said = cli("chat", tiny_chat, "-n", 3, "--ignore-eos", *QUIET).err
    assert "cut after 3 tokens" in said and said.count("a new conversation; ") == 3
    assert said.count("the system message stays") == 1


def test_a_dash_reads_the_prompt_from_stdin(cli: Any, feed: Any, tiny: Path) -> None:
    feed("hello")
    result = cli("run", tiny, "-", "-n", 8, "--temperature", 0, *QUIET)
    assert result.out == cli("run", tiny, "hello", "-n", 8, "--temperature", 0, *QUIET).out


def test_a_chat_template_is_used_unless_raw_is_asked_for(cli: Any, tiny_chat: Path) -> None:
    chat = cli("run", tiny_chat, "hi", "-n", 4, "--json", *QUIET)
    raw = cli("run", tiny_chat, "hi", "-n", 4, "--json", "--raw", *QUIET)
    assert "chat prompt" in chat.err and "raw prompt" in raw.err
    assert json.loads(raw.out)["receipt"]["prompt_tokens"] == 1
    assert json.loads(chat.out)["receipt"]["prompt_tokens"] > 10


def test_seed_and_stop_reach_the_sampler(cli: Any, tiny: Path) -> None:
    def ask(*options: object) -> Any:
        return json.loads(cli("run", tiny, "hello", "-n", 20, "--json", *options, *QUIET).out)

    one, two = ask("--seed", 5), ask("--seed", 5)
    assert one["ids"] == two["ids"] and one["receipt"]["seed"] == 5
    stop = one["text"][3:5]
    stopped = ask("--seed", 5, "--stop", stop, "--stop", "never so")
    assert stopped["finish_reason"] == "stop"
    assert one["text"].startswith(stopped["text"]) and stop not in stopped["text"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "x", "--temprature", "1"],
        ["run", "x", "--memory", "lots"],
        ["run", "x", "--sequences", "2"],
        ["run", "x", "--context", "many"],
        ["run", "a", "b", "c"],
        ["run", "x", "--temperature", "-1"],
        ["run", "x", "-n", "0"],
        ["run", "x", "--kv", "q2"],
        ["run", "x", "--stop", ""],
        ["run", "x", "--stop", "\udcff"],
        ["run", "./\udcff", "x"],
        ["run", "caf\udce9"],
        ["convert", "x", "y", "--experts", "q5"],
        ["convert", "x", "y", "--group", "16"],
        ["convert", "x", "y", "--experts", "q8", "--group", "32"],
        ["convert", "x", "y", "--experts", "f16"],
        ["convert", "x", "y.gguf", "--experts", "q5"],
        ["convert", "x", "y.gguf", "--experts", "q4", "--group", "32"],
        ["synth", "qwen3-30b-a3b", "y", "--experts", "mxfp4", "--dense", "bf16", "--group", "64"],
        ["synth", "qwen3-30b-a3b", "y", "--format", "hf", "--experts", "q4"],
        ["synth", "qwen3-30b-a3b", "y", "--format", "hf", "--dense", "bf16"],
        ["synth", "qwen3-30b-a3b", "y", "--format", "hf", "--group", "64"],
        ["plan", "x", "--drive-bytes-per-s", "fast"],
        ["plan"],
        ["nosuch"],
    ],
)
def test_wrong_usage_exits_2(cli: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.status == 2
    assert result.out == "" and "Error" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "./missing", "x"], "no such model: ./missing"),
        (["run", "", "x"], "no such model"),
        (["run", "/" + "a" * 5000, "x"], "no such model"),
        (["run", "~nobody-here/model", "x"], "no such model"),
        (["run", "{tiny}", "x", "--memory", "20MiB"], "memory is below the floor"),
        (["run", "{tiny}", "{long}"], "longer than the context"),
        (["run", "{tiny}", "x", "--chat"], None),
        (["plan", "{tiny}", "--context", "9999"], "at most 128 tokens"),
        (["inspect", "./missing"], "no such model"),
        (["convert", "./missing", "./dest"], "no such model: missing"),
        (["run", "{notok}", "x"], "tokenizer is missing"),
    ],
)
def test_failures_are_one_message_and_status_1(
    cli: Any, tiny: Path, tmp_path: Path, arguments: list[str], message: str | None
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny.iterdir():
        if "tokenizer" not in file.name:
            (bare / file.name).symlink_to(file)
    names = {"{tiny}": str(tiny), "{long}": "a" * 500, "{notok}": str(bare)}
    result = cli(*[names.get(a, a) for a in arguments])
    if message is None:  # --chat without a template continues the text, and says so
        assert result.status == 0
        return
    assert result.status == 1
    assert result.out == ""
    assert message in result.err
    assert "Traceback" not in result.err


def test_plan_for_people_and_for_machines(cli: Any, tiny: Path) -> None:
    text = cli("plan", tiny, "--memory", "1GiB", "--context", 64).out
    assert "expert slots, 16 of 16 records" in text and "ceiling" in text
    report = json.loads(
        cli("plan", tiny, "--memory", "1GiB", "--json", "--drive-bytes-per-s", "2GB/s").out
    )
    assert report["ceiling_bytes"] == 1 << 30
    assert report["num_slots"] == report["num_records"] == 16
    assert report["predicted_tokens_per_s"] is None  # resident: the drive is no bound
    parts = ["interpreter", "dense", "embedding", "kv", "work", "readers", "margin", "slots"]
    total = sum(report[f"{part}_bytes"] for part in [*parts, "unused"])
    assert total == report["ceiling_bytes"]


def test_a_bound_by_the_drive_is_called_one(cli: Any, tiny: Path) -> None:
    floor = json.loads(cli("plan", tiny, "--json").out)["floor_bytes"]
    text = cli("plan", tiny, "--memory", floor, "--drive-bytes-per-s", "1GB/s", *QUIET[:2]).out
    assert "predicted speed: the drive alone allows " in text


def test_convert_to_gguf_tells_what_is_left_out(cli: Any, tiny: Path, tmp_path: Path) -> None:
    made = cli("convert", "demo", tmp_path / "demo.gguf")
    assert made.status == 0, made.err
    assert "in 74 tensors" in made.err and "note: layers that predict further" in made.err
    again = cli("convert", "demo", tmp_path / "demo.gguf")
    assert again.status == 1 and "destination exists" in again.err
    wide = tmp_path / "wide.gguf"
    report = json.loads(cli("convert", "demo", wide, "--dense", "f32", "--json").out)
    assert report["total_bytes"] == wide.stat().st_size
    refused = cli("convert", tiny, tmp_path / "tiny.gguf")
    assert refused.status == 1 and "llama.cpp computes no qwen3_moe with" in refused.err


def test_convert_then_inspect_then_run_the_container(cli: Any, tiny: Path, tmp_path: Path) -> None:
    dest = tmp_path / "container"
    made = cli("convert", tiny, dest, "--experts", "bf16", "--dense", "bf16", "--json")
    assert made.status == 0, made.err
    assert json.loads(made.out)["already_done"] is False
    assert (
        "complete already" in cli("convert", tiny, dest, "--experts", "bf16", "--dense", "bf16").err
    )
    report = json.loads(cli("inspect", dest, "--verify", "--json").out)
    assert report["verify"]["is_sound"] and report["kind"] == "container"
    assert "sound" in cli("inspect", dest, "--verify").out
    options = ("hello", "-n", 12, "--temperature", 0, "--json", *QUIET)
    in_place = json.loads(cli("run", tiny, *options).out)
    packed = json.loads(cli("run", dest, *options).out)
    assert packed["ids"] == in_place["ids"]  # bf16 is exact in both
    receipt = packed["receipt"]
    assert receipt["bytes_read"] == receipt["expert_misses"] * receipt["record_bytes"]
    victim = next(dest.glob("experts-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-5000] ^= 1
    victim.write_bytes(data)
    damaged = cli("inspect", dest, "--verify")
    assert damaged.status == 1 and "DAMAGED" in damaged.out and victim.name in damaged.out
    broken = cli("run", dest, *options)
    assert broken.status == 1 and "checksum" in broken.err
    assert json.loads(broken.out)["finish_reason"] == "error"


def test_chat_from_a_pipe(cli: Any, feed: Any, tiny_chat: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    feed(
        "hello\n\none \\\nmore line\n/stats\n"
        '"""several\nlines"""\n'
        f"/save {saved}\n/reset\n/system be brief\nagain\n/save {saved}.2\n"
        "/nonsense\n/help\n/exit\n"
        "never read\n"
    )
    result = cli("chat", tiny_chat, "-n", 6, "--temperature", 0, *QUIET)
    assert result.status == 0, result.err
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in messages[::2]] == ["hello", "one \nmore line", "several\nlines"]
    after = json.loads(Path(f"{saved}.2").read_text())["messages"]
    assert [m["role"] for m in after] == ["system", "user", "assistant"]
    assert "session: answers 2," in result.err
    assert "unknown command /nonsense" in result.err and "/reset" in result.err
    assert result.out.splitlines()[0] == messages[1]["content"]


def test_a_message_may_begin_with_a_slash(
    cli: Any, feed: Any, tiny_chat: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "talk.json"
    said = ["//etc", "/etc", "/", "/usr/bin:\\", "more", "//", "/exit the loop", "/reset all"]
    feed("\n".join([*said, f"/save\t{saved}", "/quit", "never read"]))
    result = cli("chat", tiny_chat, "-n", 2, "--temperature", 0, "--ignore-eos", *QUIET)
    assert result.status == 0, result.err
    messages = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["/etc", "/"]
    assert "unknown command /etc; /help lists them, and //etc is a message" in result.err
    assert "unknown command /; " in result.err and "unknown command /usr/bin:; " in result.err
    assert "/exit takes nothing; //exit begins a message" in result.err
    assert "/reset takes nothing" in result.err
    assert "//etc sends /etc" in " ".join(cli("chat", "--help").out.split())
    feed("/help\n")
    assert "//..." in cli("chat", tiny_chat, *QUIET).err


def test_chat_survives_a_message_that_is_too_long(cli: Any, feed: Any, tiny_chat: Path) -> None:
    feed("a" * 500 + "\nhi\n")
    result = cli("chat", tiny_chat, "-n", 3, *QUIET)
    assert result.status == 0
    assert "longer than the context" in result.err
    assert len(result.out.splitlines()) == 1


def test_a_failed_answer_leaves_nothing_in_the_conversation(
    cli: Any, feed: Any, tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "talk.json"
    feed(f"hello\nbroken\nagain\n/save {saved}\n")
    submit, seen = EngineLoop.submit, []

    def submitted(*args: Any, **options: Any) -> Any:
        sequence = submit(*args, **options)
        seen.append(sequence)
        if len(seen) == 2:
            sequence.finish("error", ExpertReadError("the drive is gone"))
            args[0]._scheduler.remove(sequence)
        return sequence

    monkeypatch.setattr(EngineLoop, "submit", submitted)
    result = cli("chat", tiny_chat, "-n", 3, "--temperature", 0, "--ignore-eos", *QUIET)
    assert result.status == 0 and "the drive is gone" in result.err and "ask again" in result.err
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in messages[::2]] == ["hello", "again"]
    assert all(m["content"] for m in messages)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    step = EngineLoop.step

    def slowly(loop: EngineLoop) -> bool:
        time.sleep(0.02)
        return step(loop)

    monkeypatch.setattr(EngineLoop, "step", slowly)


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    cli: Any, feed: Any, tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch)
    saved = tmp_path / "talk.json"
    feed(f"hello\nagain\n/save {saved}\n")
    loaded = threading.Event()
    submit = EngineLoop.submit

    def submitted(*args: Any, **options: Any) -> Any:
        if not loaded.is_set():
            loaded.set()
            interrupt_after(0.3)
        return submit(*args, **options)

    monkeypatch.setattr(EngineLoop, "submit", submitted)
    result = cli("chat", tiny_chat, "-n", 40, "--temperature", 0, "--ignore-eos", *QUIET)
    assert result.status == 0
    messages = json.loads(saved.read_text())["messages"]
    assert len(messages) == 4
    assert 0 < len(messages[1]["content"]) < 40 <= len(messages[3]["content"])


def test_ctrl_c_in_run_exits_130_with_what_there_is(
    cli: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch)
    submit = EngineLoop.submit

    def submitted(*args: Any, **options: Any) -> Any:
        interrupt_after(0.3)
        return submit(*args, **options)

    monkeypatch.setattr(EngineLoop, "submit", submitted)
    result = cli("run", tiny, "hello", "-n", 100, "--ignore-eos", *QUIET)
    assert result.status == 130
    assert "tok/s" in result.err


def test_ctrl_c_while_loading_is_quiet() -> None:
    code = "import sys, headrace.cli.run as r; r.DEFAULT_PROMPT;\n"
    code += "import headrace.llm as l\n"
    code += "def wait(*a, **k):\n print('loading', flush=True); import time; time.sleep(60)\n"
    code += "l.LLM.__init__ = wait\nfrom headrace.cli import main\n"
    code += "sys.argv = ['headrace', 'run', 'demo']\nmain()"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "loading\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "")


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_told_to_end_it_leaves_no_scratch_file(tmp_path: Path, name: str) -> None:
    heed = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)"  # under nohup, too
    program = f"{heed}; from headrace.cli import main; main()"
    words = ("bench", "disk", str(tmp_path), "--max-read", "64MiB", "--record", "64KiB")
    command = [sys.executable, "-c", program, *words, "--windows", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while child.poll() is None and not any(tmp_path.iterdir()):
            time.sleep(0.001)
        child.send_signal(getattr(signal, name))
        _, err = child.communicate(timeout=30)
    assert child.returncode == 128 + getattr(signal, name), err
    assert not any(tmp_path.iterdir())


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "headrace"]
    version = subprocess.run([*command, "--version"], capture_output=True, check=False, text=True)
    assert version.returncode == 0 and version.stdout.startswith("headrace ")
    wrong = subprocess.run([*command, "nosuch"], capture_output=True, check=False, text=True)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


def test_a_closed_pipe_is_no_traceback(tiny: Path) -> None:
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "run", str(tiny)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command, "hello", *QUIET], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    err = done.stderr.decode()
    assert done.returncode == 1
    assert "Traceback" not in err and "Exception" not in err


def test_an_unforeseen_failure_is_a_message_unless_debugging(
    cli: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineLoop, "step", lambda loop: 1 // 0)
    result = cli("run", tiny, "x", *QUIET)
    assert result.status == 1
    assert "unexpected ZeroDivisionError" in result.err and "HEADRACE_DEBUG" in result.err
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli("run", tiny, "x", *QUIET)


def test_isa_from_the_environment(cli: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ISA", "scalar")
    report = json.loads(cli("run", tiny, "x", "-n", 2, "--json", *QUIET).out)
    assert report["receipt"]["isa"] == "scalar"
    monkeypatch.setenv("HEADRACE_ISA", "mmx")
    refused = cli("run", tiny, "x", *QUIET)
    assert refused.status == 2 and "option `isa` is out of range" in refused.err


def test_plan_names_no_floor_at_which_run_refuses(cli: Any, tiny: Path) -> None:
    refused = cli("plan", tiny, "--memory", "1MiB")
    floor = re.search(r"needed ([\d.]+) MiB", refused.err)
    assert floor is not None
    program = "from headrace.cli import main; main()"
    command = [sys.executable, "-c", program, "run", str(tiny), "x", "-n", "2", "--history", "off"]
    command += ["--memory", f"{floor[1]}MiB"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr


def test_only_kv_stands_apart_from_what_never_changes_a_token(cli: Any) -> None:
    text = cli("run", "--help").out
    never = text.index("never change a token")
    panel = text[never : text.index("\n\n", never)]
    assert "--readers" in panel and "--kv" not in panel and "--kv" in text


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_failure(tiny: Path, closed: str) -> None:
    program = "from headrace.cli import main; main()"
    words = [sys.executable, "-c", program, "run", str(tiny), "x", "-n", "2", *QUIET]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr
    assert bool(done.stdout) == (closed != ">&-")


HEAVY = {"numpy", "tokenizers", "jinja2", "headrace._core", "prompt_toolkit", "headrace.llm"}


@pytest.mark.parametrize(
    ("words", "heavy", "expected"),
    [
        (["run", "--help"], HEAVY, "--repetition-penalty"),
        # The list of all commands loads none of them: each would cost its options.
        (["--help"], HEAVY | {"rich", "headrace.config", "headrace.cli.run"}, "synth"),
        (["--version"], HEAVY | {"rich", "headrace.config", "headrace.cli.run"}, "headrace "),
    ],
)
def test_help_and_version_need_no_heavy_import(
    words: list[str], heavy: set[str], expected: str
) -> None:
    code = (
        f"import sys\nfrom headrace.cli.app import _run\nassert _run({words}) == 0\n"
        f"loaded = {heavy} & set(sys.modules)\nassert not loaded, loaded"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_help_of_every_command_is_whole_in_80_columns(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [[name] for name in COMMANDS]
    names += [["bench", "disk"], ["mirror", "stage"], ["trace", "record"], ["trace", "replay"]]
    for words in [[], *names]:
        text = cli(*words, "--help").out
        assert max(map(len, text.splitlines())) <= 80
        assert "\u2026" not in text and "..." not in text.replace("]...", "")
    text = cli("run", "--help").out
    assert "--cache-aware-routing <float>" in text and "--repetition-penalty <float>" in text


def test_the_list_of_commands_says_what_each_command_says_of_itself() -> None:
    for name, line in COMMANDS.items():
        module = importlib.import_module(f"headrace.cli.{name}")
        text = module.app.info.help if hasattr(module, "app") else inspect.getdoc(module.command)
        assert text.splitlines()[0] == line


def test_loading_is_said_before_it_keeps_other_threads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    from headrace.cli.wait import loading

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with loading("model"):
        assert "loading model" in terminal.getvalue()  # by no thread of its own


def test_the_terminal_reader_knows_its_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from headrace.cli.chat import _terminal_reader

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = _terminal_reader()
        keys.send_text("one\x1b\rtwo\r")  # Alt-Enter breaks the line
        assert read(False) == "one\ntwo"
        keys.send_text("thrown away\x03kept\r")  # Ctrl-C clears it
        assert read(False) == "kept"
        keys.send_text("\x04")
        assert read(False) is None
    assert "+one" in (tmp_path / "headrace" / "chat-history").read_text()


def test_synth_makes_a_model_that_runs(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.synth import SHAPES

    small = replace(
        SHAPES["qwen3-30b-a3b"], hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, vocab_size=512,
    )  # fmt: skip
    monkeypatch.setitem(SHAPES, "small", small)
    dest = tmp_path / "small"
    made = cli("synth", "small", dest, "--layers", 2, "--group", 32)
    assert made.status == 0, made.err
    assert "complete already" in cli("synth", "small", dest, "--layers", 2, "--group", 32).err
    report = json.loads(cli("run", dest, "-n", 4, "--temperature", 0, "--json", *QUIET).out)
    assert len(report["ids"]) == 4
    for arguments, message in [
        (["nosuch", dest], "unknown shape"),
        (["gpt-oss-120b", dest], "no model here computes"),
        (["small", dest, "--layers", 100], "number of layers"),
        (["small", dest, "--format", "gguf"], "unknown format"),
        (["small", dest, "--experts", "q5"], "unknown value for experts"),
        (["small", dest, "--seed", -1], "seed is negative"),
        (["small", dest, "--skew", 11], "skew is out of range"),
        (["small", dest, "--layers", 1], "expected"),
    ]:
        failed = cli("synth", *arguments)
        is_refused_later = arguments[0] == "gpt-oss-120b" or message == "expected"
        assert failed.status == (1 if is_refused_later else 2), failed.err
        assert message in " ".join(failed.err.replace("\u2502", " ").split())


def test_the_ceiling_holds_and_changes_no_token(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.synth import SHAPES

    shape = replace(
        SHAPES["qwen3-30b-a3b"], hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512,
        vocab_size=2048,
    )  # fmt: skip
    monkeypatch.setitem(SHAPES, "mid", shape)
    model = tmp_path / "mid"
    assert cli("synth", "mid", model, "--layers", 6).status == 0
    plan = json.loads(cli("plan", model, "--memory", "1GiB", "--context", 256, "--json").out)
    ceiling = plan["floor_bytes"] + (24 << 20)
    assert plan["num_records"] * plan["record_bytes"] > 64 << 20  # the experts do not fit
    prompt = " ".join(str(i) for i in range(40))

    def run(memory: int, *more: str) -> Any:
        command = [sys.executable, "-c", "from headrace.cli import main; main()", "run", str(model)]
        options = ["--raw", "--history", "off", "--context", "256", "--memory", str(memory)]
        options += ["-n", "32", "--temperature", "0", "--ignore-eos", "--json", *more]
        done = subprocess.run([*command, prompt, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    tight, roomy = run(ceiling), run(1 << 30)
    receipt = tight["receipt"]
    assert receipt["peak_memory_bytes"] <= ceiling
    assert 0 < receipt["num_slots"] < plan["num_records"] // 2
    assert receipt["bytes_read"] == receipt["expert_misses"] * receipt["record_bytes"]
    assert receipt["expert_misses"] > roomy["receipt"]["expert_misses"]
    assert roomy["receipt"]["num_slots"] == plan["num_records"]
    assert tight["ids"] == roomy["ids"]

    mirror = tmp_path / "mirror"
    rates = ("--rates", "1GB/s,1GB/s")
    assert cli("mirror", "stage", model, "--drive", mirror, *rates).status == 0
    for more in (
        ("--lookahead", "off"), ("--lookahead", "auto", "--read-ahead", "64"), ("--readers", "8"),
        ("--threads", "4"), ("--kv", "f32"), ("--chunk", "16"), ("--policy", "frequency"),
        ("--drive", str(mirror)), ("--profile", "--trace", str(tmp_path / "a.hrt")),
    ):  # fmt: skip
        planned = () if "--profile" in more else more
        asked = cli("plan", model, "--memory", "1GiB", "--context", 256, "--json", *planned)
        ceiling = json.loads(asked.out)["floor_bytes"] + (24 << 20)
        other = run(ceiling, *more)
        assert other["receipt"]["peak_memory_bytes"] <= ceiling, more
        assert 0 < other["receipt"]["num_slots"] < plan["num_records"], more
        assert more[0] == "--kv" or other["ids"] == tight["ids"], more


def test_mirror_and_drives(cli: Any, tiny: Path, tmp_path: Path) -> None:
    model, drive = tmp_path / "model", tmp_path / "drive"
    cli("convert", tiny, model, "--experts", "q8")
    options = ("--drive", drive, "--rates", "1GB/s,1GB/s")
    planned = json.loads(cli("mirror", "plan", model, *options, "--json").out)
    assert planned["wanted_share"] == 0.5 and 0 < planned["num_chosen"] < planned["num_records"]
    assert not drive.exists()
    assert "copies of" in cli("mirror", "plan", model, *options).out
    assert "copied" in cli("mirror", "stage", model, *options).out
    checked = json.loads(cli("mirror", "verify", model, "--drive", drive, "--json").out)
    assert checked == {"good": planned["num_chosen"], "missing": 0, "problems": []}
    asked = (model, "hello", "-n", 8, "--temperature", 0, "--json", *QUIET)
    alone, both = (json.loads(cli("run", *asked, *more).out) for more in ((), ("--drive", drive)))
    assert alone["ids"] == both["ids"]
    assert [one["path"] for one in both["receipt"]["drives"]] == [str(model), str(drive)]
    refused = cli("run", tiny, "hello", "--drive", drive, *QUIET)
    assert refused.status == 1 and "convert" in refused.err
    small = ("--drive", tmp_path / "small", *options[2:], "--budget", "1KiB")
    none = cli("mirror", "stage", model, *small).out
    assert "no record has room" in none and "use it" not in none
    wrong = cli("mirror", "plan", model, "--drive", drive, "--rates", "1GB/s")
    assert wrong.status == 2
    (drive / "experts-000.safetensors").unlink(missing_ok=True)
    assert cli("mirror", "verify", model, "--drive", drive).status == 1


def test_reports_on_a_dense_gguf_file(cli: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "dense.gguf", "qwen3", "Q8_0")
    assert f"{model}: GGUF file" in cli("inspect", model).out
    assert "headers sound\n" in cli("doctor", model).out
    refused = cli("mirror", "plan", model, "--drive", tmp_path / "drive")
    assert refused.status == 1 and "no experts to copy" in refused.err
    assert "convert" not in refused.err


def test_every_locale_reads_and_writes_utf8() -> None:
    """Answers hold every character: an encoding that has few of them must not end a run."""
    program = "from headrace.cli import main; main()"
    wild = ("--temperature", "100", "--top-p", "1", "--top-k", "0", "--ignore-eos", "--json")
    command = [sys.executable, "-c", program, "run", "demo", "-", "-n", "400"]
    command += ["--seed", "1", *wild, *QUIET]

    def run(prompt: bytes, **locale: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, **locale}
        return subprocess.run(
            command, input=prompt, capture_output=True, check=False, env=environment
        )

    prompt = "\u00e9\u4e2d".encode()
    narrow = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    expected = run(prompt, PYTHONUTF8="1")
    assert not json.loads(expected.stdout)["text"].isascii()
    for locale in (narrow, {"PYTHONIOENCODING": "latin-1"}):
        got = run(prompt, **locale)
        assert got.returncode == 0, got.stderr
        assert json.loads(got.stdout)["ids"] == json.loads(expected.stdout)["ids"]
    for locale in (narrow, {"PYTHONIOENCODING": "utf-8:strict"}):
        refused = run(b"\xff", **locale)
        assert refused.returncode == 1
        assert b"not valid Unicode: lone surrogate at character 0" in refused.stderr


def test_an_argument_that_the_locale_cannot_read_is_utf8(tiny: Path) -> None:
    program = "from headrace.cli import main; main()"
    narrow = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, "run", str(tiny)]
    ids = []
    for locale in ({"PYTHONUTF8": "1"}, narrow):
        done = subprocess.run(
            [*command, "\u00e9".encode(), "-n", "2", "--seed", "1", "--json", *QUIET],
            capture_output=True, check=False, env={**os.environ, **locale},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ids.append(json.loads(done.stdout)["ids"])
    assert ids[0] == ids[1]


def test_the_mark_of_a_file_of_text_is_no_part_of_the_prompt(tiny: Path) -> None:
    program = "from headrace.cli import main; main()"
    command = [sys.executable, "-c", program, "run", str(tiny), "-", "-n", "1", "--json", *QUIET]
    counts = []
    for start in (b"", b"\xef\xbb\xbf"):
        done = subprocess.run(command, input=start + b"one", capture_output=True, check=True)
        counts.append(json.loads(done.stdout)["receipt"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_a_terminal_without_a_size_shows_what_others_do(tiny: Path) -> None:
    program = "from headrace.cli import main; main()"
    environment = {**os.environ, "COLUMNS": "0"}
    words = ("run", str(tiny), "x", "-n", "2", *QUIET)
    for arguments, shown in ((words, "memory peak"), (("run", "--help"), "--readers")):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, check=True, text=True, env=environment,
        )  # fmt: skip
        assert shown in done.stdout + done.stderr


def test_a_report_into_a_pipe_keeps_its_lines(tiny: Path, tmp_path: Path) -> None:
    link = tmp_path / ("long" * 40)
    link.symlink_to(tiny)
    program = "from headrace.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", str(link), *QUIET],
        capture_output=True, check=True, text=True, env={**os.environ, "COLUMNS": "20"},
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == f"memory of {link}"
    assert "\u2026" not in done.stdout
