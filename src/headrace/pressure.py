"""Slots given back while the machine is short of memory, and taken again when there is room.

Watches what the system says (memory available here and in every cgroup above, stalls, major
faults) and changes the number of slots of a store, which knows how to give memory back. Only a
ceiling that was chosen from what was available moves: one that the caller named is his word.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.machine import ROOT, major_faults, stalled_us
from headrace.metrics import available_memory_bytes, format_bytes, memory_groups

_log = logging.getLogger(__name__)

INTERVAL_S = 0.25
"""Between two looks: a process that takes a GiB in that time is caught by the headroom."""
LOW_SHARE = 0.5
"""Of the headroom: with less available slots are given back, until all of the headroom is there."""
TIGHT_FACTOR = 2
"""Stalls and faults count only where less than this many headrooms are available: elsewhere they
are somebody else's, and slots given back would not help."""
STALL_SHARE = 0.1
FAULTS_PER_S = 50
"""Either, over a window of SETTLE_S, says that memory is moved about instead of used."""
SETTLE_S = 1.0
GIVE_SHARE, GROW_SHARE = 1 / 8, 1 / 16
"""Of all slots: given back at a sign of stalling; taken again at once."""
GROW_AFTER_S = 10.0
LONGEST_WAIT_S = 600.0
TRIAL_TOKENS = 64
"""Tokens decoded before and after slots are taken again, to compare the speed."""
SLOWER = 0.95
"""Speed after / before below which slots are given back once more. Windows of 64 tokens of one
text differ by a few per cent by themselves."""


class Slots(Protocol):
    """What is watched: a store."""

    @property
    def num_slots(self) -> int:
        """Slots in use."""

    @property
    def num_untouched_slots(self) -> int:
        """Those of them whose memory the system has not given yet."""

    def resize(self, num_slots: int) -> int:
        """Change their number; returns the number reached."""


@dataclass(frozen=True)
class Signs:
    """What the system says at one moment; None where it says nothing."""

    available_bytes: int | None
    stalled_us: int | None  # since boot, some task waited for memory
    major_faults: int | None  # of this process


def read_signs(root: Path = ROOT) -> Signs:
    """Read the signs: of the whole machine, and of the cgroups this process is in."""
    stalls = [stalled_us(root / "proc/pressure/memory")]
    stalls += [stalled_us(group / "memory.pressure") for group in memory_groups(root)]
    known = [stall for stall in stalls if stall is not None]
    return Signs(available_memory_bytes(root), max(known, default=None), major_faults(root))


@dataclass(frozen=True)
class Moves:
    """What was done so far."""

    give_backs: int = 0  # times
    slots_given_back: int = 0
    slots_taken_again: int = 0


@dataclass(frozen=True)
class _Trial:
    """Slots taken again whose worth is still to be measured."""

    slots_before: int
    speed_before: float


class PressureWatch:
    """Moves the slots of one store. `note` and `look` may be called from different threads."""

    def __init__(
        self,
        slots: Slots,
        *,
        slot_bytes: int,
        least_slots: int,
        headroom_bytes: int,
        root: Path = ROOT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch; nothing happens before `look` or `start`.

        Args:
            slots: the store.
            slot_bytes: memory of one slot.
            least_slots: never fewer.
            headroom_bytes: memory that should stay available to everybody else.
            root: where `proc` and `sys` are found.
            clock: seconds.
        """
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._most = slots.num_slots
        self._least = min(least_slots, self._most)
        self._headroom = headroom_bytes
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()
        self._moves = Moves()
        self._window = read_signs(root), clock()  # where the window of stalls and faults began
        self._untouched = slots.num_untouched_slots  # then
        self._quiet_since = clock()
        self._wait_s = GROW_AFTER_S
        self._tokens, self._seconds = 0, 0.0
        self._trial: _Trial | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def moves(self) -> Moves:
        """What was done so far."""
        return self._moves

    def start(self) -> None:
        """Look at regular times in a thread, also while nobody computes, until `stop`."""
        me = weakref.ref(self)
        self._thread = threading.Thread(
            target=_watch, args=(me, self._stop), name="pressure", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the store may be closed afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def note(self, tokens: int, seconds: float) -> None:
        """Count what was decoded: only speed decides whether slots taken again stay.

        Tokens decoded while new slots are still being filled say nothing about them.
        """
        with self._lock:
            if self._trial is None or self._slots.num_untouched_slots == 0:
                self._tokens += tokens
                self._seconds += seconds

    def look(self) -> None:
        """Read the signs and act on them."""
        with self._lock:
            signs, now = read_signs(self._root), self._clock()
            if signs.available_bytes is None:
                return
            why = self._why_too_much(signs, now)
            if signs.available_bytes < LOW_SHARE * self._headroom:
                lack = self._headroom - signs.available_bytes
                self._give_back(-(-lack // self._slot_bytes), why, signs, now)
            elif why:
                self._give_back(max(1, int(GIVE_SHARE * self._most)), why, signs, now)
            elif self._trial is not None:
                self._judge(self._trial)
            elif now - self._quiet_since >= self._wait_s:
                self._take_again(signs.available_bytes)

    def _why_too_much(self, signs: Signs, now: float) -> str:
        """Say what is wrong; "" if nothing is."""
        assert signs.available_bytes is not None, "the caller has looked"
        if signs.available_bytes < LOW_SHARE * self._headroom:
            return "little is left"
        before, since = self._window
        passed = now - since
        if passed < SETTLE_S:
            return ""
        self._window = signs, now
        were_untouched, self._untouched = self._untouched, self._slots.num_untouched_slots
        if signs.available_bytes >= TIGHT_FACTOR * self._headroom:
            return ""
        # The system packs memory into large pages to give slots theirs, and calls that a stall.
        is_filling = self._untouched < were_untouched
        is_stalled = _grown(before.stalled_us, signs.stalled_us) / 1e6 >= STALL_SHARE * passed
        if is_stalled and not is_filling:
            return "tasks wait for it"
        if _grown(before.major_faults, signs.major_faults) >= FAULTS_PER_S * passed:
            return "pages are read again"
        return ""

    def _give_back(self, count: int, why: str, signs: Signs, now: float) -> None:
        """Give back `count` slots that have memory; those that never had any go before them."""
        self._quiet_since, self._wait_s = now, GROW_AFTER_S
        self._forget_speed()
        before = self._slots.num_slots
        wanted = max(self._least, before - self._slots.num_untouched_slots - count)
        if wanted >= before:
            return
        given = before - self._resize(wanted)
        moves = self._moves
        self._moves = Moves(
            moves.give_backs + 1, moves.slots_given_back + given, moves.slots_taken_again
        )
        _log.warning(
            "memory is short, %s (%s available, %s wanted): %d of %d slots given back",
            why, format_bytes(signs.available_bytes or 0), format_bytes(self._headroom),
            given, before,
        )  # fmt: skip

    def _take_again(self, available: int) -> None:
        before = self._slots.num_slots
        step = min(self._most - before, max(1, int(GROW_SHARE * self._most)))
        has_room = available - self._headroom >= step * self._slot_bytes
        if step == 0 or not has_room or self._tokens < TRIAL_TOKENS:
            return
        trial = _Trial(before, self._tokens / max(1e-9, self._seconds))
        self._forget_speed()
        self._trial = trial
        taken = self._resize(before + step) - before
        moves = self._moves
        self._moves = Moves(
            moves.give_backs, moves.slots_given_back, moves.slots_taken_again + taken
        )

    def _judge(self, trial: _Trial) -> None:
        """Keep slots taken again unless they made decoding slower, when that can be told."""
        if self._tokens < TRIAL_TOKENS:
            return
        speed = self._tokens / max(1e-9, self._seconds)
        self._quiet_since = self._clock()
        if speed < SLOWER * trial.speed_before:
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
            given = self._slots.num_slots - self._resize(trial.slots_before)
            moves = self._moves
            self._moves = Moves(
                moves.give_backs + 1, moves.slots_given_back + given, moves.slots_taken_again
            )
            _log.warning(
                "%d slots given back: with them %.1f tok/s, without %.1f",
                given, speed, trial.speed_before,
            )  # fmt: skip
        else:
            self._wait_s = GROW_AFTER_S
            if self._slots.num_slots == self._most:
                _log.warning("memory has room again: all %d slots are in use", self._most)
        self._forget_speed()

    def _resize(self, num_slots: int) -> int:
        """Change the number of slots: those that go, or come, are not slots being filled."""
        reached = self._slots.resize(num_slots)
        self._untouched = self._slots.num_untouched_slots
        return reached

    def _forget_speed(self) -> None:
        self._trial = None
        self._tokens, self._seconds = 0, 0.0


def _grown(before: int | None, after: int | None) -> int:
    """How much a counter grew; 0 where it is not known."""
    return 0 if before is None or after is None else after - before


def _watch(watch: "weakref.ref[PressureWatch]", stop: threading.Event) -> None:
    """Look until told to stop, or until nobody holds the watch any more."""
    while not stop.wait(INTERVAL_S):
        held = watch()
        if held is None:
            return
        held.look()
        del held
