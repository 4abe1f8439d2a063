"""The expert store: models ask it for the records a router chose, and get a lease.

Owns every slot, the reader threads and the open files of the experts. It decides what is read, kept
and given up, and never changes a result. Placement and reading are native (`native/store`); this
module translates the checkpoint's record table, and reports.
"""

import logging
import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace import _core
from headrace._core import Lease
from headrace.arrays import Int32, Int64
from headrace.checkpoint.records import PLAIN_ROWS, RecordLayout, RecordTable
from headrace.config import ExpertConfig
from headrace.experts.history import History
from headrace.experts.policy import DEFAULT_POLICY, RESIDENT_POLICY, choose_policy
from headrace.experts.trace import (
    Pace,
    RecentRouting,
    Recorder,
    StepParts,
    TraceFile,
    TraceHeader,
)

_log = logging.getLogger(__name__)

__all__ = ["DriveReading", "DriveUse", "ExpertStore", "Lease", "StepCounters", "StoreStats"]

UNKNOWN_BYTES_PER_S = 1e9
FLOOR_SLOTS = 2
"""Fewest slots a store works with; a plan asks for more, so that it works well."""


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened. One request is one distinct expert of one acquire.

    `hits + misses == requests`, and for packed records `bytes_read == misses * record_bytes` as
    long as no read failed and nothing was stolen.
    """

    requests: int
    hits: int
    """In a slot, or already on the way."""
    misses: int
    joined: int
    """Hits whose read had not finished."""
    prefetch_hits: int
    """Hits whose bytes came by prefetch or warming, counted at their first use."""
    evictions: int
    bytes_read: int
    """For misses; advice counts in prefetch_bytes. In place, with the aligned edges of ranges."""
    prefetch_bytes: int
    """For prefetch and warming."""
    reread_bytes: int
    """Part of the two above: records that had been read before in this process."""
    failed_copies: int
    """Records that could not be read, or were damaged, at one of their places; read elsewhere."""
    failed_reads: int
    """Reads of records that failed or gave a wrong checksum, advised ones too; their bytes count
    nowhere."""
    cancelled: int
    """Requests withdrawn because their lease ended before the read began."""
    stolen: int
    """Records a lease lost before it used them, so that another lease could go on."""
    stall_ns: int
    """Time that computing waited for records."""
    read_ns: int
    """Summed over reads, which overlap."""
    drive_busy_ns: int
    """Wall time with at least one read in flight."""
    lookahead_named: int
    """Distinct experts that lookahead named for layers which were then acquired."""
    lookahead_wanted: int
    """Distinct experts that these layers asked for; recall is right / wanted."""
    lookahead_right: int
    """In both; precision is right / named."""
    lookahead_used: int
    """Records that lookahead read and a layer then used."""
    lookahead_unused: int
    """Records that it read and gave up; times the record size: bytes wasted."""
    lookahead_saved_ns: int
    """Time in which nobody waited for the drive and it read what was then used."""
    reads_in_flight_max: int
    read_mode: str
    """ "direct", or "buffered" once any file refused direct reads."""


@dataclass(frozen=True)
class DriveUse:
    """What one drive gave since the store was opened."""

    path: str
    """Its folder."""
    bytes_read: int
    busy_ns: int
    bytes_per_s: float
    """As reads are expected to go from now on."""
    failed_copies: int
    is_given_up: bool
    """Its copies are read no more, because a read failed."""


class DriveReading(NamedTuple):
    """How one of several drives is read."""

    readers: int
    bytes_per_s: float
    """As measured earlier; what reads take while a run goes on soon counts more."""


class StepCounters(NamedTuple):
    """The few counters of `StoreStats` that every step reads: cheap to take and to subtract."""

    requests: int
    hits: int
    misses: int
    bytes_read: int
    prefetch_bytes: int
    stall_ns: int
    drive_busy_ns: int
    failed_copies: int = 0
    lookahead_named: int = 0
    lookahead_wanted: int = 0
    lookahead_right: int = 0
    lookahead_used: int = 0
    lookahead_unused: int = 0
    lookahead_saved_ns: int = 0
    drive_bytes: tuple[int, ...] = ()
    """Read from each drive, if there are several."""

    def since(self, earlier: "StepCounters") -> "StepCounters":
        """Return what was counted after `earlier`."""
        of_drives = tuple(map(operator.sub, self.drive_bytes, earlier.drive_bytes))
        counts = map(operator.sub, self[:-1], earlier[:-1])
        return StepCounters._make((*counts, of_drives))


_STEP_COUNTERS = operator.itemgetter(*StepCounters._fields[:-1])


def _encoding(table: RecordTable) -> Int32 | None:
    """How each layer's matrices stand in their files, [Lm, 3]; None if records are packed.

    None, too, if they are in codes, which `RecordTable.coded` describes.
    """
    if table.repack is None or table.coded:
        return None
    if table.encoding is None:
        return np.full((len(table.layers), 3), PLAIN_ROWS, np.int32)
    return np.ascontiguousarray(table.encoding, np.int32)


_MatrixTuple: TypeAlias = tuple[str, int, int, int, int]


def _layout(layout: RecordLayout) -> tuple[_MatrixTuple, _MatrixTuple, _MatrixTuple, int]:
    gate, up, down = ((m.format, m.rows, m.cols, m.group, m.offset) for m in layout.matrices)
    return gate, up, down, layout.record_bytes


def _open_recent(history: History | None, header: TraceHeader) -> RecentRouting | None:
    if history is None:
        return None
    return RecentRouting(history.routing_path, header, is_saved=history.mode == "write")


def _resolve_policy(
    readers: ExpertConfig, recent: RecentRouting | None, num_slots: int, num_records: int
) -> str:
    if readers.policy != "auto":
        return readers.policy
    if num_slots >= num_records:
        return RESIDENT_POLICY
    if recent is None:
        return DEFAULT_POLICY
    half_life = float(readers.half_life_tokens)
    return choose_policy(recent.trace(), num_slots=num_slots, half_life_tokens=half_life)


class ExpertStore:
    """The one owner of expert bytes: `num_slots` slots over all layers, filled on demand.

    Safe to use from several threads; each lease is used by one. A context manager: leaving it
    closes the store.
    """

    def __init__(
        self,
        table: RecordTable,
        *,
        num_slots: int,
        readers: ExpertConfig,
        history: History | None = None,
        lock: bool = False,
        fingerprint: str = "",
        other_bytes: int = 0,
        drives: tuple[DriveReading, ...] = (),
    ) -> None:
        """Open the files and reserve the slots; memory becomes resident only as slots are filled.

        Args:
            table: where every record is.
            num_slots: records held at once, 2 or more; more than there are records is cut to that.
            readers: how to read.
            history: routed counts of earlier runs: they order evictions and warm free slots at
                once, and this run's counts are added and saved on close, with its routing.
            fingerprint: identity of the checkpoint, for traces.
            other_bytes: memory that is given to anything but slots and margin, for traces.
            lock: keep the slots from being swapped out.
            drives: how each drive of the table is read. Empty takes all as equal.

        Raises:
            CheckpointError: a file is missing, or the table is inconsistent.
            ConfigError: an option is out of range.
            MemoryBudgetError: the system refused the slots, or to lock them.
        """
        num_records = len(table.layers) * table.num_experts
        num_slots = min(num_slots, max(num_records, FLOOR_SLOTS))
        self.table = table
        self._history = history
        header = TraceHeader(
            fingerprint=fingerprint,
            layers=table.layers,
            num_experts=table.num_experts,
            record_bytes=table.record_bytes,
            read_bytes=table.read_bytes,
            other_bytes=other_bytes,
            num_readers=readers.num_readers,
            read_ahead=readers.read_ahead,
        )
        recent = _open_recent(history, header)
        self.policy = _resolve_policy(readers, recent, num_slots, num_records)
        """The policy in force."""
        alike = DriveReading(readers.num_readers, UNKNOWN_BYTES_PER_S)
        drives = drives or (alike,) * max(1, len(table.drives))
        self._native = _core.ExpertStore(
            files=[str(path) for path in table.files],
            layers=list(table.layers),
            num_experts=table.num_experts,
            layouts=[_layout(layout) for layout in table.layouts],
            file=np.ascontiguousarray(table.file, np.int32),
            offset=np.ascontiguousarray(table.offset, np.int64),
            length=np.ascontiguousarray(table.length, np.int64),
            checksum=np.ascontiguousarray(table.checksum, np.uint64)
            if readers.verify and table.checksum is not None
            else None,
            encoding=_encoding(table),
            coded=[astuple(tensor) for tensor in table.coded],
            factors=table.factors,
            num_slots=num_slots,
            num_readers=sum(drive.readers for drive in drives),
            block_bytes=readers.largest_read_bytes,
            read_ahead=readers.read_ahead,
            direct=readers.is_direct,
            half_life_tokens=float(readers.half_life_tokens),
            lock=lock,
            policy=self.policy,
            lookahead=readers.lookahead == "auto",
            drive_of_file=list(table.drive_of_file),
            copies=np.ascontiguousarray(table.copies, np.int64),
            drives=[(drive.readers, drive.bytes_per_s) for drive in drives],
        )
        self._is_warned = False
        sinks = [] if recent is None else [recent]
        self._trace = None if readers.trace is None else TraceFile(readers.trace, header)
        file = [] if self._trace is None else [self._trace]
        self._recorder = Recorder(self._native, [*sinks, *file]) if sinks or file else None
        if history is not None and history.num_tokens > 0:
            self._native.set_frequencies(history.frequencies(float(readers.half_life_tokens)))
            self.warm(history.hottest(self.num_slots))

    @property
    def source(self) -> _core.RecordSource:
        """What `ops.routed_ffn` fetches records from."""
        return self._native

    @property
    def is_trace_cut(self) -> bool:
        """Whether some of the routing could not be written to the trace."""
        return self._trace is not None and self._trace.is_cut

    @property
    def num_slots(self) -> int:
        """Records held at once."""
        return self._native.num_slots

    @property
    def num_untouched_slots(self) -> int:
        """Slots that held no record since the system took, or never gave, their memory."""
        return self._native.num_untouched_slots

    @property
    def record_bytes(self) -> int:
        """Bytes of one slot."""
        return self.table.record_bytes

    def acquire(self, layer: int, ids: Int32) -> Lease:
        """Claim the experts of one layer for one step; queue what is missing, and return at once.

        Args:
            layer: the model's layer number.
            ids: [T, A] int32, the experts of each token.

        Returns:
            A lease, to be used in a `with` block and handed to `ops.moe_ffn`. Its records become
            ready one by one, those already held first.

        Raises:
            ShapeError: the layer has no experts, or an id is out of range.
            ExpertReadError: the store is closed. Failed reads raise it too, but from the lease.
        """
        return self._native.acquire(layer, ids)

    def note_step(self, parts: StepParts) -> None:
        """Note, for traces, that a step begins.

        Args:
            parts: (sequence, tokens, whether they are prefilled), in the order of the step's rows.
        """
        if self._recorder is not None:
            self._recorder.step(parts)

    def note_pace(self, tokens: int, seconds: float, used: StepCounters) -> None:
        """Note, for traces, how long a step took in which all rows decoded.

        Args:
            tokens: rows of the step.
            seconds: wall time.
            used: what the counters grew by.
        """
        if self._recorder is not None:
            step_ns = int(seconds * 1e9)
            # A replay knows no lookahead: what that read in time is a miss to it.
            misses = used.misses + used.lookahead_used
            pace = Pace(tokens, misses, step_ns, used.stall_ns, used.drive_busy_ns)
            self._recorder.pace(pace)

    def prefetch(self, layer: int, ids: Int32) -> None:
        """Advise that experts of a layer will be wanted soon.

        They are read at low priority, and never push out a record that was routed more often.
        Advice that has not begun when the layer is acquired is dropped.

        Args:
            layer: the model's layer number.
            ids: int32 of any shape.
        """
        self._native.prefetch(layer, ids)

    @property
    def wants_advice(self) -> bool:
        """Whether lookahead is on: asked for, some record has no slot, and it does not rest."""
        return self._native.wants_advice

    def look_ahead(self, layer: int, ids: Int32) -> None:
        """Advise what a layer will probably ask for next; `ops.routed_ffn` does so by itself.

        Missing records are read at low priority into a few slots set aside. What has not begun when
        the layer is acquired, and is not wanted, is withdrawn.

        Args:
            layer: the model's layer number.
            ids: [T, A] int32, the likeliest expert of each token first.
        """
        self._native.look_ahead(layer, ids)

    def warm(self, records: Iterable[tuple[int, int]]) -> None:
        """Fill free slots in the background, most wanted first; evicts nothing.

        Args:
            records: (layer, expert) pairs.
        """
        self._native.warm(list(records))

    def warm_all(self) -> None:
        """Fill free slots in the background with every record, in the order of the files."""
        first = self.table.file[..., 0], self.table.offset[..., 0]
        order = np.lexsort((first[1].ravel(), first[0].ravel()))
        num_experts = self.table.num_experts
        self.warm((self.table.layers[at // num_experts], at % num_experts) for at in order.tolist())

    def resize(self, num_slots: int) -> int:
        """Change the number of slots, up to the number opened with.

        Returns:
            The number reached: slots in use by a lease are not taken away.
        """
        return self._native.resize(num_slots)

    def held(self, layer: int) -> npt.NDArray[np.bool_]:
        """Return which experts of a layer are in a slot or on the way into one: [E]."""
        return self._native.held(layer).astype(bool)

    def frequencies(self) -> npt.NDArray[np.float64]:
        """Return the routed tokens per record, decayed to now: [Lm, E]."""
        return self._native.frequencies()

    def routed_counts(self) -> Int64:
        """Return the tokens routed to each record since opening: [Lm, E]."""
        return self._native.routed_counts()

    def stats(self) -> StoreStats:
        """Return a snapshot of the counters."""
        counters = self._native.stats()
        read_mode = "direct" if counters.pop("is_direct") else "buffered"
        return StoreStats(**counters, read_mode=read_mode)

    def counters(self) -> StepCounters:
        """Return a snapshot of the counters that a step needs."""
        counters = StepCounters(*_STEP_COUNTERS(self._native.stats()))
        if not self.table.drives:
            return counters
        if counters.failed_copies and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "a record could not be read at one of its places, another is read instead: %s",
                self._native.copy_error().partition("\nhint:")[0].replace("\n", "; "),
            )
        of_drives = tuple(row[0] for row in self._native.drive_stats())
        return counters._replace(drive_bytes=of_drives)

    def drives(self) -> list[DriveUse]:
        """Return what each drive gave, the model's own first; empty if there is one only."""
        rows = zip(self.table.drives, self._native.drive_stats(), strict=False)
        return [DriveUse(str(path), *row) for path, row in rows]

    def debug_check(self) -> None:
        """Check the store's books; for tests. Fails with AssertionError."""
        problem = self._native.debug_check()
        assert not problem, problem

    def close(self) -> None:
        """Save history and traces, withdraw what is queued, wait for reads in flight."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()
        history, self._history = self._history, None
        if history is not None:
            history.add(self._native.routed_counts(), self._native.num_routed_tokens)
            history.save()
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
