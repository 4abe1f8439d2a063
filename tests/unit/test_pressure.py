"""Slots given back and taken again, on a fake /proc and cgroup tree and a clock that is turned."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.machine import major_faults, stalled_us
from headrace.pressure import (
    GROW_AFTER_S,
    LOW_SHARE,
    SETTLE_S,
    TRIAL_TOKENS,
    Moves,
    PressureWatch,
    Signs,
    read_signs,
)

MIB = 1 << 20
HEADROOM = 256 * MIB
MOST, LEAST = 64, 6


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


@dataclass
class FakeSlots:
    num_slots: int = MOST
    num_untouched_slots: int = 0
    pinned: int = 0
    asked: list[int] = field(default_factory=list)

    def resize(self, num_slots: int) -> int:
        self.asked.append(num_slots)
        self.num_slots = max(num_slots, self.pinned)
        self.num_untouched_slots = 0
        return self.num_slots


class Machine:
    """The files of a fake system, its clock, and a watch over them."""

    def __init__(self, root: Path, slots: FakeSlots) -> None:
        self.root, self.slots, self.now = root, slots, 100.0
        self.available(4 * HEADROOM)
        self.stalls(0)
        self.faults(0)
        self.watch = PressureWatch(
            slots,
            slot_bytes=10 * MIB,
            least_slots=LEAST,
            headroom_bytes=HEADROOM,
            root=root,
            clock=lambda: self.now,
        )

    def available(self, count: int) -> None:
        write(self.root, "proc/meminfo", f"MemAvailable: {count // 1024} kB\n")

    def stalls(self, total_us: int, file: str = "proc/pressure/memory") -> None:
        line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={total_us}\n"
        write(self.root, file, f"some {line}full {line}")

    def faults(self, count: int) -> None:
        write(self.root, "proc/self/stat", f"1 (a ) b) S 1 1 1 0 -1 4194304 99 0 {count} 0 5 5\n")

    def look(self, seconds: float = SETTLE_S) -> None:
        self.now += seconds
        self.watch.look()

    def decode(self, tokens_per_s: float) -> None:
        self.watch.note(TRIAL_TOKENS, TRIAL_TOKENS / tokens_per_s)


@pytest.fixture
def slots() -> FakeSlots:
    return FakeSlots()


@pytest.fixture
def machine(tmp_path: Path, slots: FakeSlots) -> Machine:
    return Machine(tmp_path, slots)


def test_what_the_files_say(tmp_path: Path, machine: Machine) -> None:
    machine.available(64 * MIB)
    machine.stalls(1234)
    machine.faults(77)
    assert read_signs(tmp_path) == Signs(64 * MIB, 1234, 77)
    write(tmp_path, "proc/self/cgroup", "0::/box/inner\n")
    group = "sys/fs/cgroup/box/inner"
    write(tmp_path, f"{group}/memory.max", 100 * MIB)
    write(tmp_path, f"{group}/memory.current", 90 * MIB)
    machine.stalls(5678, f"{group}/memory.pressure")
    assert read_signs(tmp_path) == Signs(10 * MIB, 5678, 77)


def test_files_that_are_missing_or_damaged_say_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    assert read_signs(empty) == Signs(None, None, None)
    for text in ("", "some", "some total=x", "full total=3", "some total=-1"):
        write(tmp_path, "file", text)
        assert stalled_us(tmp_path / "file") is None
    for text in ("", "1 (x) S 1", "no parenthesis at all", "1 (x) S 1 1 1 0 -1 4 99 0 x 0 5 5"):
        write(tmp_path, "proc/self/stat", text)
        assert major_faults(tmp_path) is None
    slots = FakeSlots()
    watch = PressureWatch(slots, slot_bytes=1, least_slots=1, headroom_bytes=HEADROOM, root=empty)
    watch.look()
    assert slots.asked == []


def test_nothing_moves_while_there_is_room(machine: Machine, slots: FakeSlots) -> None:
    for step in range(20):
        machine.stalls(step * 900_000)  # somebody else's: most memory is free
        machine.faults(step * 1000)
        machine.look()
    machine.stalls(0)
    machine.available(int(LOW_SHARE * HEADROOM) + MIB)  # less than the headroom, but no emergency
    machine.look()
    assert slots.asked == [] and machine.watch.moves == Moves()


def test_what_lacks_is_given_back_at_once(
    machine: Machine, slots: FakeSlots, caplog: pytest.LogCaptureFixture
) -> None:
    machine.available(HEADROOM // 4)
    with caplog.at_level(logging.WARNING):
        machine.look(0.01)
    # 192 MiB lack, a slot is 10 MiB.
    assert slots.num_slots == MOST - 20
    assert machine.watch.moves == Moves(1, 20, 0)
    assert len(caplog.records) == 1
    assert "20 of 64 slots given back" in caplog.text and "64 MiB available" in caplog.text


def test_slots_that_hold_nothing_do_not_count_as_given(machine: Machine, slots: FakeSlots) -> None:
    slots.num_untouched_slots = 30
    machine.available(HEADROOM // 4)
    machine.look()
    assert slots.num_slots == MOST - 30 - 20


def test_never_below_the_least(
    machine: Machine, slots: FakeSlots, caplog: pytest.LogCaptureFixture
) -> None:
    machine.available(0)
    for _ in range(5):
        machine.look()
    slots.num_slots = LEAST
    asked = len(slots.asked)
    machine.look()
    assert slots.num_slots == LEAST and len(slots.asked) == asked
    assert min(slots.asked) == LEAST


@pytest.mark.parametrize("sign", ["stalls", "faults", "cgroup"])
def test_stalls_and_faults_give_back_a_share_where_memory_is_tight(
    machine: Machine, slots: FakeSlots, sign: str, tmp_path: Path
) -> None:
    machine.available(HEADROOM)
    machine.look()
    assert slots.asked == []
    if sign == "stalls":
        machine.stalls(200_000)
    elif sign == "faults":
        machine.faults(60)
    else:
        write(tmp_path, "proc/self/cgroup", "0::/box\n")
        machine.stalls(200_000, "sys/fs/cgroup/box/memory.pressure")
    machine.look(SETTLE_S / 2)
    assert slots.asked == []  # too short to tell
    machine.look(SETTLE_S / 2)
    assert slots.num_slots == MOST - MOST // 8
    machine.look()
    assert slots.num_slots == MOST - MOST // 8, "the same stall was counted twice"


def test_stalls_while_slots_get_their_memory_are_their_own(
    machine: Machine, slots: FakeSlots
) -> None:
    machine.available(HEADROOM)
    slots.num_untouched_slots = 40
    machine.look()
    slots.num_untouched_slots = 20
    machine.stalls(900_000)
    machine.look()
    assert slots.num_slots == MOST
    machine.stalls(1_800_000)  # and none was filled
    machine.look()
    assert slots.num_slots < MOST


def test_giving_slots_back_does_not_count_as_filling_them(
    machine: Machine, slots: FakeSlots
) -> None:
    machine.available(HEADROOM)
    slots.num_untouched_slots = 40
    machine.look()
    machine.stalls(900_000)
    machine.look()
    asked = len(slots.asked)
    machine.stalls(1_800_000)
    machine.look()
    assert len(slots.asked) == asked + 1


def test_taken_again_slowly_and_only_while_tokens_are_measured(
    machine: Machine, slots: FakeSlots, caplog: pytest.LogCaptureFixture
) -> None:
    machine.available(HEADROOM // 4)
    machine.look()
    machine.available(4 * HEADROOM)
    machine.look(GROW_AFTER_S + 1)
    assert slots.num_slots == 44  # nobody decoded: nothing to compare with
    machine.decode(10.0)
    machine.look(0.1)
    assert slots.num_slots == 44 + MOST // 16
    slots.num_untouched_slots = 1
    machine.decode(1.0)  # while the new slots are still being filled
    slots.num_untouched_slots = 0
    machine.look(0.1)
    machine.decode(11.0)
    machine.look(0.1)
    assert slots.num_slots == 48
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            machine.decode(11.0)
            machine.look(GROW_AFTER_S + 1)
            machine.decode(11.0)
            machine.look(0.1)
    assert slots.num_slots == MOST
    assert machine.watch.moves == Moves(1, 20, 20)
    said = [record.message for record in caplog.records]
    assert said[1:] == ["memory has room again: all 64 slots are in use"]


def test_slots_that_make_it_slower_go_again(
    machine: Machine, slots: FakeSlots, caplog: pytest.LogCaptureFixture
) -> None:
    """More slots may mean more hits and still less speed: only the measured speed counts."""
    machine.available(HEADROOM // 4)
    machine.look()
    machine.available(4 * HEADROOM)
    machine.decode(10.0)
    machine.look(GROW_AFTER_S + 1)
    assert slots.num_slots == 48
    machine.decode(8.0)
    with caplog.at_level(logging.WARNING):
        machine.look(0.1)
    assert slots.num_slots == 44
    assert "with them 8.0 tok/s, without 10.0" in caplog.text
    machine.decode(10.0)
    machine.look(GROW_AFTER_S + 1)
    assert slots.num_slots == 44, "tried again too early"
    machine.look(GROW_AFTER_S + 1)
    assert slots.num_slots == 48


def test_no_growth_without_room_for_it(machine: Machine, slots: FakeSlots) -> None:
    machine.available(HEADROOM // 4)
    machine.look()
    machine.available(HEADROOM + 39 * MIB)  # four slots are 40
    machine.decode(10.0)
    machine.look(GROW_AFTER_S + 1)
    assert slots.num_slots == 44


def test_the_thread_looks_by_itself_and_ends(
    machine: Machine, slots: FakeSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    seen = threading.Event()
    monkeypatch.setattr("headrace.pressure.INTERVAL_S", 0.001)
    monkeypatch.setattr(machine.watch, "look", seen.set)
    machine.watch.start()
    assert seen.wait(10)
    machine.watch.stop()
    assert not [t for t in threading.enumerate() if t.name == "pressure"]
