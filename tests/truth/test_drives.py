"""Promise 3 with several drives: where a record is read, and what becomes of its copies, changes no
bit of a logit.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace import _core
from headrace.checkpoint.layout import expert_file_name
from headrace.config import EngineConfig
from headrace.convert import Recipe, convert
from headrace.errors import CheckpointError, ConfigError
from headrace.mirror import plan_mirror, stage
from truth.identity import LAYERS, NUM_RECORDS, Run, Setting, run, with_experts, write_checkpoint

FLOOR = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drives")
    source = write_checkpoint(folder / "hf")
    convert(source, folder / "model", Recipe("q4", "q8", 32))
    return folder / "model"


@pytest.fixture(scope="module")
def truth(model: Path) -> Run:
    return run(model, Setting(experts=with_experts(readers=1)))


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> Path:
    """A copy of every record, as `cp` makes it, on the faster drive, so that it is asked."""
    _core.slow_drive(f"{model}/", bytes_per_s=3e7)
    return copied(model, tmp_path / "whole")


@pytest.fixture(autouse=True)
def _no_fault_left() -> Iterator[None]:
    yield
    _core.clear_faults()
    _core.clear_slow_drives()


def copied(model: Path, folder: Path, layers: range = range(LAYERS)) -> Path:
    folder.mkdir()
    for layer in layers:
        shutil.copy(model / expert_file_name(layer), folder)
    return folder


def staged(model: Path, folder: Path, share: float) -> Path:
    """A mirror of about this share of the records."""
    rates = (1 - share) * 1e9, share * 1e9
    plan = plan_mirror(model, folder, EngineConfig(), bytes_per_s=rates)
    assert 0 < plan.num_chosen < NUM_RECORDS
    stage(plan)
    return folder


def assert_same(got: Run, truth: Run) -> None:
    assert got.errors == [None, None]
    assert got.ids == truth.ids
    assert got.logits == truth.logits


@pytest.mark.parametrize("num_slots", [FLOOR, 5, NUM_RECORDS - 1])
@pytest.mark.parametrize("prefetch", [False, True])
def test_two_and_three_drives(
    model: Path, truth: Run, whole: Path, tmp_path: Path, num_slots: int, prefetch: bool
) -> None:
    third = staged(model, tmp_path / "third", 0.4)
    for folder in (whole, third):
        _core.slow_drive(str(folder), bytes_per_s=3e7)
    for drives in ((whole,), (third,), (whole, third)):
        experts = with_experts(drive=drives, readers=2)
        got = run(model, Setting(num_slots=num_slots, experts=experts, prefetch=prefetch))
        assert_same(got, truth)
        assert len(got.drives) == 1 + len(drives)
        if num_slots == FLOOR:
            assert all(drive.bytes_read > 0 for drive in got.drives), got.drives
        assert sum(drive.failed_copies for drive in got.drives) == 0


def test_files_moved_to_another_drive(model: Path, truth: Run, tmp_path: Path) -> None:
    spread = tmp_path / "spread"
    shutil.copytree(model, spread)
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(spread / expert_file_name(1), other)
    got = run(spread, Setting(num_slots=5, experts=with_experts(drive=(other,))))
    assert_same(got, truth)
    assert all(drive.bytes_read > 0 for drive in got.drives)
    with pytest.raises(CheckpointError, match=expert_file_name(1)):
        run(spread, Setting())


@pytest.mark.parametrize("kind", ["eio", "end", "flip", "short", "delay", "einval"])
@pytest.mark.parametrize("num_slots", [FLOOR, 9])
def test_copies_that_fail(model: Path, truth: Run, whole: Path, kind: str, num_slots: int) -> None:
    _core.inject_fault(kind, after=3, count=-1, path_contains=str(whole))
    experts = with_experts(drive=(whole,), readers=2)
    got = run(model, Setting(num_slots=num_slots, experts=experts))
    assert _core.num_faults_fired() > 0
    assert_same(got, truth)
    is_harmful = kind in ("eio", "end", "flip")
    assert (got.drives[1].failed_copies > 0) == is_harmful
    assert got.drives[1].is_given_up == is_harmful
    assert got.drives[0].failed_copies == 0


def test_one_damaged_copy_leaves_the_others_in_use(model: Path, truth: Run, whole: Path) -> None:
    _core.inject_fault("flip", after=2, count=1, path_contains=str(whole))
    got = run(model, Setting(num_slots=FLOOR, experts=with_experts(drive=(whole,))))
    assert_same(got, truth)
    assert got.drives[1].failed_copies == 1 and not got.drives[1].is_given_up


def test_the_models_own_record_fails_where_a_copy_is_good(
    model: Path, truth: Run, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _core.inject_fault("eio", count=-1, path_contains=str(model / "experts-"))
    got = run(model, Setting(num_slots=5, experts=with_experts(drive=(whole,))))
    assert _core.num_faults_fired() > 0
    assert_same(got, truth)
    assert caplog.text.count("at one of its places, another is read instead") == 1


@pytest.mark.parametrize("num_slots", [FLOOR, 9])
@pytest.mark.parametrize("how", ["removed", "truncated", "overwritten", "unplugged"])
def test_a_drive_that_goes_while_decoding(
    model: Path, truth: Run, whole: Path, num_slots: int, how: str
) -> None:
    files = sorted(whole.glob("experts-*"))

    def damage(change: Callable[[Path], object]) -> None:
        for file in files:
            change(file)

    def harm(step: int) -> None:
        if step != 4:
            return
        if how == "removed":
            shutil.rmtree(whole)
        elif how == "truncated":
            damage(lambda file: os.truncate(file, 4096))
        elif how == "overwritten":
            damage(lambda file: file.write_bytes(bytes(file.stat().st_size)))
        else:
            _core.inject_fault("eio", count=-1, path_contains=str(whole))

    setting = Setting(num_slots=num_slots, experts=with_experts(drive=(whole,)), harm=harm)
    got = run(model, setting)
    assert_same(got, truth)
    assert got.drives[1].bytes_read > 0, "the copy was in use before it went"
    assert (got.drives[1].failed_copies > 0) == (how != "removed")  # open files outlive their names


@pytest.mark.parametrize("state", ["absent", "empty", "stale", "cut", "half", "strange"])
def test_a_mirror_that_cannot_be_used_is_one_warning(
    model: Path,
    truth: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    state: str,
) -> None:
    mirror = tmp_path / "mirror"
    if state == "empty":
        mirror.mkdir()
    elif state == "strange":
        mirror.mkdir()
        (mirror / expert_file_name(0)).write_bytes(b"no safetensors")
    elif state != "absent":
        staged(model, mirror, 0.5)
        note, file = mirror / "mirror.json", mirror / expert_file_name(1)
        if state == "stale":
            note.write_text(note.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
        elif state == "cut":
            os.truncate(file, file.stat().st_size - 1)
        else:
            file.unlink()
    with caplog.at_level(logging.WARNING):
        got = run(model, Setting(num_slots=FLOOR, experts=with_experts(drive=(mirror,))))
    assert_same(got, truth)
    assert len(caplog.records) == (0 if state == "half" else 1), caplog.text
    assert (got.drives[1].bytes_read > 0) == (state in ("cut", "half"))


def test_a_failing_copy_is_one_warning(
    model: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _core.inject_fault("flip", count=-1, path_contains=str(whole))
    with caplog.at_level(logging.WARNING):
        run(model, Setting(num_slots=FLOOR, experts=with_experts(drive=(whole,))))
    assert len(caplog.records) == 1 and str(whole) in caplog.text


def test_records_in_place_have_no_copies(model: Path, whole: Path) -> None:
    with pytest.raises(ConfigError, match="drive"):
        run(model.parent / "hf", Setting(experts=with_experts(drive=(whole,))))


def test_a_slower_drive_gets_less(model: Path, truth: Run, tmp_path: Path) -> None:
    fast, slow = copied(model, tmp_path / "fast"), copied(model, tmp_path / "slow")
    for folder, rate in ((model, 2e7), (fast, 2e7), (slow, 2e6)):
        _core.slow_drive(f"{folder}/", bytes_per_s=rate)
    experts = with_experts(drive=(fast, slow), readers=1)
    got = run(model, Setting(num_slots=FLOOR, experts=experts))
    assert_same(got, truth)
    read = [drive.bytes_read for drive in got.drives]
    assert min(read[:2]) > read[2] > 0, read
