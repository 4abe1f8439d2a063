"""The composition root and the Python interface: a checkpoint becomes an `LLM` that answers.

Owns the model, the expert store, the engine loop and the one lock around them. It prints nothing;
what a front end does, a caller of `LLM` can do.
"""

import logging
import math
import operator
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from headrace import ops
from headrace.checkpoint import Checkpoint
from headrace.config import (
    EngineConfig,
    ResolvedSampling,
    SamplingParams,
    ignored_generation_fields,
    make_engine_config,
    resolve_sampling,
)
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.engine.sequence import State, TokenLogprob
from headrace.errors import CheckpointError, ConfigError, RequestError
from headrace.experts import ExpertStore, History, StoreStats
from headrace.experts.forecast import make_forecast
from headrace.experts.history import default_path
from headrace.experts.reading import Reading, observe_run, resolve_reading
from headrace.experts.repack import measure_repack
from headrace.experts.spread import expected_reads, sum_bytes_per_s
from headrace.hub import find_pulled, is_hub_id
from headrace.inspect import open_model
from headrace.metrics import (
    Receipt,
    available_memory_bytes,
    huge_pages_bytes,
    locked_bytes,
    peak_memory_bytes,
    processor_quota,
    resident_bytes,
)
from headrace.models.lossy import make_lossy
from headrace.models.registry import build_model
from headrace.plan import READ_SLACK, MemoryPlan, headroom_bytes, plan_memory
from headrace.pressure import Moves, PressureWatch
from headrace.profile import Profile
from headrace.tokenizer import Message, TextStream, Tokenizer
from headrace.tuned import apply_tuned, name_source, with_tuned

_log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]

DEMO = "demo"
RECOUNT_BYTES = 16 << 20


@dataclass(frozen=True)
class Completion:
    """One answer.

    `ids` are all generated ids, the end token included; `text` ends before a stop string.
    `finish_reason` is stop, length, cancelled or error; `error` then says what failed.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    receipt: Receipt
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a given text: entry i is that of `ids[i]` after all ids before it.

    The first id has nothing before it, so its entry is None.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    receipt: Receipt

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return sum(entry.logprob for entry in self.logprobs if entry is not None)


class LLM:
    """A model, ready to answer. Safe to call from several threads; a context manager.

    It belongs to the process that opened it: a fork has none of its reading threads.
    """

    def __init__(
        self, model: str | Path = DEMO, config: EngineConfig | None = None, **options: Any
    ) -> None:
        """Open a checkpoint, plan the memory, load the dense weights.

        Args:
            model: a directory of a checkpoint, or `demo`.
            config: how to hold and run it.
            options: fields of `EngineConfig` by name, such as `memory="2GiB"` or `context=4096`.

        Raises:
            CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
            MemoryBudgetError: it does not fit; the message is the sum.
            ConfigError: an option is unknown or out of range.
        """
        self.config = make_engine_config(config, options)
        self.path = resolve_model(model)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._said: set[str] = set()
        self._counted_at, self._counted = 0, 0  # resident bytes when huge pages were counted
        # Sequences of streams that nobody holds any more: garbage may be collected at any moment,
        # so it only notes them, and the next step or submission ends them.
        self._abandoned: deque[TokenSequence] = deque()
        self.spec, self.checkpoint = open_model(self.path, self.config.experts.drive)
        self.config, self.tuned = apply_tuned(self.config, self.checkpoint)
        self._set_up_kernels()
        self.generation_config = self.checkpoint.generation_config
        self._warn_of_ignored_fields()
        self._load()
        self._end_ids()  # wrong ones are said now, not at the first answer

    def _warn_of_ignored_fields(self) -> None:
        ignored = ignored_generation_fields(self.generation_config)
        if ignored:
            fields = ", ".join(f"{name} = {repr(value)[:60]}" for name, value in ignored.items())
            self._say_once(
                f"generation_config.json asks for what is not done here: {fields}\n"
                "answers are chosen without it and may differ from what its authors tested"
            )

    def _set_up_kernels(self) -> None:
        ops.set_isa(self.config.isa)
        num_threads = _num_threads(self.config)
        if num_threads != ops.num_threads():
            ops.set_threads(num_threads)

    def _load(self) -> None:
        available = available_memory_bytes()
        history = open_history(self.path, self.checkpoint, self.config)
        ops.trim_memory()  # what an earlier model left behind is not held by anybody
        self._reading = self._resolve_reading()
        held = resident_bytes()
        # Refuses before anything large is read.
        plan = self._plan(self.config, held, history, is_tokenizer_held=False)
        if not plan.is_resident:
            self._reading = self._resolve_reading(probe_bytes=plan.slots_bytes)
        # A large vocabulary is parsed as long as dense weights are read: both at once, and the
        # parsing here, because the C library keeps the tens of MiB it frees for who freed them.
        with ThreadPoolExecutor(1, "weights") as aside:
            loading = aside.submit(
                build_model,
                self.spec,
                self.checkpoint,
                embedding_resident=plan.embedding != "drive",
                lock=self.config.lock_memory,
            )
            self.tokenizer = Tokenizer.of(self.checkpoint)
            model = loading.result()
        ops.trim_memory()
        self.lossy = make_lossy(model, self.config)
        self.profile = Profile() if self.config.profile else None
        if self.profile is not None:
            self.profile.attach(model)
        self.plan = plan = self._plan_again(plan, held, history)
        self.store = self._open_store(history)
        self._watch = self._open_watch(available)
        self._kv = model.make_state(plan.num_pages, self.config.kv)
        self._loop = EngineLoop(
            model if self.lossy is None else self.lossy,
            self._kv,
            self.store,
            num_pages=plan.num_pages,
            context=plan.context,
            max_sequences=plan.sequences,
            chunk=plan.chunk,
            max_logits_rows=plan.max_logits_rows,
        )

    def _resolve_reading(self, probe_bytes: int = 0) -> Reading:
        reading = resolve_reading(
            self.config.experts, self.checkpoint.records, probe_bytes=probe_bytes
        )
        return name_source(reading, self.tuned)

    def _plan_again(
        self, first: MemoryPlan, held_before: int | None, history: History | None
    ) -> MemoryPlan:
        """Plan with what loading really left behind, not what it was estimated to: slots get the
        rest. The ceiling was decided, and the embedding is where it is.
        """
        held = resident_bytes()
        if held is None or held_before is None:
            return first
        others = max(held_before, held - first.dense_bytes - first.embedding_bytes)
        place = "auto" if first.embedding == "tied" else first.embedding
        decided = {"memory": first.ceiling_bytes, "embedding": place}
        return self._plan(make_engine_config(self.config, decided), others, history)

    def _plan(
        self,
        config: EngineConfig,
        held: int | None,
        history: History | None,
        is_tokenizer_held: bool = True,
    ) -> MemoryPlan:
        config = make_engine_config(config, {"experts": self._reading.experts})
        plan = plan_memory(
            self.spec,
            self.checkpoint,
            config,
            num_threads=ops.num_threads(),
            held_bytes=held,
            is_tokenizer_held=is_tokenizer_held,
            counts=None if history is None else history.counts,
            reading=self._reading,
        )
        return with_tuned(plan, self.tuned)

    def _open_store(self, history: History | None) -> ExpertStore | None:
        records = self.checkpoint.records
        if records is None:
            return None
        store = ExpertStore(
            records,
            num_slots=self.plan.num_slots,
            readers=self._reading.experts,
            history=history,
            lock=self.config.lock_memory,
            fingerprint=self.checkpoint.fingerprint,
            other_bytes=self.plan.other_bytes,
            drives=self._reading.drives,
        )
        if self.plan.is_resident:
            store.warm_all()  # every record is wanted once: the drive need not wait for the router
        return store

    def _open_watch(self, available: int | None) -> PressureWatch | None:
        """Watch the memory, unless the caller named a ceiling, which then stays.

        Args:
            available: before anything was loaded.
        """
        if self.config.memory != "auto" or self.store is None or available is None:
            return None
        watch = PressureWatch(
            self.store,
            slot_bytes=self.plan.record_bytes,
            least_slots=self.spec.num_experts_per_tok + READ_SLACK,
            headroom_bytes=headroom_bytes(available),
        )
        watch.start()
        return watch

    def _end_ids(self) -> frozenset[int]:
        own: Any = self.generation_config.get("eos_token_id")
        if own is None:
            own = [*self.spec.eos_token_ids]
            own += [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        own = own if isinstance(own, list) else [own]
        if not all(type(i) is int and i >= 0 for i in own):
            raise ConfigError(
                "generation_config.json: field `eos_token_id` must be an id or a list of ids\n"
                f"got {own!r}"
            )
        return frozenset(own)

    # Answers

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Answer a prompt; see `stream` for what it may raise."""
        return self.stream(prompt, params).result()

    def generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer several prompts together; each answer is what it would be alone."""
        if isinstance(prompts, str):
            raise RequestError(f"prompts are not a list of prompts\ngot {prompts[:100]!r}")
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(self.stream(prompt, params))
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "Stream":
        """Start answering a prompt; iterate over the result for pieces of text.

        Args:
            prompt: ids, or text: special tokens in it count, and the model's bos is added.
            params: how to choose; what it leaves open comes from the model's generation_config.

        Raises:
            RequestError: the prompt is empty, too long, or holds ids that the model does not have.
        """
        return Stream(self, self._ids(prompt), params or SamplingParams())

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answer a conversation; see `stream_chat`."""
        return self.stream_chat(messages, params, **variables).result()

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> "Stream":
        """Start answering a conversation.

        A model without a chat template continues the plain text of the messages; that is logged.

        Args:
            messages: objects with `role` and `content`.
            params: as in `stream`.
            variables: further names the template knows, such as `enable_thinking` or `tools`.

        Raises:
            RequestError: as in `stream`, or the template refuses the messages.
        """
        is_list = isinstance(messages, Iterable) and not isinstance(messages, str)
        if not is_list or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError(
                "messages are not a list of objects\n"
                'expected [{"role": "user", "content": "..."}], '
                f"got {repr(messages)[:100]}"
            )
        if self.tokenizer.has_chat_template:
            ids = self.tokenizer.encode_chat(messages, **variables)
        else:
            self._say_once("this model has no chat template: it continues the text as it stands")
            ids = self.tokenizer.encode(plain_transcript(messages))
        return Stream(self, self._checked(ids), params or SamplingParams())

    def _say_once(self, notice: str) -> None:
        if notice not in self._said:
            self._said.add(notice)
            _log.warning(notice)

    def score(self, text: Prompt, num_top: int = 0) -> Score:
        """Compute the log-probability of every token of a text after those before it.

        Args:
            text: text or ids.
            num_top: likeliest alternatives to report per token.

        Raises:
            RequestError: as in `stream`.
            ExpertReadError: an expert could not be read.
        """
        ids = self._ids(text)
        params = resolve_sampling(
            SamplingParams(max_tokens=1, logprobs=num_top), self.generation_config
        )
        sequence = self._submit(ids, params, 0, score_only=True)
        try:
            while sequence.state is not State.FINISHED:
                self._step_for(sequence)
        finally:
            self._cancel(sequence)
        if sequence.error is not None:
            raise sequence.error
        return Score(tuple(ids), (None, *sequence.prompt_logprobs), self._receipt(sequence))

    # The loop under the lock

    def _submit(
        self, ids: list[int], params: ResolvedSampling, seed: int, **options: Any
    ) -> TokenSequence:
        self._require_own_process()
        with self._lock:
            if self._closed:
                raise RequestError("the model is closed")
            self._end_abandoned()
            return self._loop.submit(ids, params, seed=seed, **options)

    def _is_in_a_fork(self) -> bool:
        return os.getpid() != self._process

    def _require_own_process(self) -> None:
        """Refuse in a fork, before a lock is taken that another thread may have held there."""
        if self._is_in_a_fork():
            raise RequestError(
                f"the model was opened by process {self._process}, and a fork of it has none of "
                "its reading threads\n"
                "hint: open the model in the process that uses it, or start that with `spawn`"
            )

    def _step_for(self, sequence: TokenSequence) -> None:
        """Step unless another caller's step has moved `sequence` in the meantime."""
        self._require_own_process()
        seen = sequence.usage.steps
        with self._lock:
            if sequence.usage.steps == seen and sequence.state is not State.FINISHED:
                if self._closed:
                    raise RequestError("the model was closed while it answered")
                self._end_abandoned()
                usage, tokens = sequence.usage, sequence.num_generated
                before_s = usage.decode_s
                with self._profiled(sequence):
                    self._loop.step()
                if self._watch is not None and usage.decode_s > before_s:
                    self._watch.note(sequence.num_generated - tokens, usage.decode_s - before_s)

    def _profiled(self, sequence: TokenSequence) -> AbstractContextManager[None]:
        if self.profile is None:
            return nullcontext()
        is_prefill = sequence.num_computed < sequence.num_prompt
        return self.profile.step("prefill" if is_prefill else "decode", self.store)

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._loop.cancel(self._abandoned.popleft())

    def _cancel(self, sequence: TokenSequence) -> None:
        if self._is_in_a_fork():
            return  # the copy in a fork holds nothing that anybody waits for
        with self._lock:
            self._loop.cancel(sequence)

    def _ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, as Python integers inside the vocabulary."""
        if isinstance(prompt, str):
            return self._checked(self.tokenizer.encode(prompt))
        try:
            if isinstance(prompt, bytes | bytearray):  # a sequence of integers, too
                raise TypeError(f"'{type(prompt).__name__}' object is not text")
            return self._checked([operator.index(i) for i in prompt])
        except TypeError as error:
            raise RequestError(
                f"the prompt is neither text nor a sequence of ids\n{error}"
            ) from None

    def _checked(self, ids: list[int]) -> list[int]:
        bad = next((i for i in ids if not 0 <= i < self.spec.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"prompt id {bad} is outside the vocabulary\nexpected 0..{self.spec.vocab_size - 1}"
            )
        return ids

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end an answer: the model's unless ignored, and the caller's."""
        return frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self._end_ids())

    def _receipt(self, sequence: TokenSequence) -> Receipt:
        usage = sequence.usage
        decode_tokens = max(0, sequence.num_generated - 1)
        bytes_read = usage.prefill_bytes_read + usage.decode_bytes_read
        busy_s = usage.drive_busy_ns / 1e9
        moves = Moves() if self._watch is None else self._watch.moves
        computed = sequence.num_prompt - usage.cached_tokens
        return Receipt(
            prompt_tokens=sequence.num_prompt,
            cached_tokens=usage.cached_tokens,
            completion_tokens=sequence.num_generated,
            prefill_s=usage.prefill_s,
            prefill_tokens_per_s=_rate(computed, usage.prefill_s),
            decode_tokens=decode_tokens,
            decode_s=usage.decode_s,
            decode_tokens_per_s=_rate(decode_tokens, usage.decode_s),
            expert_requests=usage.expert_requests,
            expert_hits=usage.expert_hits,
            expert_misses=usage.expert_misses,
            expert_hit_rate=_rate(usage.expert_hits, usage.expert_requests),
            bytes_read=bytes_read,
            prefill_bytes_read=usage.prefill_bytes_read,
            decode_bytes_read=usage.decode_bytes_read,
            bytes_read_per_token=_rate(usage.decode_bytes_read, decode_tokens),
            drive_busy_s=busy_s,
            drive_bytes_per_s=_rate(bytes_read + usage.prefetch_bytes, busy_s),
            drives=self._drives(usage.drive_bytes),
            prefetch_bytes=usage.prefetch_bytes,
            stall_s=usage.stall_ns / 1e9,
            lookahead_precision=_rate(usage.lookahead_right, usage.lookahead_named),
            lookahead_recall=_rate(usage.lookahead_right, usage.lookahead_wanted),
            lookahead_wasted_bytes=usage.lookahead_unused * self.plan.record_bytes,
            lookahead_saved_s=usage.lookahead_saved_ns / 1e9,
            steps=usage.steps,
            shared_steps=usage.shared_steps,
            peak_memory_bytes=peak_memory_bytes(),
            huge_pages_bytes=self._huge_pages_bytes(),
            locked_bytes=locked_bytes(),
            memory_ceiling_bytes=self.plan.ceiling_bytes,
            read_mode=self.store.stats().read_mode if self.store else "resident",
            readers=self.plan.readers,
            block_bytes=self.plan.block_bytes,
            readers_from=self.plan.readers_from,
            num_slots=self.store.num_slots if self.store else 0,
            record_bytes=self.plan.record_bytes,
            seed=sequence.seed,
            isa=ops.isa(),
            threads=ops.num_threads(),
            lossy=self._lossy_report(),
            slots_given_back=moves.slots_given_back,
            slots_taken_again=moves.slots_taken_again,
            give_backs=moves.give_backs,
        )

    def _drives(self, bytes_read: tuple[int, ...]) -> tuple[dict[str, Any], ...]:
        """What each of several drives gave an answer; failures are those since the start."""
        drives = self.store.drives() if self.store is not None else []
        return tuple(
            {
                "path": drive.path,
                "bytes_read": count,
                "share": _rate(count, sum(bytes_read)),
                "failed_copies": drive.failed_copies,
                "is_given_up": drive.is_given_up,
            }
            for drive, count in zip(drives, bytes_read, strict=False)
        )

    def _lossy_report(self) -> dict[str, Any] | None:
        """What was lossy, and what it cost since the start; None if nothing was."""
        report: dict[str, Any] = {"kv": self.plan.kv} if self.plan.kv == "q8" else {}
        if self.lossy is not None:
            report |= self.lossy.report()
        return report or None

    def _huge_pages_bytes(self) -> int:
        """Count again only where much was loaded or given back: it takes 20 ms for 5 GiB."""
        held = resident_bytes() or 0
        if abs(held - self._counted_at) > RECOUNT_BYTES:
            self._counted_at, self._counted = held, huge_pages_bytes()
        return self._counted

    def close(self) -> None:
        """Save the history and end the readers; calling twice, or in a fork, does nothing."""
        if self._is_in_a_fork():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._watch is not None:
                    self._watch.stop()
                if self.store is not None:
                    self.store.close()
                    self._judge_the_drive(self.store.stats())
                ops.trim_memory()

    def _judge_the_drive(self, stats: StoreStats) -> None:
        """Tell what remembers how to read this drive how fast it was, but for a model read whole:
        that goes into memory never touched before, which some hosts give more slowly than a drive.
        """
        if self.plan.is_resident or self.store is None:
            return
        count, busy_ns = stats.bytes_read + stats.prefetch_bytes, stats.drive_busy_ns
        for own in self.store.drives()[:1]:  # of several, the model's
            count, busy_ns = own.bytes_read, own.busy_ns
        observe_run(self._reading, bytes_read=count, busy_s=busy_ns / 1e9)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Stream:
    """An answer on its way: iterate for pieces of text, then take `result()`.

    Leaving the loop early, `close()`, or dropping the object ends it and frees what it held.
    """

    def __init__(self, llm: LLM, ids: list[int], params: SamplingParams) -> None:
        self._llm = llm
        self._params = resolve_sampling(params, llm.generation_config)
        text: TextStream = llm.tokenizer.stream(ids, params.stop)
        pieces: deque[str] = deque()
        self._text, self._pieces = text, pieces
        self._result: Completion | None = None
        seed = secrets.randbits(63) if params.seed is None else params.seed

        def see(token: int) -> bool:
            """Take a generated id that is no end token; the loop calls this under the lock.

            It must not hold the stream: the loop would keep alive what its caller dropped.
            """
            pieces.append(text.push(token))
            return text.is_stopped

        self._sequence = llm._submit(
            ids, self._params, seed, stop_ids=llm.stop_ids(params), watch=see
        )
        dropped = weakref.finalize(self, llm._abandoned.append, self._sequence)
        dropped.atexit = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._result is not None

    @property
    def progress(self) -> tuple[int, int]:
        """Prompt tokens computed so far, and all of them."""
        sequence = self._sequence
        return min(sequence.num_computed, sequence.num_prompt), sequence.num_prompt

    def advance(self) -> str:
        """Take part in one step; return the text that has become certain, often ""."""
        if self._sequence.state is not State.FINISHED:
            self._llm._step_for(self._sequence)
        is_over = self._sequence.state is State.FINISHED
        text = "".join(self._pieces.popleft() for _ in range(len(self._pieces)))
        if is_over and self._result is None:
            text += self._text.finish()
            self._result = self._complete()
        return text

    def __iter__(self) -> Iterator[str]:
        try:
            while not self.is_finished:
                if text := self.advance():
                    yield text
        finally:
            self.close()

    def close(self) -> None:
        """End the answer now, if it has not ended."""
        self._llm._cancel(self._sequence)
        if self._result is None:
            self._text.finish()
            self._result = self._complete()

    def result(self) -> Completion:
        """Run to the end and return the whole answer."""
        for _ in self:
            pass
        assert self._result is not None, "an ended stream has a result"
        return self._result

    def _complete(self) -> Completion:
        sequence = self._sequence
        wants_logprobs = self._params.logprobs is not None
        return Completion(
            text=self._text.text,
            ids=tuple(sequence.tokens[sequence.num_prompt :]),
            finish_reason=sequence.finish_reason or "cancelled",
            receipt=self._llm._receipt(sequence),
            logprobs=tuple(e.logprob for e in sequence.events if e.logprob is not None)
            if wants_logprobs
            else None,
            error=None if sequence.error is None else str(sequence.error),
        )


def resolve_model(model: str | Path) -> Path:
    """Find a checkpoint: `demo`, which is inside the package, a path, or a hub id that was pulled.

    Raises:
        CheckpointError: there is nothing there, or its download is not complete.
    """
    if str(model) == DEMO:
        path = Path(__file__).parent / DEMO
        if not path.is_dir():
            raise CheckpointError(
                f"this installation holds no demo model: {path}\nhint: name a checkpoint"
            )
        return path
    found = find_model(model)
    if found is None:
        raise CheckpointError(no_such_model(model))
    return found


def find_model(model: str | Path) -> Path | None:
    """Find what a path or the id of a pulled model names; None if nothing is there.

    Raises:
        CheckpointError: its download is not complete.
    """
    found = _expanded(model)
    return find_pulled(str(model)) if found is None and is_hub_id(str(model)) else found


def no_such_model(model: str | Path) -> str:
    """Say that nothing is there, and what would be a model."""
    message = (
        f"no such model: {model}\n"
        f"expected a directory, a GGUF file, a hub id OWNER/NAME that was pulled, or `{DEMO}`"
    )
    if is_hub_id(str(model)):
        message += f"\nhint: if it is on the hub, run `headrace pull {model}`"
    return message


def _expanded(model: str | Path) -> Path | None:
    """The path a name stands for if something is there; no name is not the working folder."""
    try:
        path = Path(model).expanduser()
        return path if str(model) and path.exists() else None
    except (OSError, TypeError, ValueError, RuntimeError):  # too long, no path, nobody's home
        return None


def open_history(path: Path, checkpoint: Checkpoint, config: EngineConfig) -> History | None:
    """Open the history of a model's experts; None if it is off or there are none."""
    records, options = checkpoint.records, config.experts
    if records is None or options.history == "off":
        return None
    return History(
        options.history_path or default_path(path, checkpoint.fingerprint),
        fingerprint=checkpoint.fingerprint,
        layers=records.layers,
        num_experts=records.num_experts,
        mode=options.history,
    )


def plan_model(model: str | Path, config: EngineConfig) -> MemoryPlan:
    """Plan a model's memory without loading it."""
    path = resolve_model(model)
    spec, checkpoint = open_model(path, config.experts.drive)
    config, tuned = apply_tuned(config, checkpoint)
    history = open_history(path, checkpoint, config)
    threads = _num_threads(config)
    counts = None if history is None else history.counts
    reading = name_source(resolve_reading(config.experts, checkpoint.records), tuned)
    config = make_engine_config(config, {"experts": reading.experts})
    plan = plan_memory(
        spec, checkpoint, config, num_threads=threads, counts=counts, reading=reading
    )
    plan = with_tuned(plan, tuned)
    records = checkpoint.records
    if records is not None:
        plan = replace(plan, repack_bytes_per_s=measure_repack(records))
    if records is None or plan.is_resident:
        return plan
    rates = tuple(drive.bytes_per_s for drive in reading.drives)
    if reading.drive_bytes_per_s is not None and rates:
        reads = expected_reads(counts, records, plan.num_slots)
        plan = plan.with_drives(rates, sum_bytes_per_s(rates, records, reads))
    if history is None:
        return plan
    forecast = make_forecast(
        history, records, config.experts, checkpoint.fingerprint, plan.num_slots
    )
    return plan.with_forecast(forecast)


def _num_threads(config: EngineConfig) -> int:
    """Threads to compute with: as asked for, else those that there are, but not more than cgroups
    grant processors: all would be stopped for the rest of each period.
    """
    if config.threads != "auto":
        return config.threads
    quota = processor_quota()
    return ops.num_threads() if quota is None else min(ops.num_threads(), math.ceil(quota))


def plain_transcript(messages: Sequence[Message]) -> str:
    """Write messages as one text for a model without a template: answers follow their prompt."""
    text = ""
    for message in messages:
        is_answer = message.get("role") == "assistant"
        text += ("" if is_answer or not text else "\n") + str(message.get("content") or "")
    return text


def _rate(count: float, per: float) -> float:
    return count / per if per > 0 else 0.0
