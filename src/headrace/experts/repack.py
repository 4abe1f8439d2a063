"""What packing records in place costs a reader thread: measured on this machine, on made-up bytes.

The time does not depend on the values, so nothing of the model is read.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from headrace import _core
from headrace.arrays import Bytes
from headrace.checkpoint.gguf_header import BLOCK_TYPES
from headrace.checkpoint.records import PLAIN_ROWS, MatrixLayout, RecordTable

BLOCK_ROWS = 16
"""Outputs that are packed at a time: one item of work, which one core does."""
SAMPLES = 5
SAMPLE_BYTES = 1 << 20
FILL = 0x3C
"""A byte that, repeated, is a finite scale of a usual size in every type of scales."""


def measure_repack(table: RecordTable) -> float | None:
    """Bytes of the files that one core packs in a second; None if records are packed already."""
    if table.repack is None:
        return None
    if table.coded:
        sizes, seconds = zip(*(_measure_coded(table, i) for i in range(3)), strict=True)
        return float(sum(sizes) / sum(seconds))
    measured: dict[tuple[int, MatrixLayout], float] = {}
    num_bytes = num_seconds = 0.0
    for row in range(len(table.layers)):
        for part, matrix in enumerate(table.layouts[row].matrices):
            type_id = PLAIN_ROWS if table.encoding is None else int(table.encoding[row, part])
            if (type_id, matrix) not in measured:
                measured[type_id, matrix] = _measure_rows(type_id, matrix)
            length = float(table.length[row, 0, part])
            num_bytes += length
            num_seconds += length / measured[type_id, matrix]
    return num_bytes / num_seconds


def _measure_rows(type_id: int, matrix: MatrixLayout) -> float:
    """Bytes of rows that a core packs in a second."""
    if type_id == PLAIN_ROWS:
        size = _core.packed_bytes(matrix.format, BLOCK_ROWS, matrix.cols, 1)
        values: Bytes = np.full(size, FILL, np.uint8)
        plain = _core.aligned_empty(size)
        return size / _seconds(
            lambda: _core.repack_rows(values, matrix.format, BLOCK_ROWS, matrix.cols, plain), size
        )
    type = BLOCK_TYPES[type_id]
    row_bytes = matrix.cols // type.block * type.nbytes
    rows: Bytes = np.full((BLOCK_ROWS, row_bytes), FILL, np.uint8)
    packed = _core.aligned_empty(
        _core.packed_bytes(matrix.format, BLOCK_ROWS, matrix.cols, matrix.group)
    )
    return rows.size / _seconds(
        lambda: _core.repack_gguf(rows, type_id, matrix.cols, matrix.format, matrix.group, packed),
        rows.size,
    )


def _measure_coded(table: RecordTable, index: int) -> tuple[int, float]:
    """Bytes of a matrix, 0 gate to 2 down, and the seconds that a core packs them in."""
    matrix = table.shape.matrices[index]
    tensors = []
    for number, stored in enumerate(table.coded):
        is_shared = stored.matrix > 2 and index < 2  # by gate and up
        if stored.matrix != index and not is_shared:
            continue
        size = int(table.length[0, 0, number]) // (2 if is_shared else 1)
        data: Bytes = np.full(size, FILL, np.uint8)
        if stored.kind == "group_of_input":
            groups = np.arange(matrix.cols, dtype=np.int32) // stored.group
            data = groups.view(np.uint8)
        description = (
            0, stored.kind, stored.scales, stored.factor, stored.group, stored.zero_offset
        )  # fmt: skip
        tensors.append((description, data))
    size = sum(data.size for _, data in tensors)
    packed = _core.aligned_empty(matrix.nbytes)
    return size, _seconds(
        lambda: _core.repack_coded(
            tensors, matrix.format, matrix.rows, matrix.cols, matrix.group, packed
        ),
        size,
    )


def _seconds(pack: Callable[[], object], num_bytes: int) -> float:
    """The usual time of a call, whose source has `num_bytes`."""
    pack()
    calls = max(1, SAMPLE_BYTES // num_bytes)
    samples = []
    for _ in range(SAMPLES):
        start = time.thread_time()
        for _ in range(calls):
            pack()
        samples.append((time.thread_time() - start) / calls)
    return median(samples)
