"""`headrace bench disk`: what it reads, what it calls a drive, and what it leaves behind."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import _core, disk_bench, plan
from headrace.cli.bench import _target_path
from headrace.disk_bench import measure_curve, open_target
from headrace.drive import find_drive
from headrace.errors import ConfigError
from headrace.experts import probe, reading
from headrace.experts.drive_cache import DriveCache, default_path
from headrace.llm import resolve_model

RECORD = 64 << 10
FEW = ("--record", "64KiB", "--sizes", "16KiB,64KiB", "--readers", "1,2", "--windows", "2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _a_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests' folder is on, let it look like a drive whose reads the kernel counts."""
    total = iter(range(0, 1 << 62, 1 << 40))
    monkeypatch.setattr(probe, "drive_bytes_read", lambda: next(total))
    monkeypatch.setattr(
        disk_bench, "find_drive", lambda path: replace(find_drive(path), filesystem="ext4")
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.bin"
    path.write_bytes(np.random.default_rng(0).bytes(100 * RECORD))
    return path


def test_the_curve_of_a_file(cli: Any, file: Path) -> None:
    status, out, _ = cli("bench", "disk", file, *FEW, "--json")
    report = json.loads(out)
    assert status == 0 and report["kind"] == "file" and report["record_bytes"] == RECORD
    assert report["is_verified"] and report["bytes_read"] <= 100 * RECORD
    shown = {(r["mode"], r["block_bytes"], r["readers"]) for r in report["rates"]}
    assert shown == {
        (m, b, n) for m in ("direct", "buffered") for b in (16 << 10, RECORD) for n in (1, 2)
    }
    for rate in report["rates"]:
        if rate["num_refused"] == 0:
            assert rate["num_windows"] == 2
            assert 0 < rate["slowest_bytes_per_s"] <= rate["bytes_per_s"]
            assert rate["bytes_per_s"] <= rate["fastest_bytes_per_s"] and rate["latency_s"] > 0
    assert any(" min ago" in note for note in report["notes"])
    assert report["machine"] and report["drive"]["filesystem"] == "ext4"


def test_the_table_for_people_and_what_is_remembered(cli: Any, file: Path) -> None:
    assert "; not remembered" in cli("bench", "disk", file, *FEW)[1], "what was left out may win"
    drive = disk_bench.find_drive(file)
    assert DriveCache().find(drive, RECORD) is None
    status, out, err = cli("bench", "disk", file, "--record", "64KiB", "--windows", "1")
    assert status == 0 and err == ""
    assert "machine: " in out and "drive: " in out and "each once" in out
    assert "buffered, GB/s: median" in out and "64 KiB" in out and "; remembered" in out
    entry = DriveCache().find(drive, RECORD)
    assert entry is not None and entry.readers in (1, 2, 4, 8) and entry.record_bytes == RECORD


def test_a_directory_gets_a_scratch_file_that_goes_away(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(disk_bench, "SCRATCH_BYTES", 100 * RECORD)
    status, out, _ = cli("bench", "disk", folder, *FEW, "--json")
    report = json.loads(out)
    assert status == 0 and report["kind"] == "scratch" and not report["is_remembered"]
    assert not default_path().exists()
    assert list(folder.iterdir()) == []


def test_a_scratch_file_goes_away_after_a_failure(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_bench, "SCRATCH_BYTES", 100 * RECORD)
    folder = tmp_path / "folder"
    folder.mkdir()
    _core.inject_fault("eio", after=3, path_contains=".headrace-disk-")
    try:
        status, _, err = cli("bench", "disk", folder, *FEW)
    finally:
        _core.clear_faults()
    assert status == 1 and "errno 5" in err and list(folder.iterdir()) == []


def test_a_signal_as_the_scratch_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, opened = [], Path.open

    def told_to_end(path: Path, mode: str) -> None:
        opened(path, mode).close()
        made.append(path)
        raise SystemExit(143)

    monkeypatch.setattr(Path, "open", told_to_end)
    with (
        pytest.raises(SystemExit),
        open_target(tmp_path, RECORD, 1 << 20, lambda *_: None, seed=0),
    ):
        pass
    assert len(made) == 1 and list(tmp_path.iterdir()) == []


def test_a_full_drive_is_refused_before_and_survived_while_writing(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    usage = shutil.disk_usage(folder)
    with monkeypatch.context() as patch:
        patch.setattr(disk_bench.shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
        status, _, err = cli("bench", "disk", folder)
    assert status == 1 and "got 1 GiB" in err and "--max-read" in err

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_bench, "SCRATCH_BYTES", 100 * RECORD)
    monkeypatch.setattr(disk_bench.os, "fsync", full)
    status, _, err = cli("bench", "disk", folder)
    assert status == 1 and "No space left" in err and list(folder.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_said(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    status, _, err = cli("bench", "disk", tmp_path)
    assert status == 1 and "cannot write a scratch file" in err and "hint: " in err


def test_no_more_is_read_than_allowed(file: Path) -> None:
    with open_target(file, RECORD, 1 << 40, lambda *_: None, seed=0) as target:
        before = target.places.bytes_left
        report = measure_curve(
            target, sizes=[RECORD], readers=[1, 2], num_windows=5, max_read_bytes=40 * RECORD
        )
        read = before - target.places.bytes_left
    assert read == report.bytes_read <= 40 * RECORD
    assert report.num_windows == 3
    assert any("no more to read" in note for note in report.notes)


def test_the_least_that_many_readers_take_is_enough(file: Path) -> None:
    with open_target(file, RECORD, 1 << 40, lambda *_: None, seed=0) as target:
        report = measure_curve(
            target, sizes=[RECORD], readers=[1, 16], num_windows=1, max_read_bytes=42 * RECORD
        )
    assert report.num_windows == 1
    assert report.bytes_read <= 42 * RECORD


def test_too_little_to_read_is_refused_with_the_sum(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(10 * RECORD))
    status, out, err = cli("bench", "disk", tmp_path / "small", *FEW)
    assert status == 1 and out == "" and "too little to read" in err and "--record" in err


def test_reads_out_of_a_cache_are_not_reported_as_reads_of_a_drive(
    cli: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "drive_bytes_read", lambda: 0)
    status, out, err = cli("bench", "disk", file, *FEW, "--json")
    report = json.loads(out)
    assert status == 1 and "no read came from a drive" in err
    assert all(r["bytes_per_s"] is None and r["num_cached"] == 2 for r in report["rates"])
    assert report["chosen"] is None and not report["is_verified"] and not report["is_remembered"]
    assert any("left out" in note for note in report["notes"])


def test_a_filesystem_that_nobody_counts_is_said_to_be_so(
    cli: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disk_bench, "find_drive", lambda path: replace(find_drive(path), filesystem="nfs4")
    )
    monkeypatch.setattr(disk_bench, "memory_bytes_per_s", lambda: 1e15)
    report = json.loads(cli("bench", "disk", file, *FEW, "--json")[1])
    assert not report["is_verified"] and not report["is_remembered"]
    assert any("nfs4" in note for note in report["notes"])


def test_the_records_of_a_container_are_read() -> None:
    demo = resolve_model("demo")
    with open_target(demo, None, 1 << 30, lambda *_: None, seed=0) as target:
        table = disk_bench.open_model(demo)[1].records
        assert table is not None and target.kind == "model"
        assert target.places.record_bytes == table.record_bytes
        taken = target.places.take(1 << 20)
    wanted = zip(table.file.flat, table.offset.flat, strict=True)
    assert sorted(taken) == sorted((int(file), int(offset)) for file, offset in wanted) != taken


def test_records_in_place_are_read_as_aligned_ranges(tiny: Path) -> None:
    with open_target(tiny, None, 1 << 30, lambda *_: None, seed=0) as target:
        table = disk_bench.open_model(tiny)[1].records
        assert table is not None and table.repack is not None
        length = target.places.record_bytes
        assert table.read_bytes <= length < table.read_bytes + 4096 and length % 4096 == 0
        places = target.places.take(1 << 20)
    assert 0 < len(places) <= table.num_records
    for file, offset in places:
        assert offset % 4096 == 0 and offset + length <= target.files[file].stat().st_size


@pytest.mark.parametrize(
    "arguments",
    [
        ["--record", "1000"],
        ["--sizes", "16KiB,lots"],
        ["--readers", "0"],
        ["--readers", "1,two"],
        ["--windows", "0"],
        ["--max-read", "-1"],
    ],
)
def test_wrong_usage(cli: Any, file: Path, arguments: list[str]) -> None:
    assert cli("bench", "disk", file, *arguments)[0] == 2


def test_nothing_there(cli: Any, tmp_path: Path) -> None:
    status, _, err = cli("bench", "disk", tmp_path / "nowhere")
    assert status == 1 and "nothing to read" in err
    with (
        pytest.raises(ConfigError),
        open_target(tmp_path / "nowhere", None, 1, lambda *_: None, seed=0),
    ):
        pass


def test_a_streaming_start_measures_and_the_receipt_says_so(
    cli: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LEAST_RECORDS_BYTES", 0)
    monkeypatch.setattr(probe, "FIRST_BYTES", 1)
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(probe, "WINDOW_S", 0.0)
    options = ("-n", 4, "--temperature", 0, "--history", "off", "--json")
    resident = json.loads(cli("run", tiny, "hello", "--memory", "4GiB", *options)[1])
    assert resident["receipt"]["readers_from"] == "default" and not default_path().exists()
    monkeypatch.setattr(plan.MemoryPlan, "is_resident", False)
    first = json.loads(cli("run", tiny, "hello", "--memory", "4GiB", *options)[1])
    second = json.loads(cli("run", tiny, "hello", "--memory", "4GiB", *options)[1])
    assert first["receipt"]["readers_from"] == "measured"
    assert second["receipt"]["readers_from"] == "remembered"
    assert first["ids"] == second["ids"] == resident["ids"]
    shown = json.loads(cli("plan", tiny, "--memory", "4GiB", "--json")[1])
    assert shown["readers_from"] == "remembered" and shown["drive_bytes_per_s"] > 0
    assert shown["readers"] == second["receipt"]["readers"]
    told = cli("run", tiny, "hello", "--readers", 3, "--memory", "4GiB", *options)[1]
    assert json.loads(told)["receipt"]["readers_from"] == "option"
    assert json.loads(told)["receipt"]["readers"] == 3


def test_an_id_of_the_hub_is_the_pulled_model(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path / "models"))
    status, _, err = cli("bench", "disk", "owner/tiny")
    assert status != 0
    assert "run `headrace pull owner/tiny`" in " ".join(err.split())
    monkeypatch.setattr("headrace.llm.find_pulled", lambda _: resolve_model("demo"))
    assert _target_path("owner/tiny") == resolve_model("demo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "tiny").mkdir(parents=True)  # a folder of that name comes first
    assert _target_path("owner/tiny") == Path("owner/tiny")
