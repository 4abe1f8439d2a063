"""The engine loop: one `step` takes rows of many sequences through the model and appends tokens.

    submit -> scheduler.plan_step -> model(ids, rows) -> logits -> sampler -> sequence.append

Owns the sequences and the books of KV pages. One thread at a time may call it; `llm.py` holds the
lock. Because the numeric contract makes a row's bits independent of its company, batching, chunking
and retrying a sequence alone never change a token.
"""

import operator
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from headrace import ops
from headrace.arrays import Float32, Int32
from headrace.config import ResolvedSampling
from headrace.engine import sampler
from headrace.engine.pages import PageTable
from headrace.engine.scheduler import Part, Scheduler
from headrace.engine.sequence import Sequence, State, Usage, Watcher
from headrace.errors import CheckpointError, ExpertReadError, NumericError, RequestError
from headrace.experts import ExpertStore, StepCounters
from headrace.state import PAGE_TOKENS, KVPool, StepRows

_SMALL_STEP = 16  # rows whose buffers are too small to count


class StepModel(Protocol):
    """What the loop asks of a model: score some rows of a step."""

    def __call__(
        self,
        ids: Int32,
        rows: StepRows,
        kv: KVPool,
        experts: ExpertStore | None,
        logits_rows: Int32,
    ) -> Float32:
        """Compute ids [T]; return the scores [R, V] of the rows asked for."""


class EngineLoop:
    """All sequences of one model, and the steps that move them."""

    def __init__(
        self,
        model: StepModel,
        kv: KVPool,
        experts: ExpertStore | None,
        *,
        num_pages: int,
        context: int,
        max_sequences: int,
        chunk: int,
        max_logits_rows: int,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self._model = model
        self._kv = kv
        self._experts = experts
        self._context = context
        self._pages = PageTable(num_pages, page_tokens)
        self._scheduler = Scheduler(
            self._pages, max_sequences=max_sequences, chunk=chunk, max_logits_rows=max_logits_rows
        )
        self._next_id = 0
        self._last_rows = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def num_pages_used(self) -> int:
        """KV pages held by sequences; 0 when none runs."""
        return self._pages.num_used

    def submit(
        self,
        tokens: list[int],
        params: ResolvedSampling,
        *,
        seed: int,
        stop_ids: Iterable[int] = (),
        watch: Watcher | None = None,
        score_only: bool = False,
    ) -> Sequence:
        """Queue a prompt.

        Args:
            tokens: the prompt, at least one id.
            params: how to choose.
            seed: of this sequence's draws.
            stop_ids: ids that end it.
            watch: sees each generated id; ends the sequence by returning True.
            score_only: compute the logprobs of the prompt and generate nothing.

        Raises:
            RequestError: the prompt is empty or does not fit the context.
        """
        room = self._context if score_only else self._context - 1
        if not tokens:
            raise RequestError("the prompt is empty: expected at least one token")
        if len(tokens) > room:
            raise RequestError(
                f"the prompt is longer than the context\n"
                f"expected at most {room} tokens, got {len(tokens)}\n"
                "hint: shorten the prompt, or grant a larger `--context`"
            )
        sequence = Sequence(
            id=self._next_id,
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=params,
            seed=seed,
            stop_ids=frozenset(stop_ids),
            watch=watch,
            want_prompt_logprobs=score_only,
        )
        wanted = len(tokens) if score_only else len(tokens) + params.max_tokens
        sequence.limit = min(wanted, self._context)
        self._next_id += 1
        self._scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now and give back its pages; nothing happens if it has ended."""
        if sequence.state is not State.FINISHED:
            sequence.finish("cancelled")
            self._scheduler.remove(sequence)

    def step(self) -> bool:
        """Compute one step; False when there was nothing to do."""
        parts = self._scheduler.plan_step()
        if not parts:
            return False
        try:
            self._compute(parts)
        except (CheckpointError, ExpertReadError, NumericError):
            # Somebody in this step needs what cannot be had. Alone, only the needy fail.
            for part in parts:
                self._compute_alone(part)
        for part in parts:
            if part.sequence.state is State.FINISHED:
                self._scheduler.remove(part.sequence)
        return True

    def _compute_alone(self, part: Part) -> None:
        try:
            self._compute([part])
        except (CheckpointError, ExpertReadError) as error:  # an embedding's row, or an expert
            part.sequence.finish("error", error)
        except NumericError as error:
            hint = "hint: a weight may be NaN; `headrace inspect --verify MODEL` looks for it"
            part.sequence.finish("error", NumericError(f"{error}\n{hint}"))

    def _compute(self, parts: list[Part]) -> None:
        self._trim_buffers(sum(part.num_tokens for part in parts))
        if self._experts is not None:
            self._experts.note_step(
                [(p.sequence.id, p.num_tokens, p.sequence.is_prefilling) for p in parts]
            )
        with _Meter(self._experts, parts):
            logits = self._model(
                _ids(parts), self._rows(parts), self._kv, self._experts, _logits_rows(parts)
            )
            offset = 0
            for part in parts:
                count = _num_logits(part)
                self._advance(part, logits[offset : offset + count])
                offset += count

    def _trim_buffers(self, num_rows: int) -> None:
        """Give back the buffers of a large step before one of another size makes its own.

        The pool keeps each size it was ever asked for: without this, prompts of many lengths would
        gather several times the work memory that the plan counts.
        """
        if num_rows != self._last_rows and max(num_rows, self._last_rows) > _SMALL_STEP:
            ops.pool_trim()
        self._last_rows = num_rows

    def _rows(self, parts: list[Part]) -> StepRows:
        positions: list[int] = []
        sequences: list[int] = []
        width = max(len(part.sequence.pages) for part in parts)
        table = np.zeros((len(parts), width), np.int32)
        for number, part in enumerate(parts):
            first = part.sequence.num_computed
            positions += range(first, first + part.num_tokens)
            sequences += [number] * part.num_tokens
            table[number, : len(part.sequence.pages)] = part.sequence.pages
        is_decoding = not any(part.sequence.is_prefilling for part in parts)
        return StepRows(
            np.array(positions, np.int32), np.array(sequences, np.int32), table, is_decoding
        )

    def _advance(self, part: Part, logits: Float32) -> None:
        """Take note of computed rows, then of what their logits say."""
        sequence = part.sequence
        first = sequence.num_computed
        sequence.num_computed += part.num_tokens
        self._file_pages(sequence)
        if sequence.want_prompt_logprobs:
            targets = sequence.tokens[first + 1 : sequence.num_computed + 1]
            num_top = sequence.params.logprobs or 0
            sequence.prompt_logprobs += sampler.token_logprobs(
                logits[: len(targets)], targets, num_top
            )
            if not sequence.is_prefilling:
                sequence.finish("length")
        elif not sequence.is_prefilling:
            self._choose(sequence, logits[-1])

    def _choose(self, sequence: Sequence, logits: Float32) -> None:
        try:
            sequence.append(sampler.choose(sequence, logits))
        except NumericError as error:  # its rows are computed already: nothing to try again
            sequence.finish("error", error)

    def _file_pages(self, sequence: Sequence) -> None:
        size = self._pages.page_tokens
        while (len(sequence.digests) + 1) * size <= sequence.num_computed:
            index = len(sequence.digests)
            parent = sequence.digests[-1] if sequence.digests else b""
            digest = self._pages.digest(parent, sequence.tokens[index * size : (index + 1) * size])
            sequence.digests.append(digest)
            self._pages.file(sequence.pages[index], digest)


def _ids(parts: list[Part]) -> Int32:
    return np.array(
        [token for part in parts for token in _tokens(part)],
        np.int32,
    )


def _tokens(part: Part) -> list[int]:
    first = part.sequence.num_computed
    return part.sequence.tokens[first : first + part.num_tokens]


def _num_logits(part: Part) -> int:
    """Rows whose scores matter: all when a prompt is scored, else that of the last known token."""
    if part.sequence.want_prompt_logprobs:
        return part.num_tokens
    return int(part.num_tokens == part.sequence.num_pending)


def _logits_rows(parts: list[Part]) -> Int32:
    def ranges() -> Iterator[range]:
        end = 0
        for part in parts:
            end += part.num_tokens
            yield range(end - _num_logits(part), end)

    return np.array([row for rows in ranges() for row in rows], np.int32)


class _Meter:
    """Adds the time and the expert counters of one step to each of its sequences."""

    def __init__(self, experts: ExpertStore | None, parts: list[Part]) -> None:
        self._experts = experts
        self._is_prefill = [(part.sequence.usage, part.sequence.is_prefilling) for part in parts]
        self._before: StepCounters | None = None
        self._start = 0.0

    def __enter__(self) -> None:
        self._before = self._experts.counters() if self._experts else None
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        used = None
        if self._experts is not None and self._before is not None:
            used = self._experts.counters().since(self._before)
        for usage, is_prefill in self._is_prefill:
            usage.steps += 1
            usage.shared_steps += len(self._is_prefill) > 1
            if is_prefill:
                usage.prefill_s += seconds
            else:
                usage.decode_s += seconds
            if used is not None:
                _add_counters(usage, is_prefill, used)
        if self._experts is not None and used is not None and self._decodes_only():
            self._experts.note_pace(len(self._is_prefill), seconds, used)

    def _decodes_only(self) -> bool:
        return not any(is_prefill for _, is_prefill in self._is_prefill)


def _add_counters(usage: Usage, is_prefill: bool, used: StepCounters) -> None:
    usage.expert_requests += used.requests
    usage.expert_hits += used.hits
    usage.expert_misses += used.misses
    usage.stall_ns += used.stall_ns
    usage.drive_busy_ns += used.drive_busy_ns
    usage.prefetch_bytes += used.prefetch_bytes
    before = usage.drive_bytes or (0,) * len(used.drive_bytes)
    usage.drive_bytes = tuple(map(operator.add, before, used.drive_bytes))
    usage.lookahead_named += used.lookahead_named
    usage.lookahead_wanted += used.lookahead_wanted
    usage.lookahead_right += used.lookahead_right
    usage.lookahead_unused += used.lookahead_unused
    usage.lookahead_saved_ns += used.lookahead_saved_ns
    if is_prefill:
        usage.prefill_bytes_read += used.bytes_read
    else:
        usage.decode_bytes_read += used.bytes_read
