"""A drive that a slower one stands for: the same bytes, later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.errors import ConfigError


@pytest.fixture(autouse=True)
def _every_drive_as_it_is() -> Iterator[None]:
    yield
    _core.clear_slow_drives()


def test_a_slow_drive_gives_the_same_bytes(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8)
    path = tmp_path / "data.bin"
    path.write_bytes(data.tobytes())
    _core.slow_drive(str(tmp_path), bytes_per_s=1e8, latency_s=0.001)
    got = np.zeros_like(data)
    _core.read_into(str(path), 0, got, readers=2, block_bytes=65536)
    assert np.array_equal(got, data)


@pytest.mark.parametrize("bandwidth, latency", [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_a_drive_that_cannot_be_is_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ConfigError, match="above zero"):
        _core.slow_drive("/", bytes_per_s=bandwidth, latency_s=latency)
