"""What decoding will read and how fast it will be, by the routing and the pace of the last tokens.

Replays the routing kept beside the history through the policy that a run would take, against the
slots at hand. Reads that one small file, and measures nothing.
"""

from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.records import RecordTable
from headrace.config import ExpertConfig
from headrace.experts.history import History
from headrace.experts.policy import choose_policy, predict_speed, replay
from headrace.experts.trace import Pace, RecentRouting, TraceHeader

LEAST_TOKENS = 64
"""Fewer tokens decoded say nothing of the next ones."""


@dataclass(frozen=True)
class Forecast:
    """Of decoding, from slots that are warm."""

    policy: str
    hit_rate: float
    misses_per_token: float
    read_bytes: int  # of one record
    tokens: int  # that it rests on
    pace: Pace  # of the runs that it rests on

    @property
    def bytes_per_token(self) -> float:
        """Read for one token."""
        return self.misses_per_token * self.read_bytes

    def tokens_per_s(self, drive_bytes_per_s: float | None) -> float | None:
        """Predict decoding, on the drive that was recorded or on another; see `predict_speed`."""
        return predict_speed(self.pace, self.misses_per_token, self.read_bytes, drive_bytes_per_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values for JSON."""
        return {
            "policy": self.policy,
            "hit_rate": self.hit_rate,
            "misses_per_token": self.misses_per_token,
            "bytes_per_token": self.bytes_per_token,
            "tokens": self.tokens,
            "tokens_per_s_as_recorded": self.tokens_per_s(None),
        }


def make_forecast(
    history: History, table: RecordTable, readers: ExpertConfig, fingerprint: str, num_slots: int
) -> Forecast | None:
    """Replay the last tokens against `num_slots` slots; None if too few were recorded.

    The first half fills the slots, as a history does at the start of a run; the second is counted.

    Args:
        history: of the model.
        table: of its records.
        readers: with the policy asked for.
        fingerprint: identity of the checkpoint.
        num_slots: records that memory holds, fewer than there are.
    """
    header = TraceHeader(
        fingerprint=fingerprint,
        layers=table.layers,
        num_experts=table.num_experts,
        record_bytes=table.record_bytes,
        read_bytes=table.read_bytes,
        other_bytes=0,
        num_readers=readers.num_readers,
        read_ahead=readers.read_ahead,
    )
    recent = RecentRouting(history.routing_path, header, is_saved=False)
    half_life = float(readers.half_life_tokens)
    whole, first = recent.trace(), recent.trace(older_half=True)
    policy = readers.policy
    if policy == "auto":
        policy = choose_policy(whole, num_slots=num_slots, half_life_tokens=half_life)
    counted, before = (
        replay(trace, policy, num_slots=num_slots, half_life_tokens=half_life).decode
        for trace in (whole, first)
    )
    tokens = counted.tokens - before.tokens
    requests = counted.requests - before.requests
    misses = counted.misses - before.misses
    if tokens < LEAST_TOKENS or requests == 0:
        return None
    return Forecast(
        policy, 1 - misses / requests, misses / tokens, table.read_bytes, tokens, whole.pace
    )
