"""Which record to give up: the policies by name, their replay on a trace, and the choice of one.

The policies themselves are native (`native/store/policy.h`); a replay runs that same code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace import _core
from headrace.config import POLICIES
from headrace.experts.trace import Pace, Trace

DEFAULT_POLICY = "next-use"
"""No more misses than any other at every budget of every trace tried: docs/experiments.md."""
BELADY = "belady"
"""Not a policy: the fewest misses that knowing the future allows."""
RESIDENT_POLICY = "lru"
"""Where every record has a slot nothing is given up, and the cheapest policy will do."""
_LEAST_GAIN = 0.02  # fewer misses than the default's, or a choice by replay is noise


@dataclass(frozen=True)
class ReplayCounts:
    """Of the steps of one kind: tokens, distinct experts asked for, and those not in a slot."""

    tokens: int
    requests: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of requests found in a slot."""
        return 1.0 - self.misses / self.requests if self.requests else 0.0

    @property
    def misses_per_token(self) -> float:
        """Records read for one token."""
        return self.misses / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Replay:
    """What a policy would have done: in steps where all rows decode, and in all others."""

    policy: str
    num_slots: int
    prefill: ReplayCounts
    decode: ReplayCounts

    @property
    def misses(self) -> int:
        """Of all steps."""
        return self.prefill.misses + self.decode.misses


def replay(trace: Trace, policy: str, *, num_slots: int, half_life_tokens: float) -> Replay:
    """Replay a trace against `num_slots` slots, empty at first.

    Args:
        trace: the trace.
        policy: one of `POLICIES`, or `BELADY`.
        num_slots: 2 or more.
        half_life_tokens: of decayed frequencies.

    Raises:
        ConfigError: the policy is unknown, or there are too few slots.
    """
    if policy == BELADY:
        counts = _core.replay_belady(trace.native, num_slots=num_slots)
    else:
        counts = _core.replay(
            trace.native,
            policy,
            num_slots=num_slots,
            num_readers=trace.header.num_readers,
            read_ahead=trace.header.read_ahead,
            half_life_tokens=half_life_tokens,
        )
    return Replay(policy, num_slots, _counts(counts["prefill"]), _counts(counts["decode"]))


def _counts(counts: Mapping[str, int]) -> ReplayCounts:
    return ReplayCounts(counts["tokens"], counts["requests"], counts["misses"])


def predict_speed(
    pace: Pace, misses_per_token: float, read_bytes: int, drive: float | None = None
) -> float | None:
    """Predict tokens per second of decoding from how fast the recorded run went.

    A token takes the time of computing and the time of reading less what of the two ran at once.
    By chance that would be their product over their sum; how many times as much the recorded run
    reached, with lookahead or without, is kept.

    Args:
        pace: of the recorded run.
        misses_per_token: records read for one token, by a replay.
        read_bytes: of one record.
        drive: bytes per second of another drive; None for the recorded one.

    Returns:
        None where the recorded run cannot say: it decoded nothing, or read nothing though this
        would.
    """
    if not pace.tokens or (misses_per_token and not pace.misses):
        return None
    compute_ns = (pace.step_ns - pace.stall_ns) / pace.tokens
    if not misses_per_token:
        return 1e9 / compute_ns
    read_ns = pace.busy_ns / pace.misses if drive is None else read_bytes / drive * 1e9
    at_once_ns = (pace.busy_ns - pace.stall_ns) / pace.tokens
    by_chance_ns = _meeting(compute_ns, pace.busy_ns / pace.tokens)
    kept = at_once_ns / by_chance_ns if by_chance_ns else 0.0
    reading_ns = misses_per_token * read_ns
    hidden_ns = min(kept * _meeting(compute_ns, reading_ns), compute_ns, reading_ns)
    return 1e9 / (compute_ns + reading_ns - hidden_ns)


def _meeting(a: float, b: float) -> float:
    """Return how long two activities go on at once if they begin at any moments of each other."""
    return a * b / (a + b) if a + b else 0.0


def choose_policy(trace: Trace, *, num_slots: int, half_life_tokens: float) -> str:
    """Return the policy that misses least on a trace: the default unless another gains clearly."""
    if not trace.native.num_visits:
        return DEFAULT_POLICY
    misses = {
        policy: replay(trace, policy, num_slots=num_slots, half_life_tokens=half_life_tokens).misses
        for policy in POLICIES
    }
    best = min(POLICIES, key=lambda policy: misses[policy])
    is_clear = misses[best] < (1 - _LEAST_GAIN) * misses[DEFAULT_POLICY]
    return best if is_clear else DEFAULT_POLICY


def policy_bytes(num_layers: int, num_experts: int) -> int:
    """Return what the most expensive policy holds at most, whichever is chosen."""
    return _core.policy_bytes(num_layers, num_experts)
