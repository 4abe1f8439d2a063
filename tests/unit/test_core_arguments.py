"""Absurd arguments to the native module raise: no crash, no hang, no foreign memory read."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import _core
from headrace.errors import ConfigError, ShapeError

MATRIX = ("q8", 32, 64, 32, 0)
DOWN = ("q8", 64, 32, 32, 4352)
MOST = 2**31 - 1


def record() -> Any:
    bytes_ = _core.aligned_empty(8192)
    bytes_[:] = 0
    return bytes_


def feed(gate: Any = MATRIX, records: Any = None) -> Any:
    up = ("q8", 32, 64, 32, 2176)
    return _core.ResidentFeed(gate, up, DOWN, {0: record()} if records is None else records)


def mixture(lease: Any) -> None:
    ids, weights = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    _core.moe_ffn(np.ones((1, 64), np.float32), ids, weights, lease)


def bytes_of(count: int) -> Any:
    return np.zeros(count, np.uint8)


def probe(path: str, offset: int, **options: Any) -> None:
    options = {"record_bytes": 4096, "block_bytes": 4096, "readers": 1} | options
    _core.probe_reads([path], [(0, offset)], direct=False, with_checksum=False, **options)


CALLS: dict[str, Callable[[str], Any]] = {
    "no readers": lambda path: _core.read_into(path, 0, bytes_of(4), readers=0),
    "no readers, named": lambda path: _core.read_named(
        [("x", path, 0, bytes_of(4), 0, None)], readers=-1
    ),
    "too many readers": lambda path: _core.read_into(path, 0, bytes_of(4), readers=MOST),
    "negative offset": lambda path: _core.read_into(path, -1, bytes_of(4)),
    "negative offset, named": lambda path: _core.read_named(
        [("x", path, -4096, bytes_of(4), 0, None)]
    ),
    "offset past every file": lambda path: _core.read_into(path, 2**63 - 1, bytes_of(4)),
    "rows of no bytes": lambda path: _core.RowReader(path, 0, 0),
    "rows of fewer": lambda path: _core.RowReader(path, 0, -1),
    "rows before the file": lambda path: _core.RowReader(path, -8, 8),
    "rows past every file": lambda path: _core.RowReader(path, 0, 2**40, 2**40),
    "probe before the file": lambda path: probe(path, -4096),
    "probe of no end": lambda path: probe(path, 0, record_bytes=2**62),
    "matrix of too many": lambda path: _core.packed_bytes("f32", MOST, MOST),
    "pool of too many": lambda path: _core.KVPool(MOST, MOST, MOST, 64),
    "latents of too many": lambda path: _core.LatentPool(MOST, MOST, 512, 64),
    "more experts than the router has": lambda path: _core.router_topk(
        np.ones((3, 64), np.float32),
        _core.Matrix(_core.pack(np.ones((16, 64), np.float32), "f32"), "f32", 16, 64),
        top_k=MOST,
        renormalize=False,
    ),
    "matrix of a record that is too large": lambda path: feed(("q8", 32, 64, 32, 6144)),
    "matrix of a record with no rows": lambda path: feed(("q8", 0, 64, 32, 0)),
    "no records": lambda path: feed(records={}),
    "trace of fewer experts": lambda path: _core.Trace(1, -1),
    "trace of too many": lambda path: _core.Trace(MOST, MOST),
    "policy of fewer experts": lambda path: _core.policy_bytes(-1, 8),
    "policy of too many": lambda path: _core.policy_bytes(MOST, MOST),
}


@pytest.mark.parametrize("name", CALLS)
def test_absurd_arguments_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with pytest.raises((ConfigError, ShapeError)):
        CALLS[name](str(path))


@pytest.mark.parametrize("length", range(5))
def test_a_description_of_a_matrix_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(TypeError):
        feed(MATRIX[:length])


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError):
        feed(("q8", 2**31, 64, 32, 0))
    with pytest.raises(TypeError):
        feed(records={2**40: record()})


def test_a_feed_that_was_used_is_refused() -> None:
    used = feed()
    mixture(used)
    with pytest.raises(ShapeError, match="used before: 1 of 1 records"):
        mixture(used)


def layouts(
    *,
    gate: Any = ("q8", 32, 16, 32, 0),
    up: Any = ("q8", 32, 16, 32, 1088),
    record_bytes: int = 4096,
) -> Any:
    return [(gate, up, ("q8", 16, 32, 32, 2176), record_bytes)]


STORE: dict[str, dict[str, Any]] = {
    "layer": {"layers": [-1]},
    "layers without end": {"layers": [MOST]},
    "block": {"block_bytes": 2**63 - 1},
    "group": {"layouts": layouts(gate=("q8", 32, 16, 0, 0))},
    "matrix past the record": {"layouts": layouts(gate=("q8", 32, 16, 32, 4032))},
    "more rows than the record": {"layouts": layouts(up=("q8", MOST, 16, 32, 0))},
    "record of a copy": {"copies": np.array([[2**32, 0, 0]], np.int64)},
    "slots": {"num_slots": MOST, "layouts": layouts(record_bytes=1 << 60)},
}


@pytest.mark.parametrize("name", STORE)
def test_a_store_of_absurd_records_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(bytes(8192))
    place = np.zeros((1, 2, 1), np.int64)
    place[0, 1] = 4096
    options: dict[str, Any] = {
        "files": [str(path)], "layers": [0], "num_experts": 2, "layouts": layouts(),
        "file": np.zeros((1, 2, 1), np.int32), "offset": place,
        "length": np.full_like(place, 4096), "checksum": None, "encoding": None, "coded": [],
        "factors": None, "num_slots": 2, "num_readers": 1, "block_bytes": 4096, "read_ahead": 1,
        "direct": False, "half_life_tokens": 32.0, "lock": False, "policy": "lru",
        "lookahead": False, "drive_of_file": [], "copies": np.zeros((0, 3), np.int64), "drives": [],
    }  # fmt: skip
    _core.ExpertStore(**options).close()
    with pytest.raises(Exception, match=r"\w") as caught:
        _core.ExpertStore(**options | STORE[name])
    assert type(caught.value).__module__ == "headrace.errors"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on addresses is Linux's")
@pytest.mark.parametrize(
    "call", ["_core.read_into(path, 0, dest, readers=256)", "_core.set_threads(1024)"]
)
def test_threads_that_the_system_refuses_are_an_error(call: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    program = (
        "import resource, sys\n"
        "import numpy as np\n"
        "from headrace import _core, errors\n"
        "path, dest = sys.argv[1], np.zeros(4, np.uint8)\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + (200 << 20),) * 2)\n"
        "try:\n"
        f"    {call}\n"
        "except errors.ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "cannot start" in done.stdout
