"""Where the time of a step goes: attention, dense products, experts, waiting for reads, the rest.

Puts a clock around a model's blocks, reads the store's counters before and after each step, and
says in one sentence what limits the speed and which option would move it. Without a profile no
clock is there. Owns its sums; changes no result.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from headrace.experts import ExpertStore
from headrace.metrics import format_bytes
from headrace.models.blocks import Attention, DenseFFN, Head, MoE
from headrace.models.decoder import Decoder
from headrace.plan import MemoryPlan

DRIVE_BOUND = 0.4
"""Share of a step's time spent waiting from which the drive is named: computing hides behind reads,
so that less than half of the time may be all that is left to win."""
BUSY_DRIVE = 0.75
"""Share of its time at which a drive counts as used: below, waiting has another cause."""


@dataclass
class PhaseProfile:
    """Sums over the steps of one phase, in seconds and bytes."""

    phase: str  # prefill | decode
    num_steps: int = 0
    wall_s: float = 0.0
    attention_s: float = 0.0
    dense_s: float = 0.0  # dense FFNs and the head
    experts_s: float = 0.0  # router and products of experts, without waiting
    waiting_s: float = 0.0  # for the records of experts
    drive_busy_s: float = 0.0  # with at least one read in flight
    bytes_read: int = 0  # by demand and on advice
    requests: int = 0
    hits: int = 0

    @property
    def rest_s(self) -> float:
        """Norms, sampling, bookkeeping: what no clock was around."""
        named = self.attention_s + self.dense_s + self.experts_s + self.waiting_s
        return max(0.0, self.wall_s - named)

    def parts(self) -> dict[str, float]:
        """Seconds by name; together the wall time."""
        return {
            "attention": self.attention_s,
            "dense": self.dense_s,
            "experts": self.experts_s,
            "waiting for reads": self.waiting_s,
            "rest": self.rest_s,
        }

    @property
    def drive_utilisation(self) -> float:
        """Share of the time with at least one read in flight."""
        return self.drive_busy_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def compute_utilisation(self) -> float:
        """Share of the time in which computing did not wait for the drive."""
        return 1.0 - self.waiting_s / self.wall_s if self.wall_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as plain values for JSON."""
        return {
            **asdict(self), "rest_s": self.rest_s, "drive_utilisation": self.drive_utilisation,
            "compute_utilisation": self.compute_utilisation,
        }  # fmt: skip


@dataclass
class _Clock:
    """Seconds that the blocks of one kind took in this step."""

    seconds: float = 0.0


class _Timed:
    """A block with a clock around its call; everything else is the block's own."""

    def __init__(self, block: Any, clock: _Clock) -> None:
        self._block, self._clock = block, clock

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._block(*arguments, **options)
        finally:
            self._clock.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


@dataclass
class Profile:
    """The clocks of one model, and the sums of each phase."""

    phases: dict[str, PhaseProfile] = field(default_factory=dict)
    _clocks: dict[str, _Clock] = field(
        default_factory=lambda: {name: _Clock() for name in ("attention", "dense", "experts")}
    )

    def attach(self, model: Decoder) -> None:
        """Put clocks around the blocks of a model that runs no step at the moment."""
        for layer in model.layers:
            kind = "experts" if isinstance(layer.ffn, MoE) else "dense"
            layer.attention = cast(Attention, _Timed(layer.attention, self._clocks["attention"]))
            layer.ffn = cast(DenseFFN | MoE, _Timed(layer.ffn, self._clocks[kind]))
        model.head = cast(Head, _Timed(model.head, self._clocks["dense"]))

    @contextmanager
    def step(self, phase: str, store: ExpertStore | None) -> Iterator[None]:
        """Measure one step and add it to its phase: prefill or decode."""
        for clock in self._clocks.values():
            clock.seconds = 0.0
        before = None if store is None else store.stats()
        start = time.perf_counter()
        yield
        wall_s = time.perf_counter() - start
        sums = self.phases.setdefault(phase, PhaseProfile(phase))
        sums.num_steps += 1
        sums.wall_s += wall_s
        sums.attention_s += self._clocks["attention"].seconds
        sums.dense_s += self._clocks["dense"].seconds
        if store is None or before is None:
            return
        after = store.stats()
        experts_s = self._clocks["experts"].seconds
        waiting_s = min((after.stall_ns - before.stall_ns) / 1e9, experts_s)
        sums.waiting_s += waiting_s
        sums.experts_s += experts_s - waiting_s
        sums.drive_busy_s += min((after.drive_busy_ns - before.drive_busy_ns) / 1e9, wall_s)
        sums.bytes_read += after.bytes_read - before.bytes_read
        sums.bytes_read += after.prefetch_bytes - before.prefetch_bytes
        sums.requests += after.requests - before.requests
        sums.hits += after.hits - before.hits

    def as_dict(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return phases and sentences as plain values for JSON."""
        return {
            phase: {**sums.as_dict(), "limit": what_limits(sums, plan)}
            for phase, sums in self.phases.items()
        }

    def lines(self, plan: MemoryPlan) -> list[str]:
        """Write the profile for people: two lines and a sentence per phase."""
        return [line for sums in self.phases.values() for line in _lines(sums, plan)]


def _lines(sums: PhaseProfile, plan: MemoryPlan) -> Iterator[str]:
    steps = max(1, sums.num_steps)
    parts = " · ".join(
        f"{name} {1e3 * seconds / steps:.1f} ms ({_share(seconds, sums):.0%})"
        for name, seconds in sums.parts().items()
        if seconds > 0
    )
    yield f"{sums.phase}, {1e3 * sums.wall_s / steps:.1f} ms per step of {sums.num_steps}: {parts}"
    if sums.bytes_read:
        yield (
            f"{sums.phase}, computing {sums.compute_utilisation:.0%} of the time, "
            f"drive busy {sums.drive_utilisation:.0%}: "
            f"{format_bytes(sums.bytes_read / steps)} per step, "
            f"{sums.bytes_read / sums.wall_s / 1e9:.2f} GB/s over all"
        )
    yield f"{sums.phase} is limited by {what_limits(sums, plan)}"


def what_limits(sums: PhaseProfile, plan: MemoryPlan) -> str:
    """Name the largest part of a phase's time, and the option that would move it."""
    waiting = _share(sums.waiting_s, sums)
    if waiting >= DRIVE_BOUND:
        return _drive_limit(sums, plan)
    seconds = {name: s for name, s in sums.parts().items() if name != "waiting for reads"}
    name = max(seconds, key=lambda part: seconds[part])
    is_wide = plan.kv == "f32"
    advice = {
        "attention": "shorter prompts and answers"
        + (", and `--kv f16`, make it less" if is_wide else " make it less"),
        "dense": "more `--threads`, or `convert --dense q4`, make it less",
        "experts": "more `--threads`, or fewer bits (`convert --experts q4`), make it less",
        "rest": "larger steps (`--chunk`) share it among more tokens"
        if sums.phase == "prefill"
        else "answers decoded together (`sequences`, `LLM.generate_batch`) share it",
    }[name]
    return f"{name} ({_share(seconds[name], sums):.0%} of the time): {advice}"


def _drive_limit(sums: PhaseProfile, plan: MemoryPlan) -> str:
    waiting = f"reads ({_share(sums.waiting_s, sums):.0%} of the time waiting"
    missing = (plan.num_records - plan.num_slots) * plan.record_bytes
    if not missing:
        return f"{waiting}): every expert has a slot and is read once, later answers do not wait"
    if sums.drive_utilisation < BUSY_DRIVE:
        return (
            f"{waiting}, though the drive was busy for {sums.drive_utilisation:.0%} only): "
            "more `--memory` leaves less to read, and fixed `--readers` may be too few"
        )
    hits = sums.hits / sums.requests if sums.requests else 0.0
    return (
        f"{waiting}, {hits:.0%} hits): more `--memory` raises the hits, "
        f"{format_bytes(missing)} more holds every expert"
    )


def _share(seconds: float, sums: PhaseProfile) -> float:
    return seconds / sums.wall_s if sums.wall_s > 0 else 0.0
