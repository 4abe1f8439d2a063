"""Traces: which experts each step of a run used, in a file. docs/traces.md has the format.

Owns the file: header, blocks, checksums. What stands inside a block is written and read natively
(`native/store/trace.h`). It decides nothing; `policy.py` replays.
"""

import contextlib
import functools
import json
import logging
import operator
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from headrace import _core
from headrace.errors import CheckpointError, ConfigError
from headrace.experts.history import write_atomically

_log = logging.getLogger(__name__)

MAGIC = b"hrtrace2"
_HEADER = struct.Struct("<IQ")  # bytes of JSON, their checksum
_BLOCK = struct.Struct("<IQ")  # bytes that follow, their checksum
_COUNTS = struct.Struct("<IIIQQQ")  # tokens in the block, and the fields of its pace
_MAX_HEADER_BYTES = 1 << 20
_MAX_BLOCK_BYTES = 1 << 30
BLOCK_TOKENS = 256
"""A block is written once its steps hold as many tokens: a killed run loses no more than that."""
RECENT_TOKENS = 1024
"""Tokens of routing kept for the next start to choose a policy by. Replaying them for 48 layers of
128 experts takes half a second."""

StepParts: TypeAlias = Sequence[tuple[int, int, bool]]
"""Of each run of rows in a step: sequence, tokens, whether they are prefilled."""


class Pace(NamedTuple):
    """How fast the steps went in which all rows decoded; sums, so paces can be added."""

    tokens: int = 0
    misses: int = 0
    """Records read for them, those read ahead included."""
    step_ns: int = 0
    """Wall time of the steps."""
    stall_ns: int = 0
    """Part of it that computing waited for records."""
    busy_ns: int = 0
    """Part of it with at least one read in flight."""

    def __add__(self, other: "Pace") -> "Pace":  # type: ignore[override]
        """Return the pace of the steps of both."""
        return Pace(*map(operator.add, self, other))


@dataclass(frozen=True)
class TraceHeader:
    """What a trace was recorded from."""

    fingerprint: str
    """Identity of the checkpoint."""
    layers: tuple[int, ...]
    """Model's layer numbers of the rows of the record table."""
    num_experts: int
    record_bytes: int
    """Bytes of one slot."""
    read_bytes: int
    """Bytes read from the drive for one record."""
    other_bytes: int
    """Memory that the recorded run gave to anything but slots and margin; 0 if not known."""
    num_readers: int
    read_ahead: int

    def is_of_same_model(self, other: "TraceHeader") -> bool:
        """Whether blocks of both may stand in one file."""
        names = ("fingerprint", "layers", "num_experts", "record_bytes", "read_bytes")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def encode(self) -> bytes:
        """Return the bytes that a file begins with."""
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return MAGIC + _HEADER.pack(len(text), _checksum(text)) + text


@dataclass(frozen=True)
class Trace:
    """A trace in memory, every id checked."""

    header: TraceHeader
    native: _core.Trace
    num_tokens: int
    pace: Pace
    """Of the recorded run, wherever it was."""


@dataclass(frozen=True)
class Block:
    """What a block holds: entries of `num_tokens` tokens, and how fast those that decode went."""

    num_tokens: int
    pace: Pace
    payload: bytes

    def encode(self) -> bytes:
        """Return its bytes in a file."""
        body = _COUNTS.pack(self.num_tokens, *self.pace) + self.payload
        return _BLOCK.pack(len(body), _checksum(body)) + body


def _checksum(content: bytes) -> int:
    return _core.checksum(np.frombuffer(content, np.uint8))


def _damaged(path: Path, offset: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"{_damaged_header(path, offset, what)}\n"
        "hint: `headrace trace replay --partial` takes the whole blocks before it"
    )


def _damaged_header(path: Path, offset: int, what: str) -> CheckpointError:
    return CheckpointError(f"damaged trace: {path}, byte {offset}\n{what}")


def _read_header(path: Path, content: bytes) -> tuple[TraceHeader, int]:
    """Return the header and where the blocks begin."""
    if content[: len(MAGIC)] != MAGIC:
        raise CheckpointError(
            f"not a trace: {path}\nexpected {MAGIC!r} at byte 0, got {content[: len(MAGIC)]!r}"
        )
    start = len(MAGIC) + _HEADER.size
    if len(content) < start:
        raise _damaged_header(path, len(content), "the file ends inside its header")
    size, checksum = _HEADER.unpack_from(content, len(MAGIC))
    text = content[start : start + size]
    if size > _MAX_HEADER_BYTES or len(text) < size:
        what = f"the file ends inside its header of {size} bytes"
        raise _damaged_header(path, len(content), what)
    if _checksum(text) != checksum:
        raise _damaged_header(path, start, "the header's checksum is wrong")
    return _parse_header(path, text), start + size


def _parse_header(path: Path, text: bytes) -> TraceHeader:
    try:
        values = json.loads(text)
        header = TraceHeader(**{**values, "layers": tuple(values["layers"])})
    except (ValueError, TypeError, KeyError) as error:
        names = ", ".join(field.name for field in fields(TraceHeader))
        raise CheckpointError(
            f"unknown header of a trace: {path}\nexpected {names}; {error}"
        ) from None
    numbers = (
        header.num_experts, header.record_bytes, header.read_bytes,
        header.num_readers, header.read_ahead,
    )  # fmt: skip
    if not (header.layers and all(type(n) is int and n > 0 for n in numbers)):
        raise CheckpointError(f"senseless header of a trace: {path}\ngot {text.decode()}")
    return header


def _blocks(path: Path, content: bytes, start: int) -> Iterator[tuple[int, Block]]:
    """Give each block and the offset of its entries; CheckpointError at the first bad one."""
    at = start
    while at < len(content):
        if len(content) - at < _BLOCK.size:
            raise _damaged(path, at, "the file ends inside the head of a block")
        size, checksum = _BLOCK.unpack_from(content, at)
        begin = at + _BLOCK.size
        body = content[begin : begin + size]
        if not _COUNTS.size <= size <= _MAX_BLOCK_BYTES or len(body) < size:
            raise _damaged(
                path, at, f"expected a block of {size} bytes, got {len(content) - begin}"
            )
        if _checksum(body) != checksum:
            raise _damaged(path, at, f"the checksum of this block of {size} bytes is wrong")
        num_tokens, *pace = _COUNTS.unpack_from(body)
        yield begin + _COUNTS.size, Block(num_tokens, Pace(*pace), body[_COUNTS.size :])
        at = begin + size


def read_trace(path: Path, *, partial: bool = False) -> Trace:
    """Read and check a trace.

    Args:
        path: the file.
        partial: take the whole blocks before the first damaged byte, and log what is left out.

    Raises:
        CheckpointError: it is no trace, or damaged; says where.
    """
    content = _content(path)
    header, start = _read_header(path, content)
    native = _core.Trace(len(header.layers), header.num_experts)
    num_tokens, pace = 0, Pace()
    try:
        for begin, block in _blocks(path, content, start):
            try:
                native.add(block.payload)
            except CheckpointError as error:
                raise _damaged(path, begin, str(error)) from None
            num_tokens += block.num_tokens
            pace += block.pace
    except CheckpointError as error:
        if not partial:
            raise
        _log.warning("the rest is left out: %s", str(error).rsplit("\nhint", 1)[0])
    return Trace(header, native, num_tokens, pace)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read trace: {path}: {error.strerror}") from None


class _Sink(Protocol):
    def add(self, block: Block) -> None: ...
    def close(self) -> None: ...


class TraceFile:
    """Appends blocks to a file; each is whole or, after a kill, the last one is cut.

    `is_cut` says that one could not be written, and that the file ends before it.
    """

    is_cut = False

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Begin the file, or go on with one of the same model.

        Raises:
            ConfigError: the file cannot be written, or is not a trace of this model.
            CheckpointError: it is a damaged trace.
        """
        self._path = path
        exists = path.exists() and path.stat().st_size > 0
        if exists:
            content = _content(path)
            known, start = _read_header(path, content)
            if not known.is_of_same_model(header):
                raise ConfigError(f"the trace is of another model: {path}\nhint: name a new file")
            try:
                for _ in _blocks(path, content, start):
                    pass
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}\nhint: name a new file: nothing is added behind the damage"
                ) from None
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write trace: {path}: {error.strerror}") from None
        self._whole_bytes = os.fstat(self._file.fileno()).st_size
        if not exists:
            self._write(header.encode())

    def _write(self, content: bytes) -> None:
        """Write all of it, or say once that the trace ends here: a run goes on without it."""
        if self._file.closed:
            return
        try:
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
            self._whole_bytes += len(content)
        except OSError as error:
            _log.warning("the trace ends here: %s: %s", self._path, error.strerror)
            self.is_cut = True
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole_bytes)
            self.close()

    def add(self, block: Block) -> None:
        """Append one block."""
        self._write(block.encode())

    def close(self) -> None:
        """Close the file; nothing is added any more."""
        try:
            self._file.close()
        except OSError as error:
            _log.warning("the trace is incomplete: %s: %s", self._path, error.strerror)


class RecentRouting:
    """The last tokens' routing, in a file beside the history: what `--policy auto` chooses by.

    Like the history it is advice: a file that is missing, damaged or of another model is put aside.
    """

    def __init__(self, path: Path, header: TraceHeader, *, is_saved: bool) -> None:
        """Read what earlier runs left."""
        self._path = path
        self._header = header
        self._is_saved = is_saved
        self._blocks: deque[Block] = deque()
        self._has_news = False
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            content = _content(self._path)
            header, start = _read_header(self._path, content)
            if header.is_of_same_model(self._header):
                self._blocks.extend(block for _, block in _blocks(self._path, content, start))
        except CheckpointError as error:
            _log.warning("recent routing ignored: %s", str(error).splitlines()[0])

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return sum(block.num_tokens for block in self._blocks)

    def trace(self, *, older_half: bool = False) -> Trace:
        """Return what is held, to be replayed; or the older half of its blocks."""
        native = _core.Trace(len(self._header.layers), self._header.num_experts)
        blocks = list(self._blocks)[: len(self._blocks) // 2 if older_half else None]
        for block in blocks:
            native.add(block.payload)
        pace = functools.reduce(operator.add, (block.pace for block in blocks), Pace())
        return Trace(self._header, native, sum(block.num_tokens for block in blocks), pace)

    def add(self, block: Block) -> None:
        """Add a block, and drop the oldest beyond what is kept."""
        self._blocks.append(block)
        self._has_news = True
        while (
            len(self._blocks) > 1 and self.num_tokens - self._blocks[0].num_tokens >= RECENT_TOKENS
        ):
            self._blocks.popleft()

    def close(self) -> None:
        """Save, if there is news; a directory that cannot be written is a logged warning."""
        if not (self._is_saved and self._has_news):
            return
        content = b"".join(block.encode() for block in self._blocks)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, self._header.encode() + content)
        except OSError as error:
            _log.warning("recent routing not saved: %s: %s", self._path, error)


class Recorder:
    """Takes the routing of a native store, whole steps at a time, to where it is wanted."""

    def __init__(self, store: _core.ExpertStore, sinks: Sequence[_Sink]) -> None:
        """Begin to record."""
        self._store = store
        self._sinks = sinks
        self._num_tokens = 0
        self._pace = Pace()
        store.start_trace()

    def step(self, parts: StepParts) -> None:
        """Note that a step begins."""
        if self._num_tokens >= BLOCK_TOKENS:
            self._drain()
        self._store.trace_step(list(parts))
        self._num_tokens += sum(num_tokens for _, num_tokens, _ in parts)

    def pace(self, pace: Pace) -> None:
        """Note how fast the step noted last went, if it only decoded."""
        self._pace += pace

    def _drain(self) -> None:
        payload = self._store.take_trace()
        if payload:
            for sink in self._sinks:
                sink.add(Block(self._num_tokens, self._pace, payload))
        self._num_tokens, self._pace = 0, Pace()

    def close(self) -> None:
        """Hand over the rest."""
        self._drain()
        for sink in self._sinks:
            sink.close()
