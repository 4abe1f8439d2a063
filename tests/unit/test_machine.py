"""What the machine says of itself, read from directories of fake files."""

from pathlib import Path

from headrace.machine import (
    Pressure,
    Steal,
    drive_bytes_read,
    huge_pages,
    memory_info,
    pressure,
    processor_name,
    read_number,
)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nothing_is_known_where_there_are_no_files(tmp_path: Path) -> None:
    assert memory_info(tmp_path) == {}
    assert huge_pages(tmp_path) is None
    assert pressure("memory", tmp_path) is None
    assert drive_bytes_read(tmp_path) is None
    assert processor_name(tmp_path)  # the architecture at least
    with Steal(tmp_path) as steal:
        pass
    assert steal.share == 0 and not steal.is_void


def test_what_the_files_say(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: Some Processor 9000\n")
    write(tmp_path, "proc/meminfo", "MemTotal:  2048 kB\nHugePages_Total:  0\nBad: x kB\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    write(
        tmp_path,
        "proc/pressure/io",
        "some avg10=1.00 avg60=12.50 avg300=0.10 total=9\n"
        "full avg10=0.00 avg60=2.50 avg300=0.00 total=3\n",
    )
    write(tmp_path, "proc/pressure/cpu", "some avg10=1.00 avg60=oops\n")
    write(tmp_path, "proc/self/io", "rchar: 5\nread_bytes: 8192\n")
    assert processor_name(tmp_path) == "Some Processor 9000"
    assert memory_info(tmp_path) == {"MemTotal": 2 << 20}
    assert huge_pages(tmp_path) == "madvise"
    assert pressure("io", tmp_path) == Pressure(some=0.125, full=0.025)
    assert pressure("cpu", tmp_path) is None
    assert drive_bytes_read(tmp_path) == 8192


def test_stolen_time_is_a_share_of_all_of_it(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", "cpu 100 0 100 700 0 0 0 100 0 0\n")
    with Steal(tmp_path) as steal:
        write(tmp_path, "proc/stat", "cpu 150 0 100 700 0 0 0 150 0 0\n")
    assert steal.share == 0.5 and steal.is_void


def test_a_number_is_a_whole_number_and_nothing_else(tmp_path: Path) -> None:
    for text, value in (("42\n", 42), ("-5", -5), ("max", None), ("", None), ("4 2", None)):
        write(tmp_path, "x", text)
        assert read_number(tmp_path / "x") == value
    assert read_number(tmp_path / "missing") is None
    assert read_number(tmp_path) is None  # a directory
