"""Traces: the file comes back or says where it is damaged, and a replay counts what a run read."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.arrays import Int32
from headrace.config import POLICIES, ExpertConfig
from headrace.errors import CheckpointError, ConfigError
from headrace.experts import ExpertStore, History
from headrace.experts.policy import (
    BELADY,
    DEFAULT_POLICY,
    RESIDENT_POLICY,
    choose_policy,
    policy_bytes,
    predict_speed,
)
from headrace.experts.policy import replay as run_replay
from headrace.experts.trace import (
    RECENT_TOKENS,
    Block,
    Pace,
    RecentRouting,
    Trace,
    TraceFile,
    TraceHeader,
    read_trace,
)

from .conftest import Records, read_all

HEADER = TraceHeader(
    fingerprint="of this test",
    layers=(1, 4),
    num_experts=8,
    record_bytes=4096,
    read_bytes=4096,
    other_bytes=0,
    num_readers=4,
    read_ahead=16,
)


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def encode(visits: list[tuple[int, Int32]], is_prefill: bool = False) -> bytes:
    """The payload of a block, written a second time after docs/traces.md."""
    payload = b""
    last = 99
    for row, ids in visits:
        if row <= last:
            payload += b"\0" + varint(1) + varint(300) + varint(2 * len(ids) + is_prefill)
        last = row
        payload += varint(row + 1) + varint(len(ids)) + varint(ids.shape[1])
        payload += ids.astype(np.uint8).tobytes()
    return payload


def random_visits(num_steps: int, seed: int, rows: int = 2, active: int = 2) -> list:
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(8, 0.7), rows)
    return [
        (row, rng.choice(8, (1, active), replace=False, p=chances[row]).astype(np.int32))
        for _ in range(num_steps)
        for row in range(rows)
    ]


def write(path: Path, num_blocks: int = 3) -> list:
    file = TraceFile(path, HEADER)
    visits = []
    for seed in range(num_blocks):
        block = random_visits(5, seed)
        file.add(Block(5, Pace(5, seed, 100, 40, 60), encode(block)))
        visits += block
    file.close()
    return visits


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.hrt"
    visits = write(path)
    trace = read_trace(path)
    assert (trace.header, trace.num_tokens) == (HEADER, 15)
    assert trace.pace == Pace(15, 0 + 1 + 2, 300, 120, 180)
    assert trace.native.num_steps == 15
    assert trace.native.num_visits == len(visits)
    for index, (row, ids) in enumerate(visits):
        got_row, got_ids = trace.native.visit(index)
        assert got_row == row and got_ids.tolist() == ids.tolist()


def test_a_file_is_continued_by_the_same_model_only(tmp_path: Path) -> None:
    path = tmp_path / "a.hrt"
    write(path, 1)
    write(path, 2)
    assert read_trace(path).num_tokens == 15
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another model"):
        TraceFile(path, replace(HEADER, fingerprint="of another"))
    path.write_bytes(before[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        TraceFile(path, HEADER)
    path.write_bytes(b"precious text of the user")
    with pytest.raises(CheckpointError, match="not a trace"):
        TraceFile(path, HEADER)
    assert path.read_bytes() == b"precious text of the user"


def test_a_cut_file_names_the_byte_and_gives_its_whole_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.hrt"
    write(path)
    whole = path.read_bytes()
    sizes = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            read_trace(path)
        except CheckpointError as error:
            assert "not a trace" in str(error) or "byte" in str(error)
            if "hint" not in str(error) or "header" in str(error):
                continue
            with caplog.at_level(logging.WARNING):
                assert read_trace(path, partial=True).num_tokens in (0, 5, 10)
        else:
            sizes.add(length)
    assert len(sizes) == 3  # with none, one and two of the three blocks


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.hrt"
    write(path)
    whole = bytearray(path.read_bytes())
    for at in range(0, len(whole), 3):
        whole[at] ^= 0x10
        path.write_bytes(whole)
        with pytest.raises(CheckpointError):
            read_trace(path)
        whole[at] ^= 0x10


@pytest.mark.parametrize(
    "payload", [b"\x09\x01\x01\x00", b"\x01\x01\x02\x00\x08", b"\x01\x05\x02\x00", b"\xff" * 12]
)
def test_senseless_entries_are_refused(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "a.hrt"
    file = TraceFile(path, HEADER)
    file.add(Block(1, Pace(), payload))
    file.close()
    with pytest.raises(CheckpointError, match="byte"):
        read_trace(path)


def make_trace(visits: list, records: Records) -> Trace:
    header = replace(HEADER, layers=records.table.layers)
    path = Path(records.table.files[0]).with_name("made.hrt")
    path.unlink(missing_ok=True)
    file = TraceFile(path, header)
    file.add(Block(1, Pace(), encode(visits)))
    file.close()
    return read_trace(path)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_slots", [4, 6, 9, 15])
def test_a_replay_counts_what_the_store_reads(
    records: Records, policy: str, num_slots: int
) -> None:
    visits = random_visits(150, 3, rows=3)
    counts = run_replay(
        make_trace(visits, records), policy, num_slots=num_slots, half_life_tokens=32.0
    )
    with records.open(num_slots, policy=policy) as store:
        assert store.policy == policy
        for row, ids in visits:
            read_all(store, records.table.layers[row], ids)
        store.debug_check()
        stats = store.stats()
    assert (stats.requests, stats.misses) == (counts.decode.requests, counts.decode.misses)
    assert stats.evictions > 0


@pytest.mark.parametrize("num_slots", [3, 5, 9, 15, 24])
def test_nothing_beats_belady(records: Records, num_slots: int) -> None:
    trace = make_trace(random_visits(150, 5, rows=3), records)
    best = run_replay(trace, BELADY, num_slots=num_slots, half_life_tokens=32.0)
    for policy in POLICIES:
        got = run_replay(trace, policy, num_slots=num_slots, half_life_tokens=32.0)
        assert got.misses >= best.misses
        assert got.decode.tokens == 150 and got.prefill.tokens == 0


def test_the_default_reads_no_more_than_lru(records: Records) -> None:
    for seed in range(4):
        trace = make_trace(random_visits(400, seed, rows=3), records)
        for num_slots in (4, 6, 8, 12, 16, 20):
            misses = {
                policy: run_replay(trace, policy, num_slots=num_slots, half_life_tokens=32.0).misses
                for policy in (DEFAULT_POLICY, "lru")
            }
            assert misses[DEFAULT_POLICY] <= misses["lru"]


def test_speed_is_predicted_from_the_recorded_pace() -> None:
    """Tokens of 30 ms with 2 misses: 20 of computing and 12 of reading, 2 of them at once.

    By chance 20 and 12 would meet for 7.5, and 20 and 24 for 10.9: 2.9 where 7.5 became 2.
    """
    pace = Pace(
        tokens=10, misses=20, step_ns=300_000_000, stall_ns=100_000_000, busy_ns=120_000_000
    )
    twice = 20 + 24 - 2 / 7.5 * (20 * 24 / 44)
    assert predict_speed(pace, 2.0, 6_000_000) == pytest.approx(1000 / 30)
    assert predict_speed(pace, 0.0, 6_000_000) == pytest.approx(1000 / 20)
    assert predict_speed(pace, 4.0, 6_000_000) == pytest.approx(1000 / twice)
    assert predict_speed(pace, 2.0, 6_000_000, 1e9) == pytest.approx(1000 / 30), "the same drive"
    assert predict_speed(pace, 2.0, 6_000_000, 0.5e9) == pytest.approx(1000 / twice)
    assert predict_speed(pace, 2.0, 6_000_000, 1e15) == pytest.approx(1000 / 20), "all is hidden"
    overlapped = pace._replace(stall_ns=10_000_000)  # 29 ms of computing, 11 of 12 hidden
    speed = predict_speed(overlapped, 20.0, 6_000_000)
    assert speed == pytest.approx(1000 / 120), "no more is hidden than there is computing"
    resident = pace._replace(misses=0, stall_ns=0, busy_ns=0)
    assert predict_speed(resident, 0.0, 6_000_000) == pytest.approx(1000 / 30)
    assert predict_speed(resident, 1.0, 6_000_000) is None, "nothing is known of reading"
    assert predict_speed(Pace(), 0.0, 6_000_000) is None


def test_a_policy_is_chosen_by_replay(records: Records) -> None:
    """A scan that comes once, then two experts for ever: what the default learned is worthless."""
    usual = make_trace(random_visits(300, 1, rows=3), records)
    assert choose_policy(usual, num_slots=8, half_life_tokens=32.0) == DEFAULT_POLICY
    with records.open(24) as store:
        assert store.policy == RESIDENT_POLICY
    half = [(0, np.array([[expert]], np.int32)) for expert in (0, 1, 2, 3)]
    misses = {}
    for seed in range(200):  # some random trace on which another policy is clearly better
        rng = np.random.default_rng(seed)
        order = rng.permutation(8)
        visits = half + [(0, np.array([[order[i % 5]]], np.int32)) for i in range(12)]
        trace = make_trace(visits, records)
        misses = {
            policy: run_replay(trace, policy, num_slots=3, half_life_tokens=32.0).misses
            for policy in POLICIES
        }
        if min(misses.values()) < 0.9 * misses[DEFAULT_POLICY]:
            best = min(POLICIES, key=lambda policy: misses[policy])
            assert choose_policy(trace, num_slots=3, half_life_tokens=32.0) == best
            return
    pytest.fail(f"no trace found where another policy is better: {misses}")


def make_history(folder: Path, mode: str = "write") -> History:
    return History(
        folder / "headrace-history.json",
        fingerprint="of this test",
        layers=(1, 2, 5),
        num_experts=8,
        mode=mode,
    )


def test_recent_routing_is_kept_beside_the_history(records: Records, tmp_path: Path) -> None:
    path = tmp_path / "headrace-history.trace"
    for _ in range(3):
        with open_with_history(records, make_history(tmp_path)) as store:
            for row, ids in random_visits(500, 1, rows=3):
                if row == 0:
                    store.note_step([(0, 1, False)])
                read_all(store, records.table.layers[row], ids)
        trace = read_trace(path)
        assert trace.native.num_visits == 3 * trace.num_tokens
    assert RECENT_TOKENS <= trace.num_tokens < RECENT_TOKENS + 256
    path.write_bytes(path.read_bytes()[:-1])
    with open_with_history(records, make_history(tmp_path, "read")) as store:
        assert store.policy == DEFAULT_POLICY  # put aside, and nothing fails
    assert RecentRouting(tmp_path / "none", HEADER, is_saved=True).num_tokens == 0


def open_with_history(records: Records, history: History) -> ExpertStore:
    return ExpertStore(
        records.table,
        num_slots=8,
        readers=ExpertConfig(),
        history=history,
        fingerprint="of this test",
    )


def test_a_full_drive_ends_the_trace_and_not_the_run(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with records.open(8, trace=Path("/dev/full")) as store:
        store.note_step([(0, 1, False)])
        read_all(store, 1, [0, 1])
    assert "the trace ends here" in caplog.text


def test_the_most_expensive_policy_is_small_beside_its_records() -> None:
    assert policy_bytes(48, 128) < 12 << 20
    assert policy_bytes(48, 512) < 16 << 20  # too many pairs to learn
