"""Op tests run under each instruction set that this processor has, on one thread and on three."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from headrace import _core

FORMATS = [("f32", 1), ("f16", 1), ("bf16", 1), ("q8", 32), ("q4", 32), ("q4", 64), ("mxfp4", 32)]
MACHINES = [(isa, threads) for isa in _core.available_isas() for threads in (1, 3)]


@pytest.fixture(autouse=True)
def restored_machine() -> Iterator[None]:
    isa, threads = _core.isa(), _core.num_threads()
    yield
    _core.set_isa(isa)
    _core.set_threads(threads)


@pytest.fixture
def everywhere() -> Callable[[Callable[[], Any]], list[Any]]:
    """Calls a function under every instruction set and thread count; returns the results."""

    def run(call: Callable[[], Any]) -> list[Any]:
        results = []
        for isa, threads in MACHINES:
            _core.set_isa(isa)
            _core.set_threads(threads)
            assert _core.isa() == isa
            assert _core.num_threads() == threads
            results.append(call())
        return results

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261202)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal to the bit, the sign of zero included."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == np.float32:
        actual, expected = actual.view(np.uint32), expected.view(np.uint32)
    np.testing.assert_array_equal(actual, expected)


def make_matrix(w: np.ndarray, format: str, group: int) -> _core.Matrix:
    return _core.Matrix(_core.pack(w, format, group), format, *w.shape, group)
