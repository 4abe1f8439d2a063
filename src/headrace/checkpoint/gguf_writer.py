"""Writes a GGUF file: first its header, then the bytes of each tensor as they come.

The file appears under its name complete or not at all. Which tensors there are and what is in them
the caller decides; nothing here holds more than the piece it is given.

Source:
    The GGUF specification (ggml project), version 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headrace.arrays import Bytes
from headrace.checkpoint.gguf_header import BLOCK_TYPES, DEFAULT_ALIGNMENT, MAGIC
from headrace.checkpoint.records import align_up
from headrace.checkpoint.writer import whole_file, write_all

VERSION = 3
_IDS = {type.name: number for number, type in BLOCK_TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class GgufTensorPlan:
    """A tensor that will be written."""

    name: str
    type: str
    """As GGUF names it: `Q4_0`, `F32`."""
    shape: tuple[int, ...]
    """Outermost first, the other way round than in the file."""

    @property
    def row_bytes(self) -> int:
        """Of one row of the innermost dimension."""
        type = BLOCK_TYPES[_IDS[self.type]]
        if self.shape[-1] % type.block:
            raise AssertionError(f"{self.name}: {self.shape[-1]} values are no {self.type} row")
        return self.shape[-1] // type.block * type.nbytes

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class GgufLayout:
    """The bytes before the data of a file, and where in it each tensor goes."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Sequence[GgufTensorPlan]) -> None:
        """Lay the file out.

        Args:
            metadata: bool, int (written as uint32), float (as float32), str, or a list of one of
                str, int (as int32) and float, by key.
            tensors: in the order of their data.
        """
        offsets, at = [], 0
        for tensor in tensors:
            offsets.append(at)
            at = align_up(at + tensor.nbytes, DEFAULT_ALIGNMENT)
        parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
        parts += [_string(key) + _value(value) for key, value in metadata.items()]
        for tensor, offset in zip(tensors, offsets, strict=True):
            dims = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            parts.append(_string(tensor.name) + struct.pack("<I", len(tensor.shape)) + dims)
            parts.append(struct.pack("<IQ", _IDS[tensor.type], offset))
        text = b"".join(parts)
        self.header = text.ljust(align_up(len(text), DEFAULT_ALIGNMENT), b"\0")
        self.offsets = {
            t.name: len(self.header) + offset for t, offset in zip(tensors, offsets, strict=True)
        }
        self.file_bytes = len(self.header) + at


class GgufWriter:
    """An unfinished file that takes pieces of tensors in any order."""

    def __init__(self, file: BinaryIO, layout: GgufLayout, progress: Callable[[int], None]) -> None:
        self._file, self._layout, self._progress = file, layout, progress

    def write(self, name: str, first_byte: int, data: Bytes) -> None:
        """Write a piece of a tensor, `first_byte` after its beginning."""
        self._file.seek(self._layout.offsets[name] + first_byte)
        write_all(self._file, data)
        self._progress(data.nbytes)


@contextmanager
def write_gguf(
    path: Path, layout: GgufLayout, progress: Callable[[int], None] = lambda _: None
) -> Iterator[GgufWriter]:
    """Open a file for its tensors; it gets its name when the block ends without an error.

    Args:
        path: of the file.
        layout: what it will hold.
        progress: called with the bytes written since the last call.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with whole_file(path, is_one_of_many=False) as file:
        file.truncate(layout.file_bytes)  # what nobody writes, such as padding, is zero
        write_all(file, layout.header)
        progress(len(layout.header))
        yield GgufWriter(file, layout, progress)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if len(kinds) > 1 or not kinds <= {str, int, float}:
            raise AssertionError(f"no list of GGUF values: {kinds}")
        if not kinds or kinds == {str}:
            element, body = _STRING, b"".join(map(_string, value))
        elif kinds == {int}:
            element, body = _INT32, struct.pack(f"<{len(value)}i", *value)
        else:
            element, body = _FLOAT32, struct.pack(f"<{len(value)}f", *value)
        return struct.pack("<IIQ", _ARRAY, element, len(value)) + body
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<I", _STRING) + _string(value)
