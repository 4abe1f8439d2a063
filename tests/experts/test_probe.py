"""Measuring a drive and choosing how to read it. No test asserts a speed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.drive import Drive, find_drive
from headrace.errors import CheckpointError, ConfigError
from headrace.experts import drive_cache, probe
from headrace.experts.drive_cache import DriveCache, DriveRecord, remembered
from headrace.experts.probe import (
    ColdPlaces,
    Probed,
    Rate,
    ReadSetting,
    Window,
    choose,
    measure_rates,
    measure_window,
)

PAGE = 4096
RECORD = 16 * PAGE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(np.random.default_rng(1).bytes(64 * RECORD + 100))
    return path


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    return replace(find_drive(tmp_path), filesystem="ext4")


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    _core.clear_faults()


def setting(readers: int = 2, block_bytes: int = 4 * PAGE, direct: bool = True) -> ReadSetting:
    return ReadSetting(readers, block_bytes, direct)


def window(bytes_per_s: float, **other: object) -> Window:
    made = Window(1_000_000, 1_000_000 / bytes_per_s, 1e-3, True, True)
    return replace(made, **other)  # type: ignore[arg-type]


def rate(speed: float | None, how: ReadSetting) -> Rate:
    made = Rate(how)
    if speed is not None:
        made.add(window(speed, is_direct=how.direct), float("inf"))
    return made


def test_every_place_is_given_out_once(file: Path) -> None:
    places = ColdPlaces.of_files([file], RECORD, seed=3)
    assert places.total_bytes == places.bytes_left == 64 * RECORD
    taken = [place for _ in range(20) for place in places.take(7)]
    assert len(taken) == len(set(taken)) == 64 and places.bytes_left == 0
    assert sorted(taken) == [(0, i * RECORD) for i in range(64)] != taken
    assert places.take(1) == [] and places.take(0) == []


def test_a_window_reads_whole_records_in_blocks(file: Path, drive: Drive) -> None:
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    got = measure_window(places, setting(), drive, num_bytes=8 * RECORD)
    assert got is not None and got.bytes_read == 8 * RECORD
    assert got.seconds > 0 and got.latency_s > 0
    assert places.bytes_left == 56 * RECORD
    least = measure_window(places, setting(readers=4), drive, num_bytes=1)
    assert least is not None and least.bytes_read == 5 * RECORD
    assert measure_window(places, setting(), drive, num_bytes=1000 * RECORD) is None


def counted(monkeypatch: pytest.MonkeyPatch, counts: list[int | None]) -> None:
    """Let the kernel's count of bytes fetched be this, call by call."""
    answers = iter(counts)
    monkeypatch.setattr(probe, "drive_bytes_read", lambda: next(answers))


def test_reads_that_a_cache_answered_are_no_measurement(
    file: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    counted(monkeypatch, [100, 100 + 3 * RECORD, 500, 500 + 2 * RECORD])
    rates = measure_rates(places, [setting()], drive, rounds=2, window_bytes=3 * RECORD)
    assert len(rates[0].windows) == 1 and rates[0].num_cached == 1
    assert rates[0].windows[0].from_drive is True


def test_the_kernel_knows_its_cache(file: Path, drive: Drive) -> None:
    """The files were just written: buffered reads of them are answered by the page cache."""
    before = probe.drive_bytes_read()
    if before is None or drive.is_memory or not drive.is_counted:
        pytest.skip("this system does not count the bytes that a process fetches from drives")
    file.read_bytes()
    places = [(0, i * RECORD) for i in range(8)]
    _core.probe_reads(
        [str(file)], places, record_bytes=RECORD, block_bytes=RECORD, readers=2, direct=False,
        with_checksum=True,
    )  # fmt: skip
    after = probe.drive_bytes_read()
    assert after is not None and after - before < 8 * RECORD * probe.COUNTED_SHARE


def test_memory_is_no_drive(file: Path, drive: Drive) -> None:
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    got = measure_window(
        places, setting(), replace(drive, filesystem="tmpfs"), num_bytes=3 * RECORD
    )
    assert got is not None and got.from_drive is False


def test_where_nobody_counts_half_the_speed_of_memory_is_too_fast(drive: Drive) -> None:
    uncounted = Rate(setting())
    uncounted.add(window(3e9, from_drive=None), 8e9)
    uncounted.add(window(5e9, from_drive=None), 8e9)
    assert len(uncounted.windows) == 1 and uncounted.num_cached == 1
    counts = Rate(setting())
    counts.add(window(5e9), 8e9)
    assert len(counts.windows) == 1


def test_refused_direct_reads_are_told_apart(file: Path, drive: Drive) -> None:
    _core.inject_fault("einval", count=-1, path_contains=file.name)
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    rates = measure_rates(
        places, [setting(), setting(direct=False)], drive, rounds=1, window_bytes=RECORD
    )
    assert rates[0].num_refused == 1 and rates[0].bytes_per_s is None
    assert rates[1].num_refused == 0
    assert _core.num_faults_fired() >= 1  # readers that were at it together are all refused


def test_a_read_error_names_the_file(file: Path, drive: Drive) -> None:
    _core.inject_fault("eio", path_contains=file.name)
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    with pytest.raises(CheckpointError, match=r"data\.bin\n.*errno 5"):
        measure_window(places, setting(), drive, num_bytes=RECORD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"record_bytes": 100},
        {"block_bytes": 0},
        {"readers": 0},
        {"places": [(1, 0)]},
        {"places": [(0, 5)]},
    ],
)
def test_the_native_probe_checks_what_it_is_given(file: Path, wrong: dict[str, object]) -> None:
    values = {
        "places": [(0, 0)], "record_bytes": PAGE, "block_bytes": PAGE, "readers": 1,
        "direct": True, "with_checksum": False,
    } | wrong  # fmt: skip
    with pytest.raises(ConfigError):
        _core.probe_reads([str(file)], values.pop("places"), **values)


def test_settings_take_turns_and_end_with_the_places(file: Path, drive: Drive) -> None:
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    seen: list[int] = []
    rates = measure_rates(
        places, [setting(1), setting(2)], drive, rounds=50, window_bytes=RECORD,
        on_window=seen.append,
    )  # fmt: skip
    assert sum(seen) <= 64 * RECORD
    windows = [len(r.windows) + r.num_cached for r in rates]
    assert abs(windows[0] - windows[1]) <= 1 and sum(windows) == len(seen) > 20


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 1.0, 2: 1.2, 4: 1.25, 8: 1.3}, 4),
        ({1: 1.2, 2: 1.2, 4: 1.25, 8: 1.3}, 2),
        ({1: 1.3, 2: 1.0, 4: 1.0}, 1),
        ({1: 0.5, 2: 1.0, 4: 2.0, 8: 4.0}, 8),
        ({2: None, 4: 1.0}, 4),
    ],
)
def test_one_depth_more_than_the_fewest_near_the_best_is_chosen(
    speeds: dict[int, float | None], expected: int
) -> None:
    chosen = choose([rate(speed, setting(n, 1 << 20)) for n, speed in speeds.items()])
    assert chosen is not None and chosen.setting.readers == expected


def test_another_block_or_mode_must_win_clearly() -> None:
    usual = rate(1.0, setting(2, 1 << 20))
    for block, direct, speed, wins in [
        (8 << 20, True, 1.05, False),
        (8 << 20, True, 1.15, True),
        (1 << 20, False, 1.15, False),
        (1 << 20, False, 1.30, True),
    ]:
        other = rate(speed, setting(2, block, direct))
        assert choose([usual, other]) is (other if wins else usual)
    assert choose([]) is None and choose([rate(None, setting())]) is None


def test_without_direct_reads_buffered_ones_are_compared() -> None:
    rates = [rate(None, setting(2)), rate(1.0, setting(2, direct=False))]
    assert choose(rates) is rates[1]


@pytest.fixture
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FIRST_BYTES", RECORD)
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(probe, "WINDOW_S", 0.0)


def always_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    total = iter(range(0, 1 << 60, 1 << 40))
    monkeypatch.setattr(probe, "drive_bytes_read", lambda: next(total))


@pytest.mark.usefixtures("short_probe")
def test_a_probe_chooses_within_its_memory(
    file: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_counted(monkeypatch)
    monkeypatch.setattr(probe, "READERS", (1, 2, 4))
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    found = probe.probe(places, drive, max_memory_bytes=3 * RECORD)
    assert found is not None
    assert found.setting.readers in (1, 2) and found.record_bytes == RECORD
    assert 0 < found.slowest_bytes_per_s <= found.bytes_per_s <= found.fastest_bytes_per_s
    assert probe.probe(places, drive, max_memory_bytes=RECORD) is None


@pytest.mark.usefixtures("short_probe")
def test_a_probe_of_what_a_cache_answers_finds_nothing(
    file: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "drive_bytes_read", lambda: 0)
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    assert probe.probe(places, drive, max_memory_bytes=1 << 30) is None


@pytest.mark.usefixtures("short_probe")
def test_a_filesystem_without_direct_reads_is_probed_with_buffered_ones(
    file: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_counted(monkeypatch)
    _core.inject_fault("einval", count=-1, path_contains=file.name)
    places = ColdPlaces.of_files([file], RECORD, seed=0)
    found = probe.probe(places, drive, max_memory_bytes=6 * RECORD)
    assert found is not None and found.setting.direct is False


# The cache


@pytest.fixture
def entry(drive: Drive) -> DriveRecord:
    return remembered(Probed(setting(2, 1 << 20), 1e9, 0.9e9, 1.2e9, 5 << 20), drive)


def test_what_was_measured_is_found_again(tmp_path: Path, drive: Drive, entry: DriveRecord) -> None:
    path = tmp_path / "cache" / "drives.json"
    cache = DriveCache(path)
    assert cache.find(drive, 5 << 20) is None
    cache.remember(drive, entry)
    again = DriveCache(path)
    assert again.find(drive, 5 << 20) == again.find(drive, 7 << 20) == entry
    assert again.find(drive, 8 << 20) is None  # another class of sizes
    assert again.find(replace(drive, serial="other"), 5 << 20) is None
    assert entry.setting == setting(2, 1 << 20)
    assert [p.name for p in path.parent.iterdir()] == ["drives.json"]


def test_two_processes_keep_each_others_entries(
    tmp_path: Path, drive: Drive, entry: DriveRecord
) -> None:
    one, two = DriveCache(tmp_path / "d.json"), DriveCache(tmp_path / "d.json")
    other = replace(drive, serial="other")
    one.remember(drive, entry)
    two.remember(other, entry)
    found = DriveCache(tmp_path / "d.json")
    assert found.find(drive, 5 << 20) == found.find(other, 5 << 20) == entry


def test_a_run_at_another_speed_ends_an_entry(
    tmp_path: Path, drive: Drive, entry: DriveRecord
) -> None:
    def after(bytes_read: int, busy_s: float) -> bool:
        cache = DriveCache(tmp_path / "d.json")
        cache.remember(drive, entry)
        forgotten = cache.observe(drive, 5 << 20, bytes_read=bytes_read, busy_s=busy_s)
        kept = DriveCache(tmp_path / "d.json").find(drive, 5 << 20)
        assert (forgotten is None) == (kept is not None)
        return kept is not None

    assert after(10**10, 10.0)
    assert after(10**10, 19.0) and not after(10**10, 21.0)
    assert after(10**10, 5.1) and not after(10**10, 4.9)
    assert after(10**8, 10.0)  # too little to say anything
    assert after(10**10, 0.0)


def broken(change: Callable[[dict[str, object]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        change(next(iter(content["drives"].values())))
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"drives"', '"drive_s"'),
        lambda text: "[" * 100_000,
        broken(lambda e: e.pop("readers")),
        broken(lambda e: e.update(readers=0)),
        broken(lambda e: e.update(readers=True)),
        broken(lambda e: e.update(block_bytes=1000)),
        broken(lambda e: e.update(direct=1)),
        broken(lambda e: e.update(bytes_per_s=-1)),
        broken(lambda e: e.update(measured_at="yesterday")),
    ],
)
def test_a_damaged_file_is_put_aside_with_one_warning(
    tmp_path: Path,
    drive: Drive,
    entry: DriveRecord,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[str], str],
) -> None:
    path = tmp_path / "d.json"
    DriveCache(path).remember(drive, entry)
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    with caplog.at_level(logging.WARNING):
        cache = DriveCache(path)
        assert cache.find(drive, 5 << 20) is None
        cache.remember(drive, entry)
    assert [r.message.startswith("measurements of drives ignored") for r in caplog.records] == [
        True
    ]
    assert DriveCache(path).find(drive, 5 << 20) == entry  # and written anew


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, drive: Drive, entry: DriveRecord, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = DriveCache(tmp_path / "file" / "drives.json")
    cache.remember(drive, entry)
    assert "not saved" in caplog.text
    assert cache.find(drive, 5 << 20) == entry  # for this process


def test_the_users_cache_directory_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_cache.platformdirs, "user_cache_dir", lambda name: f"/nowhere/{name}")
    assert drive_cache.default_path() == Path("/nowhere/headrace/drives.json")
