"""One token stream: its ids, how far it is computed, its pages, and why it ended.

Changed by the engine loop only; front ends read `events` and `finish_reason`.
"""

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.config import ResolvedSampling


class State(enum.Enum):
    """Where a sequence stands: it moves downwards only."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """The natural-log probability the model gave a token, and its likeliest alternatives."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One generated token."""

    id: int
    logprob: TokenLogprob | None = None


@dataclass
class Usage:
    """What the steps of one sequence took: counters only grow."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    steps: int = 0
    shared_steps: int = 0
    expert_requests: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    prefill_bytes_read: int = 0
    decode_bytes_read: int = 0
    prefetch_bytes: int = 0
    drive_busy_ns: int = 0
    drive_bytes: tuple[int, ...] = ()  # of each drive, if there are several
    stall_ns: int = 0
    lookahead_named: int = 0
    lookahead_wanted: int = 0
    lookahead_right: int = 0
    lookahead_unused: int = 0
    lookahead_saved_ns: int = 0


# Sees each generated token; returns True to end the sequence there (a stop string is complete).
Watcher = Callable[[int], bool]


@dataclass(eq=False)
class Sequence:
    """One token stream.

    `tokens` holds prompt and answer; positions below `num_computed` have their keys and values in
    `pages`. `want_prompt_logprobs` asks for the logprob of every prompt token but the first.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: ResolvedSampling
    seed: int
    stop_ids: frozenset[int]
    watch: Watcher | None = None
    want_prompt_logprobs: bool = False
    state: State = State.WAITING
    num_computed: int = 0
    limit: int = 0  # length of `tokens` at which the sequence ends
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # chain of the full pages filed so far
    events: deque[TokenEvent] = field(default_factory=deque)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    usage: Usage = field(default_factory=Usage)
    seen: dict[int, int] = field(default_factory=dict)  # id -> how often it was generated

    def __post_init__(self) -> None:
        self.seen.update(dict.fromkeys(self.tokens, 0))

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed yet: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.num_computed < self.num_prompt

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    def append(self, event: TokenEvent) -> None:
        """Add a generated token and decide whether it was the last."""
        self.tokens.append(event.id)
        self.seen[event.id] = self.seen.get(event.id, 0) + 1
        self.events.append(event)
        is_end = event.id in self.stop_ids
        if is_end or (self.watch is not None and self.watch(event.id)):
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")

    def finish(self, reason: str, error: Exception | None = None) -> None:
        """End the sequence; the first reason stays."""
        if self.state is not State.FINISHED:
            self.state = State.FINISHED
            self.finish_reason = reason
            self.error = error
