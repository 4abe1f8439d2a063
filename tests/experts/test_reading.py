"""What the caller said wins, then what was measured, then a measurement, then the default."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.checkpoint.records import RecordTable
from headrace.config import DEFAULT_BLOCK_BYTES, DEFAULT_READERS, ExpertConfig
from headrace.drive import find_drive
from headrace.errors import CheckpointError
from headrace.experts import reading
from headrace.experts.drive_cache import DriveCache, remembered
from headrace.experts.probe import Probed, ReadSetting
from headrace.experts.reading import observe_run, resolve_reading
from headrace.inspect import open_model
from headrace.llm import resolve_model

FOUND = ReadSetting(2, 256 << 10, True)
AUTO = ExpertConfig()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def table() -> RecordTable:
    records = open_model(resolve_model("demo"))[1].records
    assert records is not None
    return records


def found(table: RecordTable, setting: ReadSetting = FOUND) -> Probed:
    return Probed(setting, 1e9, 0.9e9, 1.1e9, table.record_bytes)


def remember(table: RecordTable, setting: ReadSetting = FOUND) -> None:
    drive = find_drive(table.files[0])
    DriveCache().remember(drive, remembered(found(table, setting), drive))


def settings(config: ExpertConfig) -> tuple[int, int, bool]:
    return config.num_readers, config.largest_read_bytes, config.is_direct


def test_nothing_known_is_the_default(table: RecordTable) -> None:
    got = resolve_reading(AUTO, table)
    assert got.source == "default" and got.drive_bytes_per_s is None
    assert settings(got.experts) == (DEFAULT_READERS, DEFAULT_BLOCK_BYTES, True)
    assert resolve_reading(AUTO, None).source == "default"


def test_what_is_remembered_fills_what_is_open(table: RecordTable) -> None:
    remember(table, replace(FOUND, direct=False))
    got = resolve_reading(AUTO, table)
    assert got.source == "remembered" and got.drive_bytes_per_s == 1e9
    assert settings(got.experts) == (2, 256 << 10, False)
    some = resolve_reading(replace(AUTO, readers=7), table)
    assert some.source == "option" and settings(some.experts) == (7, 256 << 10, False)
    direct = resolve_reading(replace(AUTO, direct=True), table)
    assert direct.source == "remembered" and settings(direct.experts) == (2, 256 << 10, True)


def test_options_need_no_measurement(table: RecordTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "find_drive", None)  # not called
    given = replace(AUTO, readers=3, block_bytes=8192, direct=False)
    got = resolve_reading(given, table, probe_bytes=1 << 30)
    assert got.experts == given and got.source == "option"


def test_a_first_start_measures_once(table: RecordTable, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake(places: object, drive: object, **options: object) -> Probed:
        calls.append(options)
        return found(table)

    monkeypatch.setattr(reading, "probe", fake)
    assert resolve_reading(AUTO, table, probe_bytes=123).source == "default"
    assert calls == []  # the demo is too small to be worth a second
    monkeypatch.setattr(reading, "LEAST_RECORDS_BYTES", 0)
    assert resolve_reading(AUTO, table).source == "default"
    assert calls == []  # not allowed
    got = resolve_reading(replace(AUTO, verify=False), table, probe_bytes=123)
    assert got.source == "measured" and settings(got.experts) == (2, 256 << 10, True)
    assert calls == [{"max_memory_bytes": 123, "with_checksum": False}]
    assert resolve_reading(AUTO, table, probe_bytes=123).source == "remembered"
    assert len(calls) == 1


def test_a_probe_that_fails_or_finds_nothing_stops_no_run(
    table: RecordTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("file cannot be read: x")

    monkeypatch.setattr(reading, "LEAST_RECORDS_BYTES", 0)
    monkeypatch.setattr(reading, "probe", lambda *_, **__: None)
    assert resolve_reading(AUTO, table, probe_bytes=123).source == "default"
    monkeypatch.setattr(reading, "probe", fail)
    with caplog.at_level(logging.WARNING):
        assert resolve_reading(AUTO, table, probe_bytes=123).source == "default"
    assert "drive not measured: file cannot be read: x" in caplog.text


def test_readers_that_repack_stay_at_least_four(table: RecordTable) -> None:
    remember(table)
    got = resolve_reading(AUTO, replace(table, repack="bf16"))
    assert settings(got.experts) == (DEFAULT_READERS, 256 << 10, True)
    remember(table, replace(FOUND, readers=8))
    assert resolve_reading(AUTO, replace(table, repack="bf16")).experts.readers == 8


def test_a_run_at_another_speed_ends_the_memory(table: RecordTable) -> None:
    remember(table)
    got = resolve_reading(AUTO, table)
    observe_run(got, bytes_read=10**10, busy_s=10.0)
    assert resolve_reading(AUTO, table).source == "remembered"
    own = resolve_reading(replace(AUTO, readers=1), table)
    observe_run(own, bytes_read=10**10, busy_s=100.0)  # the caller's own choice is not the drive's
    assert resolve_reading(AUTO, table).source == "remembered"
    observe_run(got, bytes_read=10**10, busy_s=100.0)
    assert resolve_reading(AUTO, table).source == "default"


def test_a_drive_that_cannot_be_looked_at_stops_no_run(
    table: RecordTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reading, "find_drive", fail)
    assert resolve_reading(AUTO, table, probe_bytes=123).source == "default"
    assert "drive not known" in caplog.text
