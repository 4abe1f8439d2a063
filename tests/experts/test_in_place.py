"""Records read in place from row-major tensors equal the same matrices packed at once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.checkpoint.records import RecordTable, make_record_layout
from headrace.config import ExpertConfig
from headrace.errors import ExpertReadError
from headrace.experts import ExpertStore

from .conftest import read_all

HIDDEN, INNER, EXPERTS = 72, 40, 5  # neither a multiple of 16
DTYPES = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}


def make_table(folder: Path, format: str, start: int) -> tuple[RecordTable, np.ndarray]:
    """Write gate, up and down of every expert at unaligned places of two files."""
    rng = np.random.default_rng(5)
    layout = make_record_layout(HIDDEN, INNER, format, 1)
    files = (folder / "a.bin", folder / "b.bin")
    contents = [bytearray(start), bytearray(start)]
    shape = (1, EXPERTS, 3)
    file, offset, length = (
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int64),
        np.zeros(shape, int),
    )
    expected = np.zeros((EXPERTS, layout.record_bytes), np.uint8)
    for expert in range(EXPERTS):
        for part, matrix in enumerate(layout.matrices):
            values = rng.normal(size=(matrix.rows, matrix.cols)).astype(np.float32)
            stored = (
                (values.view(np.uint32) >> 16).astype(np.uint16)
                if format == "bf16"
                else values.astype(DTYPES[format])
            )
            which = (expert + part) % 2
            file[0, expert, part] = which
            offset[0, expert, part] = len(contents[which])
            length[0, expert, part] = stored.nbytes
            contents[which] += stored.tobytes() + bytes(6)
            packed = _core.pack(stored, format)
            expected[expert, matrix.offset : matrix.offset + packed.size] = packed
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    table = RecordTable(
        files, (4,), EXPERTS, (layout,), format, file, offset, length.astype(np.int64), None
    )
    return table, expected


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("start", [64, 77])
@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_in_place_equals_packed(
    tmp_path: Path, format: str, start: int, block_bytes: int, direct: bool
) -> None:
    table, expected = make_table(tmp_path, format, start)
    config = replace(ExpertConfig(), block_bytes=block_bytes, direct=direct)
    with ExpertStore(table, num_slots=2, readers=config) as store:
        for _ in range(2):
            for expert, got in read_all(store, 4, range(EXPERTS)).items():
                for matrix in table.shape.matrices:
                    end = matrix.offset + matrix.nbytes
                    np.testing.assert_array_equal(
                        got[matrix.offset : end], expected[expert, matrix.offset : end]
                    )
        stats = store.stats()
        assert stats.bytes_read >= stats.misses * table.read_bytes
        store.debug_check()


def test_a_failed_range_names_its_matrix(tmp_path: Path, faults: Callable[..., None]) -> None:
    table, _ = make_table(tmp_path, "bf16", 64)
    path = table.files[table.file[0, 3, 2]]
    path.write_bytes(path.read_bytes()[: table.offset[0, 3, 2] + 100])
    with (
        ExpertStore(table, num_slots=4, readers=ExpertConfig()) as store,
        pytest.raises(ExpertReadError, match=r"short: layer 4, expert 3, matrix down.*\n.*got 100"),
    ):
        read_all(store, 4, [3])


BAD_BITS = {"bf16": (0x7F80, 0xFFC0), "f16": (0x7C00, 0xFE01), "f32": (0xFF800000, 0x7FC00000)}


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("start", [64, 77])
@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_weight_that_is_not_finite_is_named_and_leaks_no_slot(
    tmp_path: Path, format: str, start: int, block_bytes: int, direct: bool, part: int
) -> None:
    table, expected = make_table(tmp_path, format, start)
    path = table.files[table.file[0, 3, part]]
    matrix = table.shape.matrices[part]
    size = 4 if format == "f32" else 2
    good = path.read_bytes()
    damaged = bytearray(good)
    at = int(table.offset[0, 3, part])
    indices = (matrix.cols * (matrix.rows - 2) + 3, matrix.cols * matrix.rows - 1)
    for index, bits in zip(indices, BAD_BITS[format], strict=True):
        damaged[at + index * size : at + (index + 1) * size] = bits.to_bytes(size, "little")
    config = replace(ExpertConfig(), block_bytes=block_bytes, direct=direct)
    with ExpertStore(table, num_slots=2, readers=config) as store:
        path.write_bytes(damaged)
        for _ in range(4):  # more often than there are slots
            with pytest.raises(ExpertReadError) as caught:
                read_all(store, 4, [3])
            message = str(caught.value)
            name = ("gate", "up", "down")[part]
            assert f"not finite: layer 4, expert 3, matrix {name}, file {path}\n" in message
            assert f"index [{matrix.rows - 2}, 3], offset {at + indices[0] * size}\n" in message
            store.debug_check()
        path.write_bytes(good)
        for expert, got in read_all(store, 4, range(EXPERTS)).items():
            for one in table.shape.matrices:
                end = one.offset + one.nbytes
                np.testing.assert_array_equal(
                    got[one.offset : end], expected[expert, one.offset : end]
                )
