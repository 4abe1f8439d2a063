from pathlib import Path
from typing import Any

import pytest

from headrace.metrics import (
    available_memory_bytes,
    format_bytes,
    peak_memory_bytes,
    processor_quota,
    resident_bytes,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, Any]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def meminfo(available: int) -> Any:
    return f"MemTotal:  9 kB\nMemAvailable:   {available // 1024} kB\nBuffers: 1 kB\n"


def test_without_any_source_nothing_is_claimed(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None


def test_mem_available_alone(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": meminfo(5 * GIB)})
    assert available_memory_bytes(tmp_path) == 5 * GIB


def test_cgroup_v2_the_tightest_of_all_parents_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB),
            "proc/self/cgroup": "0::/user/app/job\n",
            f"{base}/user/app/job/memory.max": 8 * GIB,
            f"{base}/user/app/job/memory.current": 1 * GIB,
            f"{base}/user/app/memory.max": 4 * GIB,
            f"{base}/user/app/memory.current": 3 * GIB,
            f"{base}/user/app/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nfile 3\n",
            f"{base}/user/memory.max": "max\n",
            f"{base}/user/memory.current": 3 * GIB,
        },
    )
    # 4 GiB granted to the parent, 3 used, half a GiB of that is cache the kernel would drop.
    assert available_memory_bytes(tmp_path) == 4 * GIB - (3 * GIB - GIB // 2)


def test_cgroup_v2_high_is_a_limit_too(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {
        "proc/meminfo": meminfo(64 * GIB),
        "proc/self/cgroup": "0::/\n",
        f"{base}/memory.max": "max\n",
        f"{base}/memory.high": 2 * GIB,
        f"{base}/memory.current": GIB,
    }
    write(tmp_path, files)
    assert available_memory_bytes(tmp_path) == GIB


def test_cgroup_v1_and_its_way_of_writing_no_limit(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": meminfo(16 * GIB),
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/box/inner\n3:cpuset:/\n0::/\n",
        f"{base}/memory.limit_in_bytes": 9223372036854771712,
        f"{base}/memory.usage_in_bytes": 3 * GIB,
        f"{base}/box/inner/memory.limit_in_bytes": 2 * GIB,
        f"{base}/box/inner/memory.usage_in_bytes": GIB // 2,
    }
    write(tmp_path, files)
    assert available_memory_bytes(tmp_path) == 2 * GIB - GIB // 2
    write(tmp_path, {f"{base}/box/inner/memory.limit_in_bytes": 9223372036854771712})
    assert available_memory_bytes(tmp_path) == 16 * GIB


def test_in_a_container_the_hosts_path_does_not_exist_but_the_root_group_counts(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(16 * GIB),
            "proc/self/cgroup": "0::/system.slice/docker-123.scope\n",
            "sys/fs/cgroup/memory.max": 1 * GIB,
            "sys/fs/cgroup/memory.current": 1000,
        },
    )
    assert available_memory_bytes(tmp_path) == 1 * GIB - 1000


def test_path_above_the_mount_is_read_within_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../other\n",
            "sys/fs/cgroup/other/memory.max": GIB,
            "sys/fs/cgroup/other/memory.current": 2 * GIB,
        },
    )
    assert available_memory_bytes(tmp_path) == 0  # over the limit is nothing, not a negative number


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (2048, "2 KiB"), (1536 << 20, "1.5 GiB"), (570e6, "544 MiB"),
     (1023 << 20, "0.999 GiB"), (5 << 40, "5 TiB")],
)  # fmt: skip
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_tightest_quota_of_processors_counts(tmp_path: Path) -> None:
    assert processor_quota(tmp_path) is None
    base = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n0::/app/job\n",
            f"{base}/app/job/cpu.max": "max 100000\n",
            f"{base}/app/cpu.max": "250000 100000\n",
            f"{base}/cpu,cpuacct/box/cpu.cfs_quota_us": "-1\n",
            f"{base}/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        },
    )
    assert processor_quota(tmp_path) == 2.5
    write(tmp_path, {f"{base}/cpu,cpuacct/box/cpu.cfs_quota_us": "150000\n"})
    assert processor_quota(tmp_path) == 1.5


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_process_measures_itself() -> None:
    assert 1 << 20 < resident_bytes() <= peak_memory_bytes()


@pytest.mark.parametrize(
    "garbage", ["", "x", "0:", "0::", "::", "\xff\n\n0", "0::/a\0b", "-1", "1e9"]
)
def test_garbage_of_the_system_is_unknown_and_not_an_error(garbage: str, tmp_path: Path) -> None:
    files = ["proc/self/cgroup", "proc/meminfo", "sys/fs/cgroup/memory.max"]
    files += ["sys/fs/cgroup/memory.high", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/cpu.max"]
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(garbage.encode("latin-1"))
    assert available_memory_bytes(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("nonsense\n0::/\n")
    assert processor_quota(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {garbage}\nMemAvailable: 8 kB\n")
    assert available_memory_bytes(tmp_path) == 8192
