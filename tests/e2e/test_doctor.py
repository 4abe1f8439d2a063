"""`headrace doctor` on machines that are ill in every way that can be faked."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import doctor, ops
from headrace.doctor import OK, PROBLEM, WARNING, Finding, examine
from headrace.drive import find_drive
from headrace.errors import MemoryBudgetError
from headrace.experts.drive_cache import DriveCache, remembered
from headrace.experts.probe import Probed, ReadSetting
from headrace.inspect import open_model
from headrace.llm import resolve_model

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory of fake /proc and /sys in which all is well."""
    root = tmp_path / "root"
    write(root, "proc/meminfo", meminfo())
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    write(root, "sys/devices/system/node/has_memory", "0")
    for resource in ("cpu", "memory", "io"):
        write(root, f"proc/pressure/{resource}", "some avg10=0 avg60=0.00 avg300=0 total=0")
    mount(root, "ext4")
    return root


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def meminfo(available: int = 8 * GIB, swap: int = 0, swap_free: int = 0) -> str:
    values = {
        "MemTotal": 16 * GIB, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap_free,
    }  # fmt: skip
    return "\n".join(f"{name}: {value // 1024} kB" for name, value in values.items())


def mount(root: Path, filesystem: str, options: str = "rw") -> None:
    """Let every real path lie on one fake drive."""
    devices = {path.stat().st_dev for path in (Path.cwd(), resolve_model("demo"), root)}
    lines = []
    for device in devices:
        number = f"{os.major(device)}:{os.minor(device)}"
        lines.append(f"1 0 {number} / / {options} - {filesystem} /dev/fake rw")
        write(root, f"sys/dev/block/{number}/queue/rotational", 0)
    write(root, "proc/self/mountinfo", "\n".join(lines))


def by_subject(findings: list[Finding], subject: str) -> Finding:
    [found] = [f for f in findings if f.subject == subject]
    return found


def ills(findings: list[Finding]) -> dict[str, str]:
    return {f.subject: f.level for f in findings if f.level != OK}


@pytest.fixture
def container(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("demo"), tmp_path / "model"))


def test_a_well_machine(machine: Path) -> None:
    findings = examine(root=machine)
    assert ills(findings) == ({} if ops.isa() != "scalar" else {"processor": WARNING})
    assert "8 GiB available of 16 GiB" in by_subject(findings, "memory").text
    assert by_subject(findings, "swap").text == "none"
    assert by_subject(findings, "huge pages").text == "madvise"
    assert by_subject(findings, "memory nodes").text == "1"
    assert ops.isa() in by_subject(findings, "processor").text


def test_a_system_that_says_nothing_is_no_fault(tmp_path: Path) -> None:
    findings = examine("demo", root=tmp_path / "nothing here")
    assert PROBLEM not in ills(findings).values()
    for subject in ("huge pages", "memory nodes", "swap", "io pressure", "drive temperature"):
        assert by_subject(findings, subject) == Finding(subject, OK, "not known")
    memory = by_subject(findings, "memory")
    assert memory.level == WARNING and "--memory" in str(memory.advice)


def test_the_real_system_is_examined_without_a_fault_of_ours() -> None:
    assert {f.level for f in examine("demo")} <= {OK, WARNING, PROBLEM}


@pytest.mark.parametrize(
    ("name", "text", "subject", "said"),
    [
        ("proc/meminfo", meminfo(available=GIB // 2), "memory", "512 MiB available"),
        ("proc/meminfo", meminfo(swap=4 * GIB, swap_free=2 * GIB), "swap", "2 GiB of 4 GiB used"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages",
         "never"),
        ("proc/pressure/memory", "some avg60=1.50", "memory pressure", "1.5%"),
        ("proc/pressure/io", "some avg60=25.0", "io pressure", "25.0%"),
        ("proc/pressure/cpu", "some avg60=50.0", "cpu pressure", "50.0%"),
    ],
)  # fmt: skip
def test_each_ill_is_found_alone_with_what_to_do(
    machine: Path, name: str, text: str, subject: str, said: str
) -> None:
    healthy = ills(examine(root=machine))
    write(machine, name, text)
    findings = examine(root=machine)
    assert ills(findings) == healthy | {subject: WARNING}
    found = by_subject(findings, subject)
    assert said in found.text and found.advice


@pytest.mark.parametrize(("is_allowed", "level"), [(True, OK), (False, WARNING)])
def test_memory_that_cannot_be_spread_over_sockets_is_found(
    machine: Path, monkeypatch: pytest.MonkeyPatch, is_allowed: bool, level: str
) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(doctor.ops, "can_interleave", lambda n: asked.append(n) or is_allowed)
    examine(root=machine)
    assert not asked, "one socket has nothing to spread over"
    write(machine, "sys/devices/system/node/has_memory", "0-1")
    found = by_subject(examine(root=machine), "memory nodes")
    assert asked == [[0, 1]]
    assert found.level == level and found.text.startswith("2, ")
    assert (found.advice is None) == is_allowed


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_cgroups_are_shown(machine: Path, version: int) -> None:
    if version == 2:
        base, names = "sys/fs/cgroup/app", ("memory.max", "memory.current")
        write(machine, "proc/self/cgroup", "0::/app/job")
    else:
        base, names = "sys/fs/cgroup/memory/app", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        write(machine, "proc/self/cgroup", "3:cpu,memory:/app/job")
    for group, limit, used in (("job", 6 * GIB, GIB), ("", 4 * GIB, 3 * GIB + GIB // 2)):
        write(machine, f"{base}/{group}/{names[0]}", limit)
        write(machine, f"{base}/{group}/{names[1]}", used)
    wide, tight = (f for f in examine(root=machine) if f.subject == "cgroup")
    assert wide.level == OK and "limit 6 GiB, 5 GiB left" in wide.text and "job" in wide.text
    assert tight.level == WARNING and "limit 4 GiB, 512 MiB left" in tight.text
    assert by_subject(examine(root=machine), "memory").text.startswith("512 MiB available")


def test_tiles_that_the_kernel_refuses(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, "proc/cpuinfo", "model name : X\nflags : fpu amx_tile amx_int8")
    monkeypatch.setattr(doctor.ops, "available_isas", lambda: ["scalar", "avx2"])
    monkeypatch.setattr(doctor.ops, "isa", lambda: "scalar")
    levels = [f.level for f in examine(root=machine) if f.subject == "processor"]
    assert levels == [WARNING, WARNING]


@pytest.mark.parametrize("filesystem", ["tmpfs", "nfs4", "fuse.sshfs"])
def test_places_that_are_no_drive_of_this_machine(machine: Path, filesystem: str) -> None:
    mount(machine, filesystem)
    found = by_subject(examine(root=machine), "drive")
    assert found.level == WARNING and filesystem in found.text and found.advice


@pytest.mark.parametrize(("degrees", "level"), [(60, OK), (77, WARNING), (81, PROBLEM)])
def test_a_hot_drive(machine: Path, degrees: int, level: str) -> None:
    for folder in (machine / "sys/dev/block").iterdir():
        write(folder, "device/hwmon1/temp1_input", degrees * 1000)
        write(folder, "device/hwmon1/temp1_max", 80_000)
    found = by_subject(examine(root=machine), "drive temperature")
    assert found.level == level and found.text == f"{degrees} °C, limit 80 °C"


def test_a_full_drive(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(machine)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage._replace(free=100 << 20))
    assert by_subject(examine(root=machine), "free space").level == WARNING
    mount(machine, "squashfs", "ro")
    found = by_subject(examine(root=machine), "free space")
    assert found.level == OK and "read-only" in found.text


def test_a_cache_directory_that_cannot_be_written(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = by_subject(examine(root=machine), "cache directory")
    assert found.level == WARNING and "XDG_CACHE_HOME" in str(found.advice)


def remember(container: Path, setting: ReadSetting, speed: float) -> None:
    table = open_model(container)[1].records
    assert table is not None
    drive = find_drive(table.files[0])
    probed = Probed(setting, speed, speed, speed, table.record_bytes)
    DriveCache().remember(drive, remembered(probed, drive))


@pytest.mark.parametrize(
    ("direct", "speed", "level"), [(True, 2e9, OK), (True, 1e8, WARNING), (False, 2e9, WARNING)]
)
def test_what_is_remembered_of_a_drive(
    container: Path, direct: bool, speed: float, level: str
) -> None:
    assert by_subject(examine(str(container)), "drive speed").text == "not measured"
    remember(container, ReadSetting(2, 1 << 20, direct), speed)
    found = by_subject(examine(str(container)), "drive speed")
    assert found.level == level and f"{speed / 1e9:.2f} GB/s" in found.text
    assert "2 readers" in found.text and "remembered" in found.text


def test_a_sound_model(container: Path, machine: Path) -> None:
    for is_deep, how in ((False, "headers sound"), (True, "every byte sound")):
        findings = examine(str(container), is_deep=is_deep, root=machine)
        assert PROBLEM not in ills(findings).values()
        assert by_subject(findings, "model health").text.startswith(how)
        assert "slots for 192 of 192" in by_subject(findings, "fit").text


def test_a_flipped_bit_is_found_by_a_deep_look_only(container: Path, machine: Path) -> None:
    path = container / "experts-001.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 5000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert PROBLEM not in ills(examine(str(container), root=machine)).values()
    seen: list[tuple[str, int, int]] = []
    findings = examine(
        str(container), is_deep=True, root=machine, progress=lambda *a: seen.append(a)
    )
    found = by_subject(findings, "model health")
    assert found.level == PROBLEM and "experts-001" in found.text and found.advice
    assert seen[-1][1] == seen[-1][2] > 1 << 20


def change_header(container: Path) -> None:
    with (container / "experts-002.safetensors").open("r+b") as file:
        file.seek(12)
        file.write(b"?")


def cut(container: Path) -> None:
    path = container / "experts-003.safetensors"
    os.truncate(path, path.stat().st_size - 4096)


def remove(container: Path) -> None:
    (container / "experts-004.safetensors").unlink()


def change_small_file(container: Path) -> None:
    with (container / "tokenizer.json").open("a") as file:
        file.write(" ")


@pytest.mark.parametrize("damage", [change_header, cut, remove, change_small_file])
def test_damage_outside_of_the_weights_is_found_at_once(
    container: Path, machine: Path, damage: Any
) -> None:
    damage(container)
    findings = examine(str(container), root=machine)
    found = [f for f in findings if f.level == PROBLEM]
    assert found and all(f.subject in ("model", "model health") for f in found)
    assert "Traceback" not in found[0].text


def test_a_file_without_a_checksum_is_a_warning(container: Path, machine: Path) -> None:
    (container / "chat_template.jinja").write_text("{{ messages }}")
    found = [f for f in examine(str(container), root=machine) if f.subject == "model health"]
    assert [f.level for f in found] == [WARNING, OK]
    assert "chat_template.jinja" in found[0].text


def test_a_model_that_cannot_be_read(
    container: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(doctor, "describe", refuse)
    found = by_subject(examine(str(container), root=machine), "model")
    assert found.level == PROBLEM and "Permission denied" in found.text


def test_a_model_that_does_not_fit(
    container: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = doctor.plan_model(container, doctor.EngineConfig())
    streamed = replace(plan, num_slots=5, expected_hit_rate=None, drive_bytes_per_s=1e9)
    monkeypatch.setattr(doctor, "plan_model", lambda *_: streamed)
    found = by_subject(examine(str(container), root=machine), "fit")
    assert found.level == WARNING and "at most" in found.text and found.advice

    def refuse(*_: object) -> None:
        raise MemoryBudgetError("memory is below the floor\nhint: grant more `--memory`")

    monkeypatch.setattr(doctor, "plan_model", refuse)
    found = by_subject(examine(str(container), root=machine), "fit")
    assert found == Finding("fit", PROBLEM, "memory is below the floor", "grant more `--memory`")


def test_the_command_shows_levels_and_exits_by_them(cli: Any, container: Path) -> None:
    status, out, _ = cli("doctor", container)
    assert status in (0, 1) and "model health" in out and "-> " in out
    cut(container)
    status, out, err = cli("doctor", container, "--json")
    report = json.loads(out)
    assert status == 1 and err == "" and report["model"] == str(container)
    assert {"subject", "level", "text", "advice"} == set(report["findings"][0])
    assert any(f["level"] == PROBLEM for f in report["findings"])
    status, out, _ = cli("doctor", container)
    assert status == 1 and "problem " in out


def test_a_name_of_nothing_and_a_deep_look_at_nothing(cli: Any, tmp_path: Path) -> None:
    status, out, _ = cli("doctor", tmp_path / "nowhere")
    assert status == 1 and "no such model" in out
    assert cli("doctor", "--deep")[0] == 2
