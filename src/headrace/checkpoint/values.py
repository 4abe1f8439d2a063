"""Reading ranges of checkpoint files and packing their values.

The one place of this package that moves tensor bytes: positioned reads through the native readers,
the search for NaN and infinity, quantising and packing. Works in pieces, so that its memory is
bounded by CHUNK_BYTES and not by a tensor.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from headrace import _core
from headrace.arrays import Bytes, Float32
from headrace.checkpoint.base import CHUNK_BYTES, NUMPY_TYPES
from headrace.errors import CheckpointError

DIRECT_BYTES = 1 << 20
"""Below this, starting the native readers costs more than they save."""
CHECK_VALUES = 1 << 18
"""Values searched for NaN at a time: the search needs little memory and stays in the cache."""
BLOCK_ROWS = 16
"""Outputs that a packed block interleaves: pieces of a matrix are cut at multiples of it."""

Packer: TypeAlias = Callable[[Bytes, tuple[int, int], str, str, int, str, Path, int], Bytes]
"""What `pack_values` does, with its arguments in its order."""


def read_range(path: Path, offset: int, out: Bytes) -> None:
    """Fill `out` with the bytes of `path` from `offset`.

    Large ranges take the native readers: several direct reads at once, which leave the page cache
    as it was.

    Args:
        path: the file.
        offset: of the first byte.
        out: [n] uint8, C-contiguous.

    Raises:
        CheckpointError: the file is missing or ends too early.
    """
    if out.nbytes >= DIRECT_BYTES:
        _core.read_into(str(path), offset, out)
        return
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            view, done = memoryview(out.data), 0
            while done < len(view):
                num = file.readinto(view[done:])
                if not num:
                    raise CheckpointError(
                        f"file is short: {path}\n"
                        f"expected {len(view)} bytes at offset {offset}, got {done}\n"
                        "hint: the file is truncated; run `headrace inspect --verify MODEL`"
                    )
                done += num
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def bytes_checksum(data: Bytes) -> int:
    """Return the 64-bit checksum `hr64` of bytes in memory; docs/format.md defines it."""
    return int(_core.checksum(data))


def check_finite(values: Bytes, format: str, name: str, path: Path, first: int = 0) -> None:
    """Raise CheckpointError if a NaN or infinity is among little-endian floating values.

    Args:
        values: uint8, the values' bytes.
        format: "bf16", "f16" or "f32".
        name: the tensor, for the message.
        path: its file, for the message.
        first: index of the first value within the tensor.
    """
    bits = values.reshape(-1).view("<u4" if format == "f32" else "<u2")
    sign = {"f32": 0x80000000}.get(format, 0x8000)
    exponent = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}[format]
    for begin in range(0, len(bits), CHECK_VALUES):
        # All exponent bits set means NaN or infinity; the largest magnitude tells if there is one.
        magnitude = bits[begin : begin + CHECK_VALUES] & bits.dtype.type(sign - 1)
        if int(magnitude.max()) < exponent:
            continue
        at = int(np.argmax(magnitude >= exponent))
        kind = "infinity" if int(magnitude[at]) == exponent else "NaN"
        raise CheckpointError(
            f"weight is {kind}: tensor {name}, index {first + begin + at}, file {path}\n"
            "expected finite values only\n"
            "hint: the checkpoint is damaged, or was saved from a run that diverged"
        )


def row_pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a matrix into (first row, number of rows) of about CHUNK_BYTES, whole blocks each."""
    step = max(BLOCK_ROWS, CHUNK_BYTES // max(row_bytes, 1) // BLOCK_ROWS * BLOCK_ROWS)
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def pack_range(
    path: Path,
    offset: int,
    shape: tuple[int, int],
    source: str,
    format: str,
    group: int,
    out: Bytes,
    name: str,
    pack: Packer | None = None,
) -> None:
    """Read a row-major matrix and pack it, piece by piece.

    Args:
        path: file of the values.
        offset: of the first value.
        shape: [N, K].
        source: format of the values: "bf16", "f16" or "f32".
        format: packed format to make; "f32" from any source is exact.
        group: inputs per scale; 1 for the floating formats.
        out: uint8, receives the packed bytes; exactly `_core.packed_bytes` long.
        name: the tensor, for messages.
        pack: in place of `pack_values`.

    Raises:
        CheckpointError: the range cannot be read, or holds a NaN or infinity.
    """
    rows, cols = shape
    row_bytes = cols * NUMPY_TYPES[source].itemsize
    at, buffer = 0, np.empty(0, np.uint8)
    for first, count in row_pieces(rows, row_bytes):
        if len(buffer) < count * row_bytes:
            buffer = np.empty(count * row_bytes, np.uint8)
        piece = buffer[: count * row_bytes]
        read_range(path, offset + first * row_bytes, piece)
        packed = (pack or pack_values)(
            piece, (count, cols), source, format, group, name, path, first * cols
        )
        out[at : at + len(packed)] = packed
        at += len(packed)
    if at != len(out):
        raise AssertionError(f"packed {at} bytes of {name}, expected {len(out)}")


def pack_values(
    values: Bytes,
    shape: tuple[int, int],
    source: str,
    format: str,
    group: int,
    name: str,
    path: Path,
    first: int = 0,
) -> Bytes:
    """Pack row-major values that are in memory.

    A floating target narrower than the source rounds to nearest even.

    Args:
        values: uint8, the values' bytes.
        shape: [N, K].
        source: format of the values: "bf16", "f16" or "f32".
        format: packed format to make.
        group: inputs per scale; 1 for the floating formats.
        name: the tensor, for messages.
        path: its file, for messages.
        first: index of the first value within the tensor, for messages.

    Returns:
        uint8, the packed bytes.

    Raises:
        CheckpointError: a NaN or infinity, or a weight too large for its scale's type.
    """
    try:
        packed: Bytes = _core.pack(
            values.view(NUMPY_TYPES[source]).reshape(shape), format, group, name
        )
    except CheckpointError:
        check_finite(values, source, name, path, first)  # knows the file and the whole index
        raise
    return packed


def quantise_values(
    values: Bytes,
    shape: tuple[int, int],
    source: str,
    format: str,
    group: int,
    importance: Float32 | None,
    name: str,
    path: Path,
    first: int = 0,
) -> tuple[Bytes, float, float]:
    """Pack row-major values with searched scales; see `quant_search.py`.

    Args:
        values, shape, source, format, group, name, path, first: as in `pack_values`.
        importance: [K], what a squared error of each input counts; None: see quant_search.

    Returns:
        The packed bytes, the sum of squared errors, and that of squared weights.

    Raises:
        CheckpointError: as `pack_values`.
    """
    try:
        return _core.quantise(
            values.view(NUMPY_TYPES[source]).reshape(shape), format, group, importance, name
        )
    except CheckpointError:
        check_finite(values, source, name, path, first)  # knows the file and the whole index
        raise


def unpack_values(data: Bytes, format: str, shape: tuple[int, int], group: int) -> Float32:
    """Give the real numbers that packed bytes stand for.

    Args:
        data: uint8 at any address, as a container holds a matrix.
        format: of the packed bytes.
        shape: [outputs, inputs].
        group: inputs per scale, 1 for the floating formats.

    Returns:
        [outputs, inputs] float32.
    """
    aligned = _core.aligned_empty(data.nbytes)
    aligned[:] = data
    return _core.unpack(_core.Matrix(aligned, format, *shape, group))
