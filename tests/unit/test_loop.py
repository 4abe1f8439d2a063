"""The loop, scheduler and pages together, on a model that notices any mix-up."""

from typing import Any

import pytest
from fake import FakeKV, FakeModel, FakeStore

from headrace.config import SamplingParams, resolve_sampling
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import Sequence, State
from headrace.errors import CheckpointError, ExpertReadError, RequestError

PAGE = 8


def make_loop(
    model: Any = None,
    *,
    chunk: int = 16,
    context: Any = 64,
    sequences: Any = 4,
    experts: Any = None,
    logits_rows: Any = 5,
) -> Any:
    num_pages = sequences * context // PAGE
    return EngineLoop(
        model or FakeModel(),
        FakeKV(num_pages, PAGE),
        experts,
        num_pages=num_pages,
        context=context,
        max_sequences=sequences,
        chunk=chunk,
        max_logits_rows=logits_rows,
        page_tokens=PAGE,
    )


def resolved(**options: Any) -> Any:
    return resolve_sampling(SamplingParams(**options), {})


def drain(loop: Any) -> None:
    while loop.step():
        pass


def generate(loop: Any, prompt: list[int], **options: Any) -> Any:
    sequence = loop.submit(prompt, resolved(**options), seed=7)
    drain(loop)
    return sequence


def answer(sequence: Sequence) -> Any:
    return sequence.tokens[sequence.num_prompt :]


PROMPTS = [list(range(1, 20)), [3, 1, 4, 1, 5], list(range(30, 0, -1)), [9]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_tokens_and_logprobs_do_not_depend_on_chunk_or_company(
    chunk: int, temperature: float
) -> None:
    options = {"temperature": temperature, "max_tokens": 12, "logprobs": 3}
    alone = [generate(make_loop(chunk=64), p, **options) for p in PROMPTS]
    loop = make_loop(chunk=chunk)
    together = [loop.submit(p, resolved(**options), seed=7) for p in PROMPTS]
    drain(loop)
    for one, other in zip(alone, together, strict=True):
        assert answer(one) == answer(other)
        assert list(one.events) == list(other.events)
    assert max(loop._model.calls) > 1


def test_chunk_bounds_the_rows_of_a_step() -> None:
    loop = make_loop(FakeModel(), chunk=7)
    generate(loop, list(range(30)), max_tokens=3)
    assert loop._model.calls == [7, 7, 7, 7, 2, 1, 1]


def test_short_prompts_share_one_chunk() -> None:
    loop = make_loop(FakeModel(), chunk=16)
    for prompt in ([1, 2, 3], [4, 5, 6], [7, 8]):
        loop.submit(prompt, resolved(max_tokens=1), seed=0)
    drain(loop)
    assert loop._model.calls == [8]


def test_decoding_goes_on_while_another_prompt_is_prefilled() -> None:
    loop = make_loop(FakeModel(), chunk=4)
    first = loop.submit([1], resolved(max_tokens=20), seed=0)
    loop.step()
    loop.submit(list(range(12)), resolved(max_tokens=1), seed=0)
    loop.step()
    assert loop._model.calls == [1, 5]
    assert first.num_generated == 2


def test_seed_reproduces_and_matters() -> None:
    def run(seed: int) -> Any:
        loop = make_loop()
        sequence = loop.submit([1, 2], resolved(temperature=1.5, max_tokens=16), seed=seed)
        drain(loop)
        return answer(sequence)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_finished_prefix_is_reused_and_changes_nothing() -> None:
    prompt = list(range(1, 28))
    loop = make_loop(FakeModel(), chunk=64)
    first = generate(loop, prompt, max_tokens=8)
    again = generate(loop, prompt, max_tokens=8)
    assert answer(first) == answer(again)
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == 24  # three full pages of 8; the last token is computed anew
    assert loop._model.calls[8] == 3


def test_prefix_of_exactly_full_pages_still_computes_one_page() -> None:
    prompt = list(range(16))
    loop = make_loop(chunk=64)
    first = generate(loop, prompt, max_tokens=4)
    again = generate(loop, prompt, max_tokens=4)
    assert again.usage.cached_tokens == 8
    assert answer(first) == answer(again)


def test_answer_pages_serve_the_next_turn() -> None:
    loop = make_loop(chunk=64)
    first = generate(loop, list(range(10)), max_tokens=20, temperature=0.0)
    turn = [*first.tokens, 5, 6, 7]
    second = generate(loop, turn, max_tokens=4, temperature=0.0)
    assert second.usage.cached_tokens == 24
    fresh = generate(make_loop(chunk=64), turn, max_tokens=4, temperature=0.0)
    assert answer(second) == answer(fresh)


def test_running_sequences_share_a_prefix() -> None:
    loop = make_loop(chunk=64)
    prompt = list(range(20))
    first = loop.submit(prompt, resolved(max_tokens=10, temperature=0.0), seed=0)
    loop.step()
    second = loop.submit(prompt, resolved(max_tokens=10, temperature=0.0), seed=0)
    loop.step()
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    drain(loop)
    assert answer(first) == answer(second)
    assert loop.num_pages_used == 0


def test_waiting_sequences_run_later_with_the_same_result() -> None:
    options = {"max_tokens": 6, "temperature": 0.0}
    loop = make_loop(sequences=1)
    queued = [loop.submit(p, resolved(**options), seed=0) for p in PROMPTS]
    loop.step()
    assert [s.state for s in queued] == [State.RUNNING] + [State.WAITING] * 3
    drain(loop)
    for prompt, sequence in zip(PROMPTS, queued, strict=True):
        assert answer(sequence) == answer(generate(make_loop(), prompt, **options))


def test_score_gives_the_logprob_of_each_prompt_token_whatever_the_chunk() -> None:
    prompt = list(range(20))

    def score(chunk: int, warm: bool) -> Any:
        loop = make_loop(chunk=chunk)
        if warm:
            generate(loop, prompt, max_tokens=2)
        sequence = loop.submit(prompt, resolved(logprobs=2), seed=0, score_only=True)
        drain(loop)
        assert loop.num_pages_used == 0
        return sequence.prompt_logprobs

    reference = score(64, warm=False)
    assert [t.id for t in reference] == prompt[1:]
    assert all(t.logprob < 0 and len(t.top) == 2 for t in reference)
    assert score(1, warm=False) == reference
    assert score(7, warm=True) == reference


def test_stop_ids_watcher_and_length_end_a_sequence() -> None:
    free = answer(generate(make_loop(), [1, 2], max_tokens=12))
    loop = make_loop()
    by_id = loop.submit([1, 2], resolved(max_tokens=12), seed=7, stop_ids=[free[4]])
    seen = []
    by_watch = loop.submit(
        [1, 2], resolved(max_tokens=12), seed=7, watch=lambda t: seen.append(t) or len(seen) == 3
    )
    drain(loop)
    assert (answer(by_id), by_id.finish_reason) == (free[: free.index(free[4]) + 1], "stop")
    assert (answer(by_watch), by_watch.finish_reason) == (free[:3], "stop")


def test_context_bounds_prompt_and_answer() -> None:
    loop = make_loop(context=32)
    sequence = generate(loop, list(range(30)), max_tokens=100)
    assert (len(sequence.tokens), sequence.finish_reason) == (32, "length")
    with pytest.raises(RequestError, match="at most 31 tokens, got 32"):
        loop.submit(list(range(32)), resolved(), seed=0)
    with pytest.raises(RequestError, match="empty"):
        loop.submit([], resolved(), seed=0)


@pytest.mark.parametrize("kind", [ExpertReadError, CheckpointError])
def test_read_error_ends_only_the_sequence_that_needed_the_record(
    kind: type[Exception],
) -> None:
    options = {"max_tokens": 6, "temperature": 0.0}
    expected = answer(generate(make_loop(), [1, 2, 3], **options))
    loop = make_loop(FakeModel(poison=31, kind=kind))
    good = loop.submit([1, 2, 3], resolved(**options), seed=0)
    bad = loop.submit([4, 31, 5], resolved(**options), seed=0)
    drain(loop)
    assert (answer(good), good.finish_reason) == (expected, "length")
    assert bad.finish_reason == "error"
    assert "expert 2" in str(bad.error)
    assert loop.num_pages_used == 0


def test_failed_pages_are_not_offered_to_others() -> None:
    model = FakeModel(poison=31)
    loop = make_loop(model, chunk=8)
    prompt = [*range(1, 12), 31, *range(12, 20)]
    assert generate(loop, prompt, max_tokens=2).finish_reason == "error"
    model.poison = None
    again = generate(loop, prompt, max_tokens=2)
    assert again.usage.cached_tokens == 8  # the first chunk was sound
    assert answer(again) == answer(generate(make_loop(), prompt, max_tokens=2))


def test_cancel_frees_pages_and_others_go_on() -> None:
    loop = make_loop()
    first = loop.submit([1, 2], resolved(max_tokens=30), seed=0)
    second = loop.submit([1, 2], resolved(max_tokens=5), seed=0)
    waiting = [loop.submit([1], resolved(max_tokens=5), seed=0) for _ in range(3)]
    loop.step()
    loop.cancel(first)
    loop.cancel(waiting[-1])
    drain(loop)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert waiting[-1].num_generated == 0
    assert loop.num_pages_used == 0


def test_usage_counts_what_the_steps_took() -> None:
    store = FakeStore()
    loop = make_loop(experts=store, chunk=4)
    sequence = generate(loop, [1, 2, 3, 4, 5, 6], max_tokens=3)
    usage = sequence.usage
    assert (usage.steps, usage.shared_steps) == (4, 0)
    assert usage.expert_requests == usage.expert_misses == 8
    assert usage.prefill_bytes_read == 6 * 4096
    assert usage.decode_bytes_read == 2 * 4096
    assert store.paced == [(1, 1), (1, 1)], "the pace is that of decoding steps alone"


@pytest.mark.parametrize(
    ("option", "first"), [("repetition_penalty", 50.0), ("presence_penalty", 100.0)]
)
def test_penalties_keep_tokens_from_coming_back(option: str, first: float) -> None:
    plain = answer(generate(make_loop(), [1], max_tokens=25, temperature=0.0))
    assert len(set(plain)) < 25
    kept = answer(generate(make_loop(), [1], max_tokens=20, temperature=0.0, **{option: first}))
    assert len(set(kept)) == 20 or option == "repetition_penalty"
    assert kept != plain


def test_broken_scores_end_only_their_own_sequence() -> None:
    class Broken(FakeModel):
        def __call__(self, ids: Any, rows: Any, kv: Any, experts: Any, logits_rows: Any) -> Any:
            logits = super().__call__(ids, rows, kv, experts, logits_rows)
            for row, t in enumerate(logits_rows):
                if ids[t] == 31:
                    logits[row] = float("nan")
            return logits

    options = {"max_tokens": 6, "temperature": 0.0}
    expected = answer(generate(make_loop(), [1, 2, 3], **options))
    loop = make_loop(Broken())
    good = [loop.submit([1, 2, 3], resolved(**options), seed=0) for _ in range(2)]
    bad = loop.submit([4, 31], resolved(**options), seed=0)
    drain(loop)
    assert [answer(s) for s in good] == [expected] * 2
    assert bad.finish_reason == "error" and bad.num_generated == 0
    assert loop.num_pages_used == 0


def test_a_scored_text_never_shares_a_step_with_a_chunk() -> None:
    model = FakeModel()
    loop = make_loop(model, chunk=16, logits_rows=5)
    first = loop.submit(list(range(20)), resolved(max_tokens=30), seed=0)
    scored = loop.submit(list(range(12)), resolved(), seed=0, score_only=True)
    last = loop.submit(list(range(9)), resolved(max_tokens=2), seed=0)
    drain(loop)
    assert model.calls[:6] == [16, 4, 6, 6, 3, 10]
    assert [s.finish_reason for s in (first, scored, last)] == ["length"] * 3
    assert len(scored.prompt_logprobs) == 11
