"""Small record tables on disk for the tests of the store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace import _core
from headrace.checkpoint.records import MatrixLayout, RecordLayout, RecordTable
from headrace.config import ExpertConfig
from headrace.experts import ExpertStore, History

Bytes = npt.NDArray[np.uint8]


@dataclass
class Records:
    """A table and the bytes that each record must have."""

    table: RecordTable
    bytes: Bytes  # [Lm, E, record_bytes]

    def open(
        self, num_slots: int = 4, history: History | None = None, **options: object
    ) -> ExpertStore:
        config = replace(ExpertConfig(), **options)  # type: ignore[arg-type]
        return ExpertStore(self.table, num_slots=num_slots, readers=config, history=history)

    def check(self, layer: int, expert: int, got: Bytes) -> None:
        row = self.table.layers.index(layer)
        np.testing.assert_array_equal(got, self.bytes[row, expert])


def make_records(
    folder: Path, *, layers: tuple[int, ...] = (1, 2, 5), num_experts: int = 8, pages: int = 3
) -> Records:
    """Write one file per layer: a header page, then records in shuffled order."""
    rng = np.random.default_rng(7)
    record_bytes = pages * 4096
    shape = (len(layers), num_experts)
    content = rng.integers(0, 256, (*shape, record_bytes), np.uint8)
    offset = np.zeros((*shape, 1), np.int64)
    files = []
    for row, layer in enumerate(layers):
        order = rng.permutation(num_experts)
        files.append(folder / f"experts-{layer:03}.bin")
        files[-1].write_bytes(bytes(4096) + content[row, order].tobytes())
        offset[row, order, 0] = 4096 + np.arange(num_experts) * record_bytes
    matrices = [MatrixLayout("q8", 32, 16, 32, at, 544) for at in (0, 576, 1152)]
    table = RecordTable(
        files=tuple(files),
        layers=layers,
        num_experts=num_experts,
        layouts=(RecordLayout(*matrices, record_bytes=record_bytes),) * len(layers),
        repack=None,
        file=np.broadcast_to(np.arange(len(layers), dtype=np.int32)[:, None, None], offset.shape),
        offset=offset,
        length=np.full_like(offset, record_bytes),
        checksum=np.array(
            [[_core.checksum(record) for record in row] for row in content], np.uint64
        ),
    )
    return Records(table, content)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return make_records(tmp_path)


@pytest.fixture
def faults() -> Iterator[Callable[..., None]]:
    """`_core.inject_fault`, disarmed afterwards."""
    _core.clear_faults()
    yield _core.inject_fault
    _core.clear_faults()


def read_all(store: ExpertStore, layer: int, ids: object) -> dict[int, Bytes]:
    """Acquire, take every record as it comes, copy its bytes, give it back."""
    result: dict[int, Bytes] = {}
    with store.acquire(layer, np.atleast_2d(np.asarray(ids, np.int32))) as lease:
        experts = lease.expert_ids
        while ready := lease.next_ready():
            for index in ready:
                result[int(experts[index])] = lease.data(index).copy()
                lease.done(index)
    return result
