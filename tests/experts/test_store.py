"""The expert store against the bytes of its files: every byte, every counter, every fault."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.errors import CheckpointError, ConfigError, ExpertReadError, ShapeError
from headrace.experts import ExpertStore

from .conftest import Records, make_records, read_all

Inject = Callable[..., None]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.001)


def settle(store: ExpertStore) -> None:
    """Wait until no advised read is under way any more."""
    last = -1
    while (now := store.stats().prefetch_bytes) != last:
        last = now
        time.sleep(0.05)


@pytest.mark.parametrize("num_slots", [2, 3, 5, 24])
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
def test_records_are_whole_for_every_cache_size(
    records: Records, num_slots: int, readers: int, block_bytes: int
) -> None:
    rng = np.random.default_rng(3)
    with records.open(num_slots, readers=readers, block_bytes=block_bytes) as store:
        for _ in range(30):
            for layer in records.table.layers:
                ids = rng.integers(0, 8, (rng.integers(1, 4), 4))
                got = read_all(store, layer, ids)
                assert sorted(got) == sorted(set(ids.ravel().tolist()))
                for expert, content in got.items():
                    records.check(layer, expert, content)
            store.debug_check()
        stats = store.stats()
    assert stats.hits + stats.misses == stats.requests
    assert stats.bytes_read == stats.misses * records.table.record_bytes
    assert stats.reread_bytes == stats.bytes_read - 24 * records.table.record_bytes
    assert (stats.evictions > 0) == (num_slots < 24)
    assert 1 <= stats.reads_in_flight_max <= readers
    assert stats.drive_busy_ns > 0


def test_everything_resident_reads_each_record_once(records: Records) -> None:
    with records.open(24) as store:
        for _ in range(3):
            for layer in records.table.layers:
                read_all(store, layer, range(8))
        stats = store.stats()
    assert (stats.requests, stats.misses, stats.evictions) == (72, 24, 0)


def test_layers_with_records_of_their_own_size(records: Records) -> None:
    """Slots fit the largest; of a smaller one its own bytes are read, checked and shown."""
    table, sizes = records.table, np.array([12288, 4096, 8192])
    checksum = [
        [_core.checksum(record[:size]) for record in row]
        for row, size in zip(records.bytes, sizes, strict=True)
    ]
    table = replace(
        table,
        layouts=tuple(replace(table.shape, record_bytes=int(size)) for size in sizes),
        length=np.broadcast_to(sizes[:, None, None], table.length.shape),
        checksum=np.array(checksum, np.uint64),
    )
    order = np.random.default_rng(3)
    with Records(table, records.bytes).open(5) as store:
        assert store.record_bytes == 12288
        for _ in range(20):
            row = int(order.integers(3))
            found = read_all(store, table.layers[row], order.permutation(8)[:3])
            for expert, data in found.items():
                np.testing.assert_array_equal(data, records.bytes[row, expert, : sizes[row]])
        stats = store.stats()
        assert stats.misses * 4096 < stats.bytes_read < stats.misses * 12288
    short = replace(table, length=np.full_like(table.length, 12288))
    with pytest.raises(CheckpointError, match=r"12288 bytes .*, expected 4096 bytes"):
        Records(short, records.bytes).open()


def test_a_request_is_a_distinct_expert(records: Records) -> None:
    with records.open(8) as store:
        lease = store.acquire(1, np.array([[3, 1], [1, 7], [3, 1]], np.int32))
        assert lease.expert_ids.tolist() == [1, 3, 7]
        assert lease.num_tokens.tolist() == [3, 2, 1]
        lease.release()
        assert store.stats().requests + store.stats().cancelled == 3


def test_hits_are_handed_out_before_misses(records: Records, faults: Inject) -> None:
    with records.open(8) as store:
        read_all(store, 1, [5])
        faults("delay", count=-1)
        with store.acquire(1, np.array([[2, 5]], np.int32)) as lease:
            assert lease.next_ready() == [1]
            assert lease.next_ready() == [0]
            assert lease.next_ready() == []


def test_frequent_records_survive_a_scan(records: Records) -> None:
    with records.open(6, readers=2) as store:
        for _ in range(4):
            read_all(store, 1, [0, 1, 2])
        for layer in (2, 5):
            read_all(store, layer, range(8))  # a prefill over other layers
        before = store.counters()
        read_all(store, 1, [0, 1, 2])
        assert store.counters().since(before).hits == 3


def test_many_records_may_be_kept_at_once(records: Records) -> None:
    with records.open(8, read_ahead=1) as store:
        with store.acquire(2, np.arange(8, dtype=np.int32)[None]) as lease:
            handed: list[int] = []
            while ready := lease.next_ready():  # no done in between
                handed += ready
            for index in handed:
                records.check(2, index, lease.data(index))
        store.debug_check()


def test_two_leases_share_one_read(records: Records, faults: Inject) -> None:
    faults("delay", count=-1)
    with records.open(8) as store:
        first = store.acquire(1, np.array([[4]], np.int32))
        second = store.acquire(1, np.array([[4]], np.int32))
        for lease in (second, first):
            assert lease.next_ready() == [0]
            records.check(1, 4, lease.data(0))
        stats = store.stats()
        assert (stats.misses, stats.hits, stats.joined) == (1, 1, 1)
        assert stats.bytes_read == records.table.record_bytes
        first.release()
        second.release()
        store.debug_check()


def test_two_leases_of_one_thread_do_not_wait_for_each_other(records: Records) -> None:
    with records.open(2) as store:
        read_all(store, 1, [0, 1])
        holder = store.acquire(1, np.array([[0, 1]], np.int32))  # both slots, not handed out yet
        got = read_all(store, 2, range(8))
        assert len(got) == 8
        assert store.stats().stolen > 0
        seen = 0
        while ready := holder.next_ready():
            for index in ready:
                records.check(1, index, holder.data(index))
                holder.done(index)
                seen += 1
        assert seen == 2
        holder.release()
        store.debug_check()


def test_leases_of_many_threads(records: Records) -> None:
    problems: list[BaseException] = []
    with records.open(3) as store:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    layer = int(rng.choice(records.table.layers))
                    for expert, content in read_all(store, layer, rng.integers(0, 8, 5)).items():
                        records.check(layer, expert, content)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "leases wait for each other"
        assert not problems
        store.debug_check()


# Advice


def test_prefetched_records_are_hits_and_counted_apart(records: Records) -> None:
    with records.open(8) as store:
        store.prefetch(2, np.array([1, 3], np.int32))
        wait_until(lambda: store.stats().prefetch_bytes == 2 * store.record_bytes)
        got = read_all(store, 2, [1, 3, 4])
        stats = store.stats()
        assert (stats.hits, stats.prefetch_hits, stats.misses) == (2, 2, 1)
        assert stats.bytes_read == store.record_bytes
        read_all(store, 2, [1])
        assert store.stats().prefetch_hits == 2  # the second use is an ordinary hit
        for expert, content in got.items():
            records.check(2, expert, content)


def test_prefetch_does_not_push_out_a_hotter_record(records: Records) -> None:
    with records.open(4) as store:
        read_all(store, 1, range(4))
        store.prefetch(2, np.arange(8, dtype=np.int32))
        settle(store)
        assert store.stats().prefetch_bytes == 0
        before = store.counters()
        read_all(store, 1, range(4))
        assert store.counters().since(before).misses == 0


def test_a_demand_overtakes_and_joins_advice(records: Records, faults: Inject) -> None:
    faults("delay", count=-1)
    with records.open(24, readers=1) as store:
        store.warm([(1, expert) for expert in range(8)])
        got = read_all(store, 1, [6, 7])
        for expert, content in got.items():
            records.check(1, expert, content)
        stats = store.stats()
        assert stats.prefetch_bytes + stats.bytes_read < 8 * store.record_bytes
        store.debug_check()


def test_advice_gives_its_slots_to_demands(records: Records, faults: Inject) -> None:
    faults("delay", count=-1)
    with records.open(4, readers=2) as store:
        store.warm([(1, expert) for expert in range(4)])
        assert len(read_all(store, 2, range(8))) == 8
        store.debug_check()


def test_warm_fills_free_slots_and_evicts_nothing(records: Records) -> None:
    with records.open(5) as store:
        read_all(store, 5, [0])
        store.warm([(2, expert) for expert in range(8)])
        settle(store)
        stats = store.stats()
        assert stats.prefetch_bytes == 4 * store.record_bytes
        assert stats.evictions == 0
        before = store.counters()
        read_all(store, 2, range(4))
        read_all(store, 5, [0])
        assert store.counters().since(before).misses == 0


# Faults


def test_short_reads_are_completed(records: Records, faults: Inject) -> None:
    faults("short", count=-1)
    with records.open(8) as store:
        for expert, content in read_all(store, 1, range(8)).items():
            records.check(1, expert, content)
        assert _core.num_faults_fired() > 8
        assert store.stats().failed_reads == 0


@pytest.mark.parametrize("direct", [True, False])
def test_a_failed_read_names_the_place_and_is_not_cached(
    records: Records, faults: Inject, direct: bool
) -> None:
    offset = int(records.table.offset[1, 6, 0])
    faults("eio", offset=offset, path_contains="experts-002")
    with records.open(8, direct=direct) as store:
        with pytest.raises(ExpertReadError) as caught:
            read_all(store, 2, range(8))
        message = str(caught.value)
        for part in (
            "layer 2, expert 6",
            "experts-002.bin",
            f"offset {offset}",
            "12288",
            "errno 5",
        ):
            assert part in message
        assert "hint: " in message
        store.debug_check()
        records.check(2, 6, read_all(store, 2, [6])[6])  # the drive recovered
        assert store.stats().failed_reads == 1


def test_a_truncated_file_is_a_short_record(records: Records) -> None:
    path = records.table.files[0]
    last = int(records.table.offset[0].argmax())
    with records.open(8) as store:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 5000)
        with pytest.raises(ExpertReadError, match=f"short: layer 1, expert {last}.*\n.*got 7288"):
            read_all(store, 1, [last])
        first = int(records.table.offset[0].argmin())
        records.check(1, first, read_all(store, 1, [first])[first])
        store.debug_check()


def test_a_removed_file_stays_readable(records: Records) -> None:
    with records.open(8) as store:
        records.table.files[0].unlink()
        records.check(1, 3, read_all(store, 1, [3])[3])


def test_a_flipped_bit_fails_the_checksum(records: Records, faults: Inject) -> None:
    faults("flip", path_contains="experts-005")
    expected = int(records.table.checksum[2, 4])  # type: ignore[index]
    with records.open(8) as store:
        with pytest.raises(
            ExpertReadError, match=rf"damaged: layer 5, expert 4.*\n.*{expected:016x}"
        ):
            read_all(store, 5, [4])
        records.check(5, 4, read_all(store, 5, [4])[4])
        store.debug_check()


def test_without_verify_a_flipped_bit_passes(records: Records, faults: Inject) -> None:
    faults("flip")
    with records.open(8, verify=False) as store:
        got = read_all(store, 5, [4])[4]
    assert (got != records.bytes[2, 4]).sum() == 1


def test_refused_direct_reads_fall_back_to_buffered_ones(records: Records, faults: Inject) -> None:
    faults("einval", path_contains="experts-001")
    with records.open(8) as store:
        assert store.stats().read_mode == "direct"
        records.check(1, 2, read_all(store, 1, [2])[2])
        assert store.stats().read_mode == "buffered"


def test_the_planted_bug_hands_out_stale_bytes(records: Records, faults: Inject) -> None:
    with records.open(2) as store:
        read_all(store, 1, [0, 1])
        faults("stale_slot")
        got = read_all(store, 1, [2])[2]
    assert (got != records.bytes[0, 2]).any()


def test_one_bad_record_ends_only_the_lease_that_needs_it(records: Records, faults: Inject) -> None:
    faults("eio", count=-1, offset=int(records.table.offset[0, 3, 0]), path_contains="experts-001")
    with records.open(4) as store:
        bad = store.acquire(1, np.array([[3, 5]], np.int32))
        good = store.acquire(1, np.array([[5, 6]], np.int32))
        seen = []
        while ready := good.next_ready():
            seen += ready
            for index in ready:
                good.done(index)
        assert sorted(seen) == [0, 1]
        with pytest.raises(ExpertReadError):
            while bad.next_ready():
                pass
        bad.release()
        good.release()
        store.debug_check()


@pytest.mark.parametrize("begun_by", ["warm", "prefetch", "lookahead", "lease"])
@pytest.mark.parametrize("is_over", [True, False])
def test_who_joins_a_read_that_fails_has_it_read_again(
    records: Records, faults: Inject, begun_by: str, is_over: bool
) -> None:
    """A fault of before the demand is none of its affair; one that lasts is told once."""

    def begin(store: ExpertStore) -> None:
        if begun_by == "warm":
            store.warm([(5, 3)])
        elif begun_by == "prefetch":
            store.prefetch(5, np.array([3], np.int32))
        elif begun_by == "lookahead":
            store.look_ahead(5, np.array([[3]], np.int32))
        else:
            with store.acquire(5, np.array([[3]], np.int32)):
                wait_until(lambda: store.stats().reads_in_flight_max > 0)

    offset = int(records.table.offset[2, 3, 0])
    num_joined = 0
    while num_joined == 0:  # a slow test machine may come too late to join
        _core.clear_faults()
        faults("delay", count=-1)
        with records.open(num_slots=16, readers=1) as store:
            faults("eio", count=1 if is_over else -1, offset=offset, path_contains="experts-005")
            begin(store)
            with store.acquire(5, np.array([[3]], np.int32)) as lease:
                num_joined = store.stats().joined
                if is_over:
                    assert lease.next_ready() == [0]
                    records.check(5, 3, lease.data(0))
                else:
                    with pytest.raises(ExpertReadError, match="layer 5, expert 3"):
                        lease.next_ready()
            store.debug_check()
            if num_joined > 0:
                assert store.stats().failed_reads == (1 if is_over else 2)
            _core.clear_faults()
            records.check(5, 3, read_all(store, 5, [3])[3])
            store.debug_check()


def test_advice_leaves_a_bad_record_to_a_demand(records: Records, faults: Inject) -> None:
    """It is not read in vain time and again, and no error reaches who does not ask for it."""
    with records.open(num_slots=16) as store:
        faults("eio", count=-1, offset=int(records.table.offset[2, 3, 0]))
        store.look_ahead(5, np.array([[3]], np.int32))
        wait_until(lambda: store.stats().failed_reads == 1)
        for _ in range(5):
            store.look_ahead(5, np.array([[3, 6]], np.int32))
            store.prefetch(5, np.array([3], np.int32))
            store.warm([(5, 3)])
            records.check(5, 6, read_all(store, 5, [6])[6])
        assert store.stats().failed_reads == 1
        _core.clear_faults()
        records.check(5, 3, read_all(store, 5, [3])[3])
        store.debug_check()


def test_random_faults_leak_no_slot(records: Records, faults: Inject) -> None:
    rng = np.random.default_rng(11)
    num_failed = 0
    with records.open(3) as store:
        for step in range(150):
            if step % 3 == 0:
                faults(str(rng.choice(["eio", "end", "flip", "short"])), after=int(rng.integers(6)))
            layer = int(rng.choice(records.table.layers))
            store.prefetch(layer, rng.integers(0, 8, 3).astype(np.int32))
            try:
                for expert, content in read_all(store, layer, rng.integers(0, 8, 4)).items():
                    records.check(layer, expert, content)
            except ExpertReadError:
                num_failed += 1
            store.debug_check()
        _core.clear_faults()
        assert num_failed > 5
        for layer in records.table.layers:
            for expert, content in read_all(store, layer, range(8)).items():
                records.check(layer, expert, content)
        store.debug_check()


# Leases and stores that end early


def test_a_lease_released_early_leaves_its_reads_to_the_cache(
    records: Records, faults: Inject
) -> None:
    faults("delay", count=-1)
    with records.open(6, readers=2) as store:
        for _ in range(5):
            store.acquire(1, np.arange(8, dtype=np.int32)[None]).release()
            store.debug_check()
        _core.clear_faults()
        for expert, content in read_all(store, 1, range(8)).items():
            records.check(1, expert, content)
        stats = store.stats()
        assert stats.cancelled > 0
        assert stats.hits + stats.misses == stats.requests
        store.debug_check()


def test_closing_while_reads_are_in_flight(records: Records, faults: Inject) -> None:
    faults("delay", count=-1)
    store = records.open(8, readers=1)
    lease = store.acquire(1, np.arange(8, dtype=np.int32)[None])
    store.prefetch(2, np.arange(8, dtype=np.int32))
    store.close()
    with pytest.raises(ExpertReadError, match="closed"):
        while lease.next_ready():
            pass
    lease.release()
    with pytest.raises(ExpertReadError, match="closed"):
        store.acquire(1, np.array([[0]], np.int32))
    store.close()


def test_closing_wakes_a_waiting_lease(records: Records, faults: Inject) -> None:
    faults("delay", count=-1)
    store = records.open(2, readers=1)
    lease = store.acquire(1, np.arange(8, dtype=np.int32)[None])
    outcome: list[object] = []

    def wait() -> None:
        try:
            while ready := lease.next_ready():
                outcome.append(ready)
                for index in ready:
                    lease.done(index)
        except ExpertReadError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: bool(outcome))
    store.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(outcome[-1], ExpertReadError)


def test_bytes_outlive_a_closed_store(records: Records) -> None:
    store = records.open(4)
    lease = store.acquire(1, np.array([[2]], np.int32))
    assert lease.next_ready() == [0]
    store.close()
    del store
    records.check(1, 2, lease.data(0))
    lease.release()


# Size and doors


def test_resize_shrinks_to_what_is_not_leased_and_grows_back(records: Records) -> None:
    with records.open(8) as store:
        read_all(store, 1, range(8))
        with store.acquire(1, np.array([[0, 1, 2]], np.int32)):
            assert store.resize(2) == 3
            store.debug_check()
        assert store.resize(2) == 2
        for expert, content in read_all(store, 2, range(8)).items():
            records.check(2, expert, content)
        assert store.resize(8) == 8
        for expert, content in read_all(store, 5, range(8)).items():
            records.check(5, expert, content)
        store.debug_check()
        with pytest.raises(ConfigError):
            store.resize(9)


def test_slots_are_not_more_than_records(records: Records) -> None:
    with records.open(10_000) as store:
        assert store.num_slots == 24


@pytest.mark.parametrize(("layer", "ids"), [(0, [0]), (9, [0]), (-1, [0]), (1, [8]), (1, [-1])])
def test_ids_out_of_range(records: Records, layer: int, ids: list[int]) -> None:
    with records.open(4) as store:
        with pytest.raises(ShapeError):
            read_all(store, layer, ids)
        with pytest.raises(ShapeError):
            store.prefetch(layer, np.array(ids, np.int32))
        assert store.stats().requests == 0
        store.debug_check()


def test_wrong_dtypes_are_not_copied_in_silence(records: Records) -> None:
    with records.open(4) as store, pytest.raises(TypeError):
        store.acquire(1, np.array([[1]], np.int64))  # type: ignore[arg-type]


def test_a_missing_file(records: Records) -> None:
    records.table.files[1].unlink()
    with pytest.raises(CheckpointError, match=r"experts-002\.bin"):
        records.open()


def test_inconsistent_tables_are_refused(records: Records) -> None:
    table = records.table
    for broken in (
        replace(table, offset=table.offset + 512),
        replace(table, length=table.length - 4096),
        replace(table, file=table.file + 1),
        replace(table, layers=table.layers[:2]),
        replace(table, layouts=table.layouts[:2]),
        replace(table, layouts=(replace(table.shape, record_bytes=5000), *table.layouts[1:])),
    ):
        with pytest.raises(CheckpointError, match="inconsistent"):
            Records(broken, records.bytes).open()


def test_counts_and_frequencies(records: Records) -> None:
    with records.open(4, half_life_tokens=1) as store:
        read_all(store, 1, [[0, 1]])
        read_all(store, 2, [[2, 3]])
        read_all(store, 1, [[0, 2]])  # the next step: one token later
        assert store.routed_counts()[0].tolist() == [2, 1, 1, 0, 0, 0, 0, 0]
        np.testing.assert_allclose(store.frequencies()[0, :3], [1.5, 0.5, 1.0])
        np.testing.assert_allclose(store.frequencies()[1, 2:4], [0.5, 0.5])


def test_large_records_are_split(tmp_path: Path) -> None:
    records = make_records(tmp_path, layers=(0,), num_experts=4, pages=700)
    with records.open(2, readers=3) as store:
        for expert, content in read_all(store, 0, range(4)).items():
            records.check(0, expert, content)
        assert store.stats().reads_in_flight_max > 1


def test_what_is_held_is_told_by_expert(records: Records) -> None:
    with records.open(num_slots=4) as store:
        assert not store.held(2).any() and store.held(2).shape == (8,)
        read_all(store, 2, [1, 5])
        assert np.flatnonzero(store.held(2)).tolist() == [1, 5]
        assert not store.held(5).any()
        assert store.num_untouched_slots == 2
        with pytest.raises(ShapeError):
            store.held(3)


def test_slots_without_memory_are_counted(records: Records) -> None:
    with records.open(num_slots=8) as store:
        read_all(store, 1, range(3))
        assert store.num_untouched_slots == 5
        read_all(store, 1, range(8))
        read_all(store, 2, range(8))  # in the places of others
        assert store.num_untouched_slots == 0
        store.resize(6)
        assert store.num_untouched_slots == 0
        store.resize(8)
        assert store.num_untouched_slots == 2


def test_lookahead_reads_early_and_is_judged(records: Records) -> None:
    with records.open(num_slots=16, lookahead="auto") as store:
        assert store.wants_advice
        for layer in (1, 2):  # sixteen records: no slot is free
            read_all(store, layer, [range(8)])
        store.look_ahead(5, np.array([[3, 6]], np.int32))
        wait_until(lambda: store.stats().prefetch_bytes == 2 * store.record_bytes)
        for expert, data in read_all(store, 5, [3, 4]).items():
            records.check(5, expert, data)
        stats = store.stats()
        assert (stats.lookahead_named, stats.lookahead_wanted, stats.lookahead_right) == (2, 2, 1)
        assert (stats.lookahead_used, stats.lookahead_unused) == (1, 0)
        assert stats.misses == 17
        store.debug_check()
        store.look_ahead(1, np.array([[0, 1]], np.int32))  # the place of the wrong one comes free
        store.look_ahead(2, np.array([[0, 1]], np.int32))
        assert store.stats().lookahead_unused >= 1
        store.debug_check()


def test_lookahead_gives_up_no_more_slots_than_are_set_aside(records: Records) -> None:
    with records.open(num_slots=16) as store:
        for _ in range(20):
            for layer in (1, 2):
                read_all(store, layer, [range(8)])
        before = store.stats()
        for _ in range(50):  # wrong every time
            store.look_ahead(5, np.arange(8, dtype=np.int32)[None])
        wait_until(lambda: store.stats().prefetch_bytes == 2 * store.record_bytes)
        for layer in (1, 2):
            read_all(store, layer, [range(8)])
        assert store.stats().misses - before.misses <= 4  # two slots, and what took their place


def test_a_step_of_many_tokens_reads_the_next_layer_ahead(records: Records) -> None:
    with records.open(num_slots=18) as store:
        for layer in (1, 2):
            read_all(store, layer, [range(8)])
        before = store.stats()
        store.look_ahead(5, np.arange(32, dtype=np.int32)[:, None] % 8)
        wait_until(lambda: store.stats().prefetch_bytes == 6 * store.record_bytes)
        for expert, data in read_all(store, 5, [range(8)]).items():
            records.check(5, expert, data)
        stats = store.stats()
        assert (stats.lookahead_used, stats.misses - before.misses) == (6, 2)
        store.debug_check()


@pytest.mark.parametrize(("num_slots", "lookahead"), [(7, "auto"), (24, "auto"), (16, "off")])
def test_lookahead_wants_no_advice_where_it_cannot_help(
    records: Records, num_slots: int, lookahead: str
) -> None:
    with records.open(num_slots=num_slots, lookahead=lookahead) as store:
        assert not store.wants_advice


def test_lookahead_that_is_always_wrong_reads_no_more(records: Records) -> None:
    with records.open(num_slots=16) as store:

        def run(turns: int) -> int:
            for turn in range(turns):
                for layer, other in ((1, 2), (2, 5), (5, 1)):
                    read_all(store, layer, [range(turn % 3, 8, 3)])
                    store.look_ahead(other, np.array([[(turn + 2) % 3]], np.int32))
            return store.stats().prefetch_bytes

        run(60)
        settle(store)
        before = store.stats().prefetch_bytes
        assert run(60) == before
        assert store.stats().lookahead_named > 200
        assert store.stats().lookahead_right == 0


def test_a_bad_record_read_by_lookahead_fails_who_asks_for_it(
    records: Records, faults: Callable[..., None]
) -> None:
    with records.open(num_slots=16) as store:
        offset = int(records.table.offset[2, 3, 0])
        faults("eio", count=-1, path_contains="experts-005", offset=offset)
        store.look_ahead(5, np.array([[3, 6]], np.int32))
        wait_until(lambda: store.stats().failed_reads == 1)
        store.debug_check()
        records.check(5, 6, read_all(store, 5, [6])[6])
        with pytest.raises(ExpertReadError, match="layer 5, expert 3"):
            read_all(store, 5, [3])
