"""What several drives give together, by where the records lie and how fast each drive is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.cli.report import print_plan
from headrace.config import EngineConfig, ExpertConfig
from headrace.convert import Recipe, convert
from headrace.drive import Drive, find_drive
from headrace.experts import reading
from headrace.experts.drive_cache import DriveCache, remembered
from headrace.experts.probe import Probed, ReadSetting
from headrace.experts.spread import sum_bytes_per_s
from headrace.inspect import open_model
from headrace.llm import LLM, plan_model
from headrace.mirror import plan_mirror, stage
from headrace.plan import THREAD_BYTES
from truth.identity import write_checkpoint

RATES = 300e6, 100e6


def table(files: list[int], drive_of_file: list[int], copies: list[tuple[int, int]]) -> Any:
    """One layer of records in these files, and copies as (record, file)."""
    num_files = len(drive_of_file)
    return SimpleNamespace(
        files=(Path("x"),) * num_files,
        num_records=len(files),
        file=np.array(files, np.int32).reshape(1, -1, 1),
        drive_of_file=tuple(drive_of_file),
        copies=np.array([(record, file, 0) for record, file in copies], np.int64).reshape(-1, 3),
    )


READS = np.array([[4.0, 3.0, 2.0, 1.0]])


@pytest.mark.parametrize(
    ("copied", "expected"),
    [
        ([], 300e6),
        ([3], 300e6 / 0.9),  # the first drive still reads nine tenths
        ([2], 300e6 / 0.8),
        ([1], 400e6),
        ([0, 1, 2, 3], 400e6),
    ],
)
def test_copies_add_what_their_drive_can_take(copied: list[int], expected: float) -> None:
    records = table([0, 0, 0, 0], [0, 1], [(record, 1) for record in copied])
    assert sum_bytes_per_s(RATES, records, READS) == pytest.approx(expected)


def test_files_moved_to_another_drive_wait_for_it() -> None:
    assert sum_bytes_per_s(RATES, table([0, 0, 0, 1], [0, 1], []), READS) == pytest.approx(
        300e6 / 0.9
    )
    assert sum_bytes_per_s(RATES, table([0, 0, 1, 1], [0, 1], []), READS) == pytest.approx(
        100e6 / 0.3
    )


def test_any_set_of_drives_may_be_the_slowest() -> None:
    """Neither of the last two drives is too slow alone, but both together are."""
    records = table([0, 1, 2, 2], [0, 1, 2], [(1, 2), (3, 1)])
    rates = 1000e6, 100e6, 100e6
    assert sum_bytes_per_s(rates, records, READS) == pytest.approx(200e6 / 0.6)


def test_a_plan_counts_all_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, folder = tmp_path / "model", tmp_path / "mirror"
    convert(write_checkpoint(tmp_path / "hf"), model, Recipe("q4", "q8", 32))
    config = EngineConfig(context=64, slots=8, experts=ExpertConfig(history="off"))
    mirror = plan_mirror(model, folder, config, bytes_per_s=(3e9, 1e9))
    stage(mirror)
    both = EngineConfig(context=64, slots=8, experts=ExpertConfig(history="off", drive=(folder,)))
    assert plan_model(model, both).drive_bytes_per_s is None, "nobody has measured"
    records = open_model(model)[1].records
    assert records is not None
    drive = find_drive(records.files[0])
    measured = Probed(ReadSetting(2, 1 << 18, True), 1e9, 1e9, 1e9, records.record_bytes)
    DriveCache().remember(drive, remembered(measured, drive))
    assert plan_model(model, both).drive_rates == (0.5e9, 0.5e9), "two folders on one drive"
    other = replace(drive, name="another", serial="another")

    def find(path: Path) -> Drive:
        return other if path == folder else drive

    monkeypatch.setattr(reading, "find_drive", find)
    alone, plan = plan_model(model, config), plan_model(model, both)
    assert alone.drive_rates == () and alone.drive_bytes_per_s == 1e9
    assert plan.drive_rates == (1e9, 1e9)
    assert plan.drive_bytes_per_s == pytest.approx(1e9 / (1 - mirror.reached_share))
    speeds = alone.predicted_tokens_per_s(None), plan.predicted_tokens_per_s(None)
    assert speeds[0] is not None and speeds[1] is not None and speeds[1] > 1.2 * speeds[0]
    # The second drive is read as it was measured itself, unless the caller says how.
    faster = Probed(ReadSetting(6, 1 << 20, True), 3e9, 3e9, 3e9, records.record_bytes)
    DriveCache().remember(other, remembered(faster, other))
    spread = open_model(model, (folder,))[1].records
    got = reading.resolve_reading(both.experts, spread)
    assert got.drives == ((2, 1e9), (6, 3e9)) and got.num_readers == 8
    assert plan_model(model, both).drive_rates == (1e9, 3e9)
    more = plan_model(model, both).readers_bytes - plan.readers_bytes
    assert more == 4 * THREAD_BYTES
    given = reading.resolve_reading(replace(both.experts, readers=3), spread)
    assert given.drives == ((3, 1e9), (3, 3e9))
    with LLM(model, both) as llm:
        assert llm.store is not None and len(llm.store.drives()) == 2
    print_plan(plan, "x", None)
    assert "from 2 drives of 1.00, 1.00" in " ".join(capsys.readouterr().out.split())
