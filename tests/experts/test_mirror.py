"""`headrace mirror`: which records are copied, and that a copy is whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace import LLM, ConfigError, EngineConfig, ExpertConfig, SamplingParams
from headrace.checkpoint.layout import expert_file_name
from headrace.convert import Recipe, convert
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.experts.spread import expected_reads
from headrace.mirror import MirrorPlan, choose, plan_mirror, stage, verify_mirror
from truth.identity import write_checkpoint

RATES = 3e9, 1e9
CONFIG = EngineConfig(context=64, experts=ExpertConfig(history="off"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight records."""
    folder = tmp_path_factory.mktemp("mirror")
    convert(write_checkpoint(folder / "hf"), folder / "model", Recipe("q4", "q8", 32))
    return folder / "model"


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def planned(model: Path, folder: Path, **options: Any) -> MirrorPlan:
    return plan_mirror(model, folder, CONFIG, **{"bytes_per_s": RATES, **options})


def table(num_layers: int, num_experts: int, record_bytes: int = 4096) -> Any:
    layers = tuple(range(num_layers))
    return SimpleNamespace(layers=layers, num_experts=num_experts, record_bytes=record_bytes)


def test_without_a_history_every_layer_gives_the_same_share() -> None:
    records = table(4, 16)
    chosen = choose(expected_reads(None, records, 10), records, 0.25, 1 << 40)
    assert {len(experts) for experts in chosen.values()} == {4}


def test_the_hottest_records_are_chosen_until_their_reads_are_the_share() -> None:
    reads = np.array([[1.0, 6.0, 3.0, 0.0], [4.0, 4.0, 1.0, 1.0]])
    records = table(2, 4)
    assert choose(reads, records, 0.6, 1 << 40) == {0: (1,), 1: (0, 1)}
    assert choose(reads, records, 0.61, 1 << 40)[0] == (1, 2)
    assert choose(reads, records, 1.0, 1 << 40) == {0: (0, 1, 2), 1: (0, 1, 2, 3)}


@pytest.mark.parametrize("most", [0, 1, 2, 5, 31])
def test_a_budget_lowers_the_share_of_all_layers_alike(most: int) -> None:
    reads = np.random.default_rng(3).random((4, 16))
    records = table(4, 16)
    chosen = choose(reads, records, 0.9, most * 4096 + 4095)
    assert sum(map(len, chosen.values())) <= most
    shares = [reads[row, list(experts)].sum() / reads[row].sum() for row, experts in chosen.items()]
    if most == 31:
        assert max(shares) - min(shares) < 0.15


def test_what_memory_holds_is_not_read() -> None:
    counts = np.array([[1e5, 1e5, 10, 10, 10, 10]])
    records = table(1, 6)
    cold = expected_reads(counts, records, 3)
    assert cold[0, 0] < cold[0, 2], "the hottest records have the slots"
    assert np.array_equal(np.argsort(-expected_reads(counts, records, 0)[0, :2]), [0, 1])
    assert (expected_reads(counts, records, 6) > 0).all()
    # By the formula's own word: the probabilities of being held add up to the slots.
    held = 1 - cold / (counts + 0.5)
    assert abs(held.sum() - 3) < 1e-6


def test_stage_and_verify(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    plan = planned(model, tmp_path / "mirror")
    assert plan.wanted_share == 0.25 and plan.reached_share >= 0.25
    assert plan.num_chosen == 6 and plan.num_records == 24
    assert stage(plan) == plan.mirror_bytes
    check = verify_mirror(model, tmp_path / "mirror")
    assert check.is_good and check.num_good == 6
    assert stage(planned(model, tmp_path / "mirror")) == 0, "all is there"
    assert digest(model) == before, "the model is only read"
    names = sorted(path.name for path in (tmp_path / "mirror").iterdir())
    assert names == [*map(expert_file_name, range(3)), "mirror.json"]


def test_another_choice_replaces_what_differs(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    stage(planned(model, folder))
    larger = planned(model, folder, bytes_per_s=(1e9, 1e9))
    assert not larger.is_resumed and larger.num_chosen == 12
    stage(larger)
    assert verify_mirror(model, folder).num_good == 12
    none = planned(model, folder, budget_bytes=1)
    assert none.num_chosen == 0
    stage(none)
    assert [path.name for path in folder.iterdir()] == ["mirror.json"]


def test_a_choice_that_was_begun_holds_for_the_same_question(model: Path, tmp_path: Path) -> None:
    """Other bandwidths, and less free space than it takes, are other questions."""
    folder = tmp_path / "mirror"
    stage(planned(model, folder))
    next(folder.glob("*.safetensors")).unlink()
    assert planned(model, folder).is_resumed
    assert not planned(model, folder, bytes_per_s=(1e9, 1e9)).is_resumed
    full = planned(model, folder, reserve_bytes=1 << 60)
    assert not full.is_resumed and full.num_chosen == 0


def test_verify_names_what_is_damaged_or_missing(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    plan = planned(model, folder)
    stage(plan)
    path = folder / expert_file_name(0)
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    check = verify_mirror(model, folder)
    assert not check.is_good and check.num_good == 5
    assert f"layers.0.experts.{plan.layers[0][-1]}" in check.problems[0]
    assert "hint" not in check.problems[0]  # that of a model's own record would mislead
    path.unlink()
    assert verify_mirror(model, folder).num_missing == 2


def test_a_damaged_model_is_not_copied(model: Path, tmp_path: Path) -> None:
    import shutil

    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    path = damaged / expert_file_name(0)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8)
        file.write(b"?")
    plan = planned(damaged, tmp_path / "mirror")
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts"):
        stage(plan)
    assert [p.name for p in (tmp_path / "mirror").iterdir()] == ["mirror.json"]


def test_a_place_that_is_no_mirror_is_refused(model: Path, tmp_path: Path) -> None:
    for folder in (model, model / "mirror", model.parent):
        with pytest.raises(ConfigError, match="model's folder"):
            planned(model, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no mirror"):
        planned(model, other)
    stage(planned(model, tmp_path / "mirror"))
    note = tmp_path / "mirror" / "mirror.json"
    content = json.loads(note.read_text())
    for key, value in (("fingerprint", "0" * 64), ("version", 2), ("format", "something")):
        note.write_text(json.dumps({**content, key: value}))
        with pytest.raises(CheckpointError, match="mirror"):
            planned(model, tmp_path / "mirror")
    note.write_text(json.dumps({**content, "layers": {"0": [8], "1": [], "2": []}}))
    with pytest.raises(CheckpointError, match="layers"):
        verify_mirror(model, tmp_path / "mirror")


def test_only_packed_records_can_be_copied(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="convert"):
        planned(model.parent / "hf", tmp_path / "mirror")


_STAGE = """
import sys
from pathlib import Path
from headrace import EngineConfig, ExpertConfig, _core
from headrace.mirror import plan_mirror, stage
model, folder = map(Path, sys.argv[1:])
_core.slow_drive(str(model), bytes_per_s=3e5)
config = EngineConfig(context=64, experts=ExpertConfig(history="off"))
plan = plan_mirror(model, folder, config, bytes_per_s=(1e9, 1e9))
print("ready", flush=True)
stage(plan)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_killed_and_gone_on_with(model: Path, tmp_path: Path, after_s: float) -> None:
    """Whatever moment the kill meets, there is no file under its name that is not whole."""
    folder = tmp_path / "mirror"
    command = [sys.executable, "-c", _STAGE, str(model), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
    if (folder / "mirror.json").is_file():
        assert verify_mirror(model, folder).problems == ()
    else:
        assert not folder.exists() or all(p.name.startswith(".") for p in folder.iterdir())
        for path in folder.glob(".*"):
            path.unlink()
    plan = planned(model, folder, bytes_per_s=(1e9, 1e9))
    stage(plan)
    assert verify_mirror(model, folder).num_good == 12


def test_a_run_reads_from_the_mirror(model: Path, tmp_path: Path) -> None:
    stage(planned(model, tmp_path / "mirror", bytes_per_s=(1e9, 1e9)))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    prompt = list(range(20, 40))
    answers = []
    for drives in ((), (tmp_path / "mirror",)):
        experts = ExpertConfig(history="off", readers=2, drive=drives)
        with LLM(model, context=64, memory="256MiB", experts=experts) as llm:
            answers.append(llm.generate(prompt, params))
            assert llm.store is not None
            assert len(llm.store.drives()) == 2 * len(drives)
            assert all(drive.bytes_read > 0 for drive in llm.store.drives())
    one, two = answers
    assert one.ids == two.ids
    assert one.receipt.drives == ()
    assert [drive["path"] for drive in two.receipt.drives] == [str(model), str(tmp_path / "mirror")]
    assert str(tmp_path / "mirror") in "\n".join(two.receipt.lines())


def test_one_drive_gives_no_more_for_holding_both_folders(model: Path, tmp_path: Path) -> None:
    plan = planned(model, tmp_path / "mirror")
    assert plan.is_same_drive and plan.bytes_per_s_together == RATES[0]
    assert replace(plan, is_same_drive=False).bytes_per_s_together > RATES[0]
