"""Parses the header of a GGUF file: metadata and where each tensor lies. Reads no weights.

The file is not trusted: every count, length, type and offset is checked against the bytes that are
there before it is used.

Source:
    The GGUF specification (ggml project), versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from headrace.checkpoint.jsonfile import lfs_hint
from headrace.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 4

# Value types of metadata: struct code by id. 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class BlockType:
    """How one tensor type stores values: `block` values in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is outermost first: a linear is [outputs, inputs]."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    nbytes: int
    path: Path
    """The file, one of several if the model is split."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the innermost dimension."""
        return self.shape[-1] // self.type.block * self.type.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """The parsed header of one file."""

    path: Path
    file_bytes: int
    header_bytes: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of a GGUF file.

    Raises:
        CheckpointError: unreadable, not a GGUF file, truncated, or inconsistent; says at which
        byte. UnsupportedModelError: another version, a big-endian file, an unknown tensor type.
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            if file_bytes < len(MAGIC):
                raise CheckpointError(
                    f"not a checkpoint: {path}\n"
                    f"expected a directory or a GGUF file, got {file_bytes} bytes"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return parse_header(path, view, file_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class ByteView(Protocol):
    """The bytes of a file, wherever they are."""

    def __getitem__(self, span: slice, /) -> bytes:
        """Return the bytes of a span from its start to its stop."""


def parse_header(path: Path, view: ByteView, file_bytes: int) -> GgufHeader:
    """Parse and check the header of a file of which the bytes may be elsewhere.

    Args:
        path: for messages, and where the tensors are said to lie.
        view: looked at from the start on, not beyond the header.
        file_bytes: of the whole file.

    Raises:
        CheckpointError, UnsupportedModelError: as `read_header`.
    """
    return _Parser(path, view, file_bytes).parse()


class _Parser:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, path: Path, view: ByteView, file_bytes: int) -> None:
        self.path = path
        self.view = view
        self.end = file_bytes
        self.at = 0

    def parse(self) -> GgufHeader:
        if self.take(4, "the magic") != MAGIC:
            hint = lfs_hint(self.view[0:64])
            raise CheckpointError(
                f"not a checkpoint: {self.path}\n"
                f"expected a directory or a GGUF file, which begins with {MAGIC!r}, "
                f"got {self.view[0:4]!r}" + (f"\nhint: {hint}" if hint else "")
            )
        self.check_version()
        num_tensors = self.count("tensors", least_bytes=24)
        num_fields = self.count("metadata fields", least_bytes=13)
        metadata = self.fields(num_fields)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            self.fail("`general.alignment` is no sensible multiple of 8", f"got {alignment!r}")
        infos = [self.tensor_info() for _ in range(num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        tensors = self.place(infos, data_start, alignment)
        return GgufHeader(self.path, self.end, self.at, metadata, tensors)

    def check_version(self) -> None:
        version = self.scalar("I", "the version")
        if version in VERSIONS:
            return
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in VERSIONS else f"has GGUF version {version}"
        raise UnsupportedModelError(
            f"the file {what}: {self.path}\n"
            f"expected little-endian version {' or '.join(map(str, VERSIONS))}"
        )

    def fields(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"metadata key {key[:80]!r} appears twice")
            metadata[key] = self.value(self.scalar("I", f"the type of {key[:80]!r}"), key)
        return metadata

    def value(self, type_id: int, key: str, depth: int = 0) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id], f"the value of {key[:80]!r}")
        if type_id == _STRING:
            return self.string(f"the value of {key[:80]!r}")
        if type_id != _ARRAY or depth == MAX_NESTING:
            self.fail(f"metadata key {key[:80]!r} has an unknown type", f"got type {type_id}")
        element = self.scalar("I", f"the element type of {key[:80]!r}")
        if element in _SCALARS:
            code = _SCALARS[element]
            count = self.count(f"elements of {key[:80]!r}", struct.calcsize(code))
            raw = self.take(count * struct.calcsize(code), f"the elements of {key[:80]!r}")
            return np.frombuffer(raw, np.dtype(code).newbyteorder("<")).tolist()
        count = self.count(f"elements of {key[:80]!r}", least_bytes=8)
        if element == _STRING:
            what = f"an element of {key[:80]!r}"
            return [self.string(what) for _ in range(count)]
        return [self.value(element, key, depth + 1) for _ in range(count)]

    def tensor_info(self) -> tuple[str, BlockType, tuple[int, ...], int, int]:
        name = self.string("a tensor's name")
        num_dims = self.scalar("I", f"the number of dimensions of {name[:80]!r}")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            self.fail(
                f"tensor {name[:80]!r} has an impossible number of dimensions",
                f"expected 1 to {MAX_DIMENSIONS}, got {num_dims}",
            )
        dims = [self.scalar("Q", f"a dimension of {name[:80]!r}") for _ in range(num_dims)]
        type_id = self.scalar("I", f"the type of {name[:80]!r}")
        offset = self.scalar("Q", f"the offset of {name[:80]!r}")
        if type_id not in BLOCK_TYPES:
            raise UnsupportedModelError(
                f"tensor {name[:80]!r} has an unknown type: {self.path}\ngot type {type_id}"
            )
        type = BLOCK_TYPES[type_id]
        if 0 in dims or dims[0] % type.block:
            self.fail(
                f"tensor {name[:80]!r} has an impossible shape",
                f"got {dims} of {type.name}, whose rows are multiples of {type.block} values",
            )
        nbytes = math.prod(dims) // type.block * type.nbytes
        return name, type, tuple(reversed(dims)), offset, nbytes

    def place(
        self,
        infos: list[tuple[str, BlockType, tuple[int, ...], int, int]],
        data_start: int,
        alignment: int,
    ) -> dict[str, GgufTensor]:
        """Check that every tensor lies within the file, aligned, and apart from the others."""
        tensors: dict[str, GgufTensor] = {}
        previous_end, previous = 0, ""
        for name, type, shape, offset, nbytes in sorted(infos, key=lambda info: info[3]):
            if name in tensors:
                self.fail(f"tensor {name[:80]!r} appears twice")
            if offset % alignment:
                self.fail(
                    f"tensor {name[:80]!r} is not aligned",
                    f"expected a multiple of {alignment}, got {offset}",
                )
            if data_start + offset + nbytes > self.end:
                raise CheckpointError(
                    f"tensor {name[:80]!r} ends past the file: {self.path}\n"
                    f"expected {nbytes} bytes at offset {data_start + offset}, "
                    f"got a file of {self.end} bytes\n"
                    "hint: the file is truncated; copy it again"
                )
            if offset < previous_end:
                self.fail(f"tensors {previous[:80]!r} and {name[:80]!r} overlap")
            previous_end, previous = offset + nbytes, name
            tensors[name] = GgufTensor(name, type, shape, data_start + offset, nbytes, self.path)
        return tensors

    # Primitives

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            raise CheckpointError(
                f"GGUF header ends within {what}: {self.path}\n"
                f"expected {count} bytes at offset {self.at}, "
                f"got a file of {self.end} bytes\nhint: the file is truncated; copy it again"
            )
        start, self.at = self.at, self.at + count
        return self.view[start : self.at]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A count that the rest of the file can hold at `least_bytes` for each."""
        count: int = self.scalar("Q", f"the number of {what}")
        most = (self.end - self.at) // least_bytes
        if count > most:
            self.fail(f"impossible number of {what}", f"expected at most {most}, got {count}")
        return count

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def fail(self, what: str, detail: str = "") -> NoReturn:
        raise CheckpointError(
            f"malformed GGUF header: {self.path}\n{what}, before offset {self.at}"
            + (f"\n{detail}" if detail else "")
        )
