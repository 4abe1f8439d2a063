"""The Python interface on a tiny real model: results do not depend on how it is run."""

import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import _core, ops
from headrace.config import KV_DTYPES, EngineConfig, ExpertConfig, SamplingParams
from headrace.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    ExpertReadError,
    MemoryBudgetError,
    RequestError,
)
from headrace.experts import ExpertStore
from headrace.inspect import describe
from headrace.llm import LLM, plan_model

OFF = ExpertConfig(history="off")
PROMPTS = ["hello there, this is a prompt", "ok", "the other one " * 4]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True)


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, **{"experts": OFF, "memory": "8GiB", **options})


@pytest.fixture(scope="module")
def reference(tiny: Path) -> list[Any]:
    with open_llm(tiny) as llm:
        return [llm.generate(p, GREEDY) for p in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_alone_and_together_in_any_chunks_the_answers_are_the_same(
    tiny: Path, reference: list[Any], chunk: int
) -> None:
    with open_llm(tiny, chunk=chunk, sequences=3) as llm:
        together = llm.generate_batch(PROMPTS, GREEDY)
    for one, other in zip(reference, together, strict=True):
        assert other.ids == one.ids
        assert other.logprobs == one.logprobs
        assert other.text == one.text
    assert max(c.receipt.shared_steps for c in together) > 0


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_keys_and_values_of_every_type_answer_alike_in_any_chunks(tiny: Path, kv: str) -> None:
    found = []
    for chunk in (1, 64):
        with open_llm(tiny, chunk=chunk, sequences=3, kv=kv) as llm:
            answers = llm.generate_batch(PROMPTS, GREEDY)
            used = llm.plan.kv_bytes
        found.append([(answer.ids, answer.logprobs) for answer in answers])
        lossy = answers[0].receipt.lossy
        assert lossy == ({"kv": "q8"} if kv == "q8" else None)
        assert ("lossy: kv q8" in answers[0].receipt.lines()[-1]) == (kv == "q8")
    assert found[0] == found[1]
    exact = plan_model(tiny, EngineConfig(memory=8 << 30, sequences=3, kv="f32")).kv_bytes
    # A head of the tiny model has 16 dims, half of a group of q8: 18 bytes.
    assert used * 64 == exact * {"f32": 64, "f16": 32, "bf16": 32, "q8": 18}[kv]


def shrink(llm: LLM, slots: int) -> LLM:
    """Leave the store so few slots that it must read again and again."""
    assert llm.store is not None
    assert llm.store.resize(slots) == slots
    return llm


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=24, seed=3, top_p=0.9)])
def test_few_slots_read_more_and_say_the_same(tiny: Path, sampling: SamplingParams) -> None:
    with open_llm(tiny) as llm:
        free = llm.generate(PROMPTS[0], sampling)
    with shrink(open_llm(tiny), 5) as llm:
        tight = llm.generate(PROMPTS[0], sampling)
    assert tight.ids == free.ids
    assert tight.receipt.expert_misses > free.receipt.expert_misses
    assert tight.receipt.expert_hits + tight.receipt.expert_misses == tight.receipt.expert_requests
    assert tight.receipt.decode_bytes_read > 0
    assert tight.receipt.stall_s >= 0


def test_callers_in_several_threads_get_their_own_answers(tiny: Path, reference: list[Any]) -> None:
    answers: dict[int, Any] = {}
    with open_llm(tiny, sequences=2) as llm:

        def ask(index: int) -> None:
            answers[index] = llm.generate(PROMPTS[index % 3], GREEDY)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answers[i].ids for i in range(6)] == [reference[i % 3].ids for i in range(6)]


def test_seed_reproduces_and_is_reported(tiny: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0)
    with open_llm(tiny) as llm:
        first = llm.generate("x", params)
        again = llm.generate(
            "x", SamplingParams(max_tokens=16, temperature=1.0, seed=first.receipt.seed)
        )
        assert again.ids == first.ids
        assert llm.generate("x", params).receipt.seed != first.receipt.seed


def test_pieces_join_to_the_text_and_a_stop_string_is_never_shown(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        free = llm.generate(PROMPTS[0], GREEDY)
        stop = free.text[5:8]
        stream = llm.stream(
            PROMPTS[0], SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,))
        )
        pieces = list(stream)
        result = stream.result()
    assert "".join(pieces) == result.text == free.text[: free.text.index(stop)]
    assert result.finish_reason == "stop"
    assert not any(stop in piece for piece in pieces)
    assert len(result.ids) < len(free.ids)


def test_leaving_a_stream_frees_its_pages(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        stream = llm.stream("hello", GREEDY)
        for _ in stream:
            break
        assert stream.result().finish_reason == "cancelled"
        assert llm._loop.num_pages_used == 0
        assert not llm._loop.has_work


def test_a_stream_that_is_dropped_is_not_computed(tiny: Path, reference: list[Any]) -> None:
    with open_llm(tiny, sequences=2) as llm:
        llm.stream(PROMPTS[1], GREEDY)  # nobody holds it
        stream = llm.stream(PROMPTS[1], GREEDY)
        stream.advance()
        del stream
        answer = llm.generate(PROMPTS[0], GREEDY)
        assert answer.ids == reference[0].ids
        assert answer.receipt.shared_steps == 0
        assert not llm._loop.has_work and llm._loop.num_pages_used == 0


def test_generation_fields_that_are_not_obeyed_are_named_once(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    fields = {"no_repeat_ngram_size": 3, "num_beams": 4, "max_length": 20}
    (model / "generation_config.json").write_text(json.dumps(fields))
    with open_llm(model) as llm:
        llm.generate("hello", GREEDY)
        llm.generate("hello", GREEDY)
    said = [r.getMessage() for r in caplog.records if "generation_config.json" in r.getMessage()]
    assert len(said) == 1
    assert "no_repeat_ngram_size = 3, num_beams = 4\n" in said[0] and "max_length" not in said[0]


def test_a_weight_that_is_not_finite_is_named_where_it_lies(tiny: Path, tmp_path: Path) -> None:
    from headrace.inspect import open_model

    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    _, checkpoint = open_model(model)
    table = checkpoint.records
    assert table is not None
    last, size = len(table.layers) - 1, {"f32": 4}.get(str(table.repack), 2)
    bits = {"bf16": 0x7FC0, "f16": 0x7E00, "f32": 0x7FC00000}[str(table.repack)]
    for expert in range(table.num_experts):  # of the last layer: no router follows
        path, at = table.files[table.file[last, expert, 2]], int(table.offset[last, expert, 2])
        with path.open("r+b") as file:
            file.seek(at + 5 * size)
            file.write(bits.to_bytes(size, "little"))
    with open_llm(model) as llm:
        answer = llm.generate("hello", GREEDY)
    assert answer.finish_reason == "error" and answer.error is not None
    assert f"layer {table.layers[last]}, expert " in answer.error
    assert "matrix down" in answer.error and "offset" in answer.error


def test_eos_ends_an_answer_unless_ignored(tiny: Path, reference: list[Any]) -> None:
    end = reference[0].ids[6]
    with open_llm(tiny) as llm:
        llm.generation_config = {"eos_token_id": [end]}
        ended = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, temperature=0.0))
        first = reference[0].ids.index(end)
        assert ended.ids == reference[0].ids[: first + 1]
        assert ended.finish_reason == "stop"
        assert llm.generate(PROMPTS[0], GREEDY).ids == reference[0].ids


def test_second_turn_reuses_the_first(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        first = llm.generate("a" * 70, SamplingParams(max_tokens=8, temperature=0.0))
        assert first.receipt.cached_tokens == 0
        again = llm.generate("a" * 70, SamplingParams(max_tokens=8, temperature=0.0))
    assert again.receipt.cached_tokens == 64
    assert again.ids == first.ids


def test_score_matches_what_generating_said(tiny: Path, reference: list[Any]) -> None:
    with open_llm(tiny) as llm:
        prompt = llm.tokenizer.encode(PROMPTS[0])
        score = llm.score([*prompt, *reference[0].ids])
    given = [entry.logprob for entry in score.logprobs[len(prompt) :] if entry is not None]
    assert given == [entry.logprob for entry in reference[0].logprobs]
    assert score.logprobs[0] is None
    assert score.total < 0


def test_receipt_adds_up(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        shrink(llm, 5)
        receipt = llm.generate(PROMPTS[0], GREEDY).receipt
    assert receipt.decode_tokens == receipt.completion_tokens - 1 == 23
    assert receipt.bytes_read == receipt.prefill_bytes_read + receipt.decode_bytes_read
    assert receipt.peak_memory_bytes > 0
    assert receipt.memory_ceiling_bytes == 8 << 30
    assert receipt.lossy is None
    assert receipt.read_mode in ("direct", "buffered")


def test_read_error_ends_the_answer_and_not_the_engine(tiny: Path, reference: list[Any]) -> None:
    with shrink(open_llm(tiny), 5) as llm:
        _core.inject_fault("eio", after=0, count=1000, path_contains="safetensors")
        try:
            broken = llm.generate(PROMPTS[0], GREEDY)
            with pytest.raises(ExpertReadError, match="layer"):
                llm.score("some other text")
        finally:
            _core.clear_faults()
        assert broken.finish_reason == "error"
        assert broken.error is not None and "expert" in broken.error
        assert llm._loop.num_pages_used == 0
        assert llm.generate(PROMPTS[0], GREEDY).ids == reference[0].ids


def test_an_embedding_that_cannot_be_read_ends_the_answer(tiny: Path, reference: list[Any]) -> None:
    with open_llm(tiny, embedding="drive") as llm:
        llm.generate(PROMPTS[0], GREEDY)  # every expert asked for has its slot now
        _core.inject_fault("eio", after=0, count=-1, path_contains="safetensors")
        try:
            broken = llm.generate(PROMPTS[0], GREEDY)
        finally:
            _core.clear_faults()
        assert broken.finish_reason == "error"
        assert broken.error is not None and "cannot be read" in broken.error
        assert llm.generate(PROMPTS[0], GREEDY).ids == reference[0].ids


def test_bad_requests_are_named(tiny: Path) -> None:
    with open_llm(tiny, context=32) as llm:
        with pytest.raises(RequestError, match="at most 31 tokens, got 100"):
            llm.generate("a" * 100)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            llm.generate([5000])
        with pytest.raises(RequestError, match="empty"):
            llm.generate("")
        for wrong in ([1.5], ["a"], None, b"ok"):
            with pytest.raises(RequestError, match="neither text nor"):
                llm.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="prompts are not a list"):
            llm.generate_batch("three prompts?")
        for params in ({"max_tokens": 3}, 3):
            with pytest.raises(ConfigError, match="no SamplingParams"):
                llm.generate("ok", params)  # type: ignore[arg-type]
        for messages in ("hello", ["hello"], None):
            with pytest.raises(RequestError, match="messages are not"):
                llm.chat(messages)  # type: ignore[arg-type]
        assert llm.generate("ok", GREEDY).finish_reason == "length"
    with pytest.raises(RequestError, match="closed"):
        llm.generate("ok")


def test_what_is_no_model_and_no_config_is_named(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model: None"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no EngineConfig\ngot \{'memory': '2GiB'\}"):
        LLM(tiny, {"memory": "2GiB"})  # type: ignore[arg-type]


def test_a_fork_is_refused_and_leaves_and_opens_its_own(tiny: Path) -> None:
    with open_llm(tiny, embedding="drive") as llm:
        expected = llm.generate(PROMPTS[0], GREEDY).ids

        def child() -> None:
            with pytest.raises(RequestError, match="opened by process"):
                llm.generate(PROMPTS[0], GREEDY)
            with pytest.raises(RequestError, match="opened by process"):
                llm.score(PROMPTS[0])
            llm.close()
            with open_llm(tiny) as own:
                assert own.generate(PROMPTS[0], GREEDY).ids == expected
            # What a process takes down when it ends: objects that own threads it does not have.
            del llm.store, llm._loop

        assert in_a_fork(child) == 0
        assert llm.generate(PROMPTS[0], GREEDY).ids == expected


def in_a_fork(work: Callable[[], None]) -> int:
    """Run `work` in a fork of this process; return how it ended, 0 if well."""
    process = os.fork()
    if process == 0:
        signal.alarm(60)  # a hang ends, too
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1]


def test_chat_uses_the_template_or_continues_the_text(
    tiny: Path, tiny_chat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "hi<|end|>"}]
    with open_llm(tiny_chat) as llm:
        ids = llm.tokenizer.encode_chat(messages)
        assert llm.chat(messages, GREEDY).ids == llm.generate(ids, GREEDY).ids
        assert ids.count(2) == 1
        assert not caplog.records
    with open_llm(tiny) as llm:
        assert llm.chat(messages, GREEDY).ids == llm.generate("hi<|end|>", GREEDY).ids
        llm.chat(messages, GREEDY)
    assert [r.message for r in caplog.records] == [
        "this model has no chat template: it continues the text as it stands"
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited five seconds for nothing")


def test_a_model_that_fits_is_read_whole_without_being_asked(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        assert llm.store is not None
        assert llm.plan.is_resident
        store, records = llm.store, llm.plan.num_records
        wait_for(lambda: store.stats().prefetch_bytes >= records * store.record_bytes)
        receipt = llm.generate(PROMPTS[0], GREEDY).receipt
    assert receipt.expert_misses == 0 < receipt.expert_hits


def test_history_is_written_and_warms_the_next_start(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertStore, "warm_all", lambda store: None)  # as where not all fits
    path = tmp_path / "history.json"
    options = ExpertConfig(history="write", history_path=path)
    with LLM(tiny, memory="8GiB", experts=options) as llm:
        cold = llm.generate(PROMPTS[0], GREEDY).receipt
    assert path.exists()
    with LLM(tiny, memory="8GiB", experts=ExpertConfig(history="read", history_path=path)) as llm:
        assert llm.store is not None
        store = llm.store
        wait_for(lambda: store.stats().prefetch_bytes > 0)  # warming goes on in the background
        warmed = llm.generate(PROMPTS[0], GREEDY).receipt
        assert llm.store.stats().prefetch_hits > 0
    assert warmed.expert_misses < cold.expert_misses


def test_what_cannot_be_is_refused_at_the_door(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="dense weights"):
        LLM(tiny, memory="20MiB")
    with pytest.raises(ConfigError, match="unknown option `memroy`"):
        LLM(tiny, memroy="2GiB")
    with pytest.raises(ConfigError, match="at most 128 tokens"):
        LLM(tiny, context=4096)
    with pytest.raises(CheckpointError, match="no such model"):
        LLM(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="run `headrace pull owner/name`"):
        LLM("owner/name")


def damaged(tiny: Path, folder: Path, shard: str, change: Any) -> Path:
    """A copy of the tiny checkpoint whose header of one shard `change` has edited."""
    shutil.copytree(tiny, folder)
    data = (folder / shard).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    (folder / shard).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [48, 120]}, "wrong shape"),
        ({"shape": [5760]}, "wrong shape"),
        ({"dtype": "I16"}, "dtype I16"),
    ],
)
def test_headers_that_do_not_fit_the_config_are_refused_before_anything_is_planned(
    tiny: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shard = "model-00001-of-00002.safetensors"
    path = damaged(tiny, tmp_path / "bad", shard, lambda h: h["lm_head.weight"].update(change))
    for attempt in (
        lambda: plan_model(path, EngineConfig()),
        lambda: describe(path),
        lambda: LLM(path),
    ):
        with pytest.raises(EngineError, match=f"(?s)({message}.*lm_head|lm_head.*{message})"):
            attempt()


@pytest.mark.parametrize("wrong", ['"x"', "[[1]]", "-1", "true", "{}"])
def test_end_ids_that_are_no_ids_are_refused_at_start(
    tiny: Path, tmp_path: Path, wrong: str
) -> None:
    shutil.copytree(tiny, tmp_path / "bad")
    (tmp_path / "bad" / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        LLM(tmp_path / "bad")


def test_public_names_are_there_and_no_others() -> None:
    import headrace

    for name in headrace.__all__:
        assert getattr(headrace, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute `nosuch`"):
        _ = headrace.nosuch


def test_buffers_do_not_gather_over_prompts_of_many_lengths(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        ops.pool_trim()
        llm.generate("a" * 120, SamplingParams(max_tokens=2))
        for length in range(120, 17, -1):
            llm.generate("b" * length, SamplingParams(max_tokens=1))
            assert ops.pool_bytes() <= llm.plan.work_bytes


def test_a_bad_prompt_in_a_batch_leaves_nothing_behind(tiny: Path) -> None:
    with open_llm(tiny) as llm:
        with pytest.raises(RequestError, match="longer than the context"):
            llm.generate_batch(["fine", "a" * 500], GREEDY)
        assert not llm._loop.has_work


@pytest.mark.parametrize(
    ("quota", "asked", "expected"), [(0.5, "auto", 1), (9e9, "auto", 2), (0.5, 2, 2)]
)
def test_threads_follow_the_quota_of_a_container(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, quota: float, asked: Any, expected: int
) -> None:
    monkeypatch.setattr("headrace.llm.processor_quota", lambda: quota)
    before = ops.num_threads()
    ops.set_threads(2)
    try:
        with open_llm(tiny, threads=asked) as llm:
            assert llm.generate("ok", GREEDY).receipt.threads == expected
    finally:
        ops.set_threads(before)
