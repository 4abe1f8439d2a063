"""Which drive holds a path, and what is said of it: over fake sysfs trees."""

from pathlib import Path

import pytest

from headrace.drive import Drive, find_drive


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that a drive is asked for."""
    path = tmp_path / "data with space"
    path.mkdir()
    return path


def mountinfo(root: Path, *lines: str) -> None:
    write(root, {"proc/self/mountinfo": "\n".join(lines)})


def link(root: Path, number: str, folder: str) -> None:
    (root / "sys/dev/block").mkdir(parents=True, exist_ok=True)
    (root / "sys/dev/block" / number).symlink_to(root / folder)


def make_nvme(root: Path, name: str = "nvme0n1", serial: str | None = "S123") -> str:
    folder = f"sys/devices/pci0/nvme/nvme0/{name}"
    controller = f"{folder}/device"
    write(
        root,
        {
            f"{folder}/size": 4_000_000_000,
            f"{folder}/queue/rotational": 0,
            f"{folder}/queue/scheduler": "[none] mq-deadline",
            f"{folder}/queue/read_ahead_kb": 128,
            f"{controller}/model": "Fast Drive 2TB   ",
            f"{controller}/hwmon3/temp1_input": 71_850,
            f"{controller}/hwmon3/temp1_max": 81_000,
            f"{folder}/{name}p2/partition": 2,
        },
    )
    if serial:
        write(root, {f"{controller}/serial": serial})
    return folder


def test_a_partition_leads_to_its_drive(tmp_path: Path, place: Path) -> None:
    folder = make_nvme(tmp_path)
    link(tmp_path, "259:2", f"{folder}/nvme0n1p2")
    escaped = str(place).replace(" ", "\\040")
    mountinfo(
        tmp_path,
        "20 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw",
        f"21 1 259:2 / {escaped} ro,noatime - xfs /dev/nvme0n1p2 rw",
        "a line that no kernel writes",
    )
    drive = find_drive(place, tmp_path, (259, 2))
    assert (drive.name, drive.model, drive.serial) == ("nvme0n1", "Fast Drive 2TB", "S123")
    assert drive.size_bytes == 4_000_000_000 * 512 and drive.is_rotational is False
    assert (drive.filesystem, drive.mount_point) == ("xfs", str(place))
    assert drive.is_read_only and drive.scheduler == "none"
    assert drive.read_ahead_bytes == 128 << 10
    assert (drive.temperature_c, drive.limit_c) == (71.85, 81.0)
    assert drive.is_counted and not drive.is_memory
    assert "nvme0n1" in drive.label and "xfs" in drive.label
    write(tmp_path, {f"{folder}/nvme0n1p1/partition": 1})
    link(tmp_path, "259:1", f"{folder}/nvme0n1p1")
    assert drive.shares_with(find_drive(tmp_path, tmp_path, (259, 1))), "partitions take turns"
    assert not drive.shares_with(find_drive(place, tmp_path, (1, 2)))


def identity(tmp_path: Path, place: Path, number: str, **how: object) -> str:
    folder = make_nvme(tmp_path / number, **how)  # type: ignore[arg-type]
    link(tmp_path / number, number, folder)
    mountinfo(tmp_path / number, f"20 1 {number} / / rw - ext4 /dev/x rw")
    major, minor = number.split(":")
    return find_drive(place, tmp_path / number, (int(major), int(minor))).identity


def test_a_serial_number_outlives_a_change_of_names(tmp_path: Path, place: Path) -> None:
    first = identity(tmp_path, place, "259:0", name="nvme0n1")
    again = identity(tmp_path, place, "259:7", name="nvme5n1")
    other = identity(tmp_path, place, "259:9", serial="S124")
    assert first == again != other


def test_without_a_serial_number_twins_differ_by_name(tmp_path: Path, place: Path) -> None:
    first = identity(tmp_path, place, "259:0", name="nvme0n1", serial=None)
    twin = identity(tmp_path, place, "259:7", name="nvme5n1", serial=None)
    assert first != twin


def test_a_stacked_device_names_the_drives_below(tmp_path: Path, place: Path) -> None:
    folder = "sys/devices/virtual/block/dm-0"
    write(
        tmp_path,
        {
            f"{folder}/dm/name": "vg-models",
            f"{folder}/dm/uuid": "LVM-abc",
            f"{folder}/slaves/sda/x": 1,
            f"{folder}/slaves/sdb/x": 1,
        },
    )
    link(tmp_path, "252:0", folder)
    mountinfo(tmp_path, "20 1 252:0 / / rw - ext4 /dev/mapper/vg-models rw")
    drive = find_drive(place, tmp_path, (252, 0))
    assert drive.parts == ("sda", "sdb") and drive.model == "vg-models"
    assert drive.serial == "LVM-abc" and drive.temperature_c is None
    assert "sda, sdb" in drive.label


def test_a_filesystem_with_its_own_device_number_leads_to_what_is_mounted(
    tmp_path: Path, place: Path
) -> None:
    write(tmp_path, {"sys/class/block/sdz9/partition": 9, "sys/class/block/size": 8})
    mountinfo(tmp_path, "20 1 0:40 / / rw - btrfs /dev/sdz9 rw")
    drive = find_drive(place, tmp_path, (0, 51))
    assert drive.filesystem == "btrfs" and drive.size_bytes == 8 * 512


@pytest.mark.parametrize(
    ("filesystem", "is_memory", "is_counted"),
    [
        ("tmpfs", True, True),
        ("nfs4", False, False),
        ("fuse.sshfs", False, False),
        ("virtiofs", False, False),
        ("zfs", False, False),
        ("overlay", False, True),
    ],
)
def test_filesystems_without_a_block_device(
    tmp_path: Path, place: Path, filesystem: str, is_memory: bool, is_counted: bool
) -> None:
    mountinfo(tmp_path, f"20 1 0:40 / / rw - {filesystem} there:/x rw")
    drive = find_drive(place, tmp_path, (0, 40))
    assert (drive.name, drive.source) == (None, "there:/x")
    assert (drive.is_memory, drive.is_counted) == (is_memory, is_counted)
    assert drive.identity == f"{filesystem} there:/x" and filesystem in drive.label


def test_nothing_known_is_no_error(tmp_path: Path, place: Path) -> None:
    drive = find_drive(place, tmp_path, (1, 2))
    assert drive.name is None and drive.filesystem is None and drive.temperature_c is None
    assert isinstance(drive.identity, str) and isinstance(drive.label, str)


def test_the_real_system_answers_or_says_nothing(tmp_path: Path) -> None:
    assert isinstance(find_drive(tmp_path), Drive)
    with pytest.raises(FileNotFoundError):
        find_drive(tmp_path / "not there")
