"""What each part of a model gets of the memory granted: arithmetic over headers, nothing is loaded.

Owns the rule that the ceiling covers the whole process as the system measures it from outside: the
interpreter and its libraries, weights, keys and values, work buffers, readers, a margin for what
cannot be counted, and slots for experts with the rest. What cannot fit is refused with the sum
written out.
"""

import math
import mmap
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint import Checkpoint, GgufCheckpoint
from headrace.config import EngineConfig
from headrace.errors import ConfigError, MemoryBudgetError
from headrace.experts.forecast import Forecast
from headrace.experts.policy import policy_bytes
from headrace.experts.reading import Reading
from headrace.metrics import available_memory_bytes
from headrace.models.registry import dense_names, embedding_name
from headrace.models.spec import ModelSpec
from headrace.state import PAGE_TOKENS

# Resident before any weight and without the tokenizer's tables, in the command line at work: 61 MiB
# with CPython 3.11, NumPy 2.4, tokenizers 0.23 on x86-64 Linux. A running process replaces it by
# what it measures, which must not be more, or `plan` names a floor at which `run` refuses.
INTERPRETER_BYTES = 62 << 20
# What a loaded tokenizer takes: 46 MiB for 152k tokens without merges, 127 MiB with as many merges,
# 41 MiB for 49k of each rebuilt from a GGUF file. The size of its file says less: 3, 13 and 2 MiB.
TOKEN_BYTES, MERGE_BYTES = 320, 560
_MERGES = re.compile(rb'"merges"\s*:\s*\[\s*["\[]')
METADATA_ITEM_BYTES = 70  # of an array in a GGUF header: 147k items took 9.5 MiB
# What nobody counts: allocator slack, page tables of libraries, Python objects of a long answer.
MARGIN_SHARE, MARGIN_BYTES = 0.02, 16 << 20
THREAD_BYTES = 1 << 20  # touched stack, allocator arena
# Scratch that a computing thread keeps for tiles: 384 KiB of packed rows, their scales and results.
TILE_BYTES = 640 << 10
PARTS_BYTES = 4 << 20  # most states of attention that pages hold before they are joined
# `auto` leaves this much of what is available to everybody else.
HEADROOM_SHARE, HEADROOM_BYTES = 0.1, 256 << 20
DEFAULT_CONTEXT = 4096
_NOTHING_MISSED = 1e-9  # share of requests
LARGEST_CHUNK = 512  # a chunk of 512 tokens already touches nearly every expert of 128
SMALLEST_CHUNK = 16
# Work buffers of a chunk may take this share of what slots and work have together.
WORK_SHARE = 0.2
# Or half of it, as long as that is little beside all records: then slots hold next to nothing,
# and each halving of the chunk reads the model twice as often for a prompt.
LITTLE_SHARE = 0.03
LOGITS_BYTES = 16 << 20  # most scores of one step when a text is scored
READ_SLACK = 2  # slots beyond one token's experts, so that a read can overlap the product before it


@dataclass(frozen=True)
class ModelSizes:
    """What the plan needs to know of a checkpoint and its spec, in counts and bytes."""

    hidden_size: int
    q_size: int  # H * Dh
    kv_size: int  # K * Dh
    vocab_size: int
    intermediate_size: int  # of dense FFNs; 0 if there are none
    moe_intermediate_size: int
    num_experts_per_tok: int
    num_moe_layers: int
    max_context: int
    dense_bytes: int  # everything loaded but an embedding that may stay on the drive
    embedding_bytes: int  # 0 when the head is tied to it: then it is part of dense_bytes
    kv_bytes_per_token: int
    num_records: int
    record_bytes: int  # of a slot
    record_read_bytes: int  # read from the drive per record
    reader_bytes: int  # scratch of one reader thread
    tokenizer_bytes: int  # taken by loading it, estimated
    embedding_has_rows: bool = True  # else it is in codes and cannot stay on the drive
    metadata_bytes: int = 0  # of a parsed header, held since the checkpoint was opened

    @property
    def working_set_records(self) -> int:
        """Records that one token routes to over all layers."""
        return self.num_experts_per_tok * self.num_moe_layers

    @property
    def floor_slots(self) -> int:
        """Fewest slots that run: one layer's experts of a token, and reading slack."""
        if not self.num_records:
            return 0
        return min(self.num_records, self.num_experts_per_tok + READ_SLACK)


def measure_sizes(spec: ModelSpec, checkpoint: Checkpoint, kv: str) -> ModelSizes:
    """Take the sizes from headers; reads no weights."""
    names = set(dense_names(spec))
    embedding, has_rows = 0, True
    if not spec.tie_word_embeddings:
        name = embedding_name(spec)
        names.discard(name)
        embedding = checkpoint.info(name).nbytes
        has_rows = checkpoint.has_rows(name)
    records = checkpoint.records
    return ModelSizes(
        hidden_size=spec.hidden_size,
        q_size=spec.num_attention_heads * spec.head_dim,
        kv_size=spec.num_key_value_heads * spec.head_dim,
        vocab_size=spec.vocab_size,
        intermediate_size=spec.intermediate_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        num_experts_per_tok=spec.num_experts_per_tok,
        num_moe_layers=len(spec.moe_layers),
        max_context=spec.max_position_embeddings,
        dense_bytes=checkpoint.dense_nbytes(names) + _router_growth(spec, checkpoint, names),
        embedding_bytes=embedding,
        kv_bytes_per_token=spec.kv_bytes_per_token(kv),
        num_records=records.num_records if records else 0,
        record_bytes=records.record_bytes if records else 0,
        record_read_bytes=records.read_bytes if records else 0,
        reader_bytes=_reader_bytes(checkpoint),
        tokenizer_bytes=tokenizer_bytes(spec, checkpoint),
        embedding_has_rows=has_rows,
        metadata_bytes=METADATA_ITEM_BYTES * checkpoint.num_header_items,
    )


def tokenizer_bytes(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """Estimate what a tokenizer takes once it is loaded."""
    if isinstance(checkpoint, GgufCheckpoint):
        num_merges = checkpoint.num_merges
    else:
        has_merges = _has_merges(checkpoint.tokenizer_dir / "tokenizer.json")
        num_merges = spec.vocab_size if has_merges else 0
    return TOKEN_BYTES * spec.vocab_size + MERGE_BYTES * num_merges


def _has_merges(path: Path) -> bool:
    """Whether a tokenizer.json has merges, about as many as tokens then; it is not parsed."""
    try:
        if not path.stat().st_size:
            return False
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return _MERGES.search(text) is not None
    except OSError:  # who loads it will say what is wrong
        return False


def _router_growth(spec: ModelSpec, checkpoint: Checkpoint, names: set[str]) -> int:
    """Routers are held in float32 whatever the file holds."""
    shape = (spec.num_experts, spec.hidden_size)
    infos = [checkpoint.info(name) for name in names]
    return sum(max(0, 4 * shape[0] * shape[1] - i.nbytes) for i in infos if tuple(i.shape) == shape)


def _reader_bytes(checkpoint: Checkpoint) -> int:
    """A reader of records in place holds one matrix before it is interleaved."""
    records = checkpoint.records
    if records is None or records.repack is None:
        return 0
    return int(records.length.max()) + 2 * 4096


@dataclass(frozen=True)
class MemoryPlan:
    """The ceiling and its parts in bytes, and what follows from them."""

    ceiling_bytes: int
    ceiling_from: str  # option | available
    interpreter_bytes: int
    dense_bytes: int
    embedding_bytes: int
    kv_bytes: int
    work_bytes: int
    readers_bytes: int
    margin_bytes: int
    slots_bytes: int
    unused_bytes: int
    floor_bytes: int
    context: int
    sequences: int
    chunk: int
    max_logits_rows: int
    num_pages: int
    kv: str  # format of keys and values
    embedding: str  # resident | drive | tied
    num_slots: int
    num_records: int
    record_bytes: int
    working_set_records: int
    working_set_bytes: int
    cold_bytes_per_token: int
    expected_hit_rate: float | None  # of decoding, from the history; None without one
    readers: int
    block_bytes: int  # largest single read
    readers_from: str  # option | tuned | measured | remembered | default
    drive_bytes_per_s: float | None  # as measured with these readers; None if nobody has
    drive_rates: tuple[float, ...]  # of each drive if there are several; the line above is all's
    notes: tuple[str, ...]
    forecast: Forecast | None  # by the routing of the last tokens; None without them
    repack_bytes_per_s: float | None = None  # of the files, by one core; None if nothing is packed

    @property
    def is_resident(self) -> bool:
        """Whether every record has a slot."""
        return self.num_slots >= self.num_records

    @property
    def other_bytes(self) -> int:
        """What is given to anything but slots and margin."""
        return self.ceiling_bytes - self.slots_bytes - self.unused_bytes - self.margin_bytes

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part; their sum is the ceiling."""
        return [
            ("interpreter and libraries", self.interpreter_bytes),
            ("dense weights", self.dense_bytes),
            ("embedding", self.embedding_bytes),
            (f"keys and values, {self.num_pages * PAGE_TOKENS} tokens in {self.kv}", self.kv_bytes),
            (f"work buffers, chunk {self.chunk}", self.work_bytes),
            ("readers, policy, threads", self.readers_bytes),
            ("margin", self.margin_bytes),
            (f"expert slots, {self.num_slots} of {self.num_records} records", self.slots_bytes),
            ("unused", self.unused_bytes),
        ]

    def tokens_per_s(self, drive_bytes_per_s: float, hit_rate: float) -> float | None:
        """Predict decoding that waits for nothing but the drive: bandwidth / (misses * record).

        None if as good as nothing is missed: a rate of 1 comes out of sums that are rounded.
        """
        missed = 1 - hit_rate
        if missed < _NOTHING_MISSED:
            return None
        return drive_bytes_per_s / (missed * self.cold_bytes_per_token)

    def predicted_tokens_per_s(self, drive_bytes_per_s: float | None) -> float | None:
        """Predict decoding, as well as what is known allows.

        By the forecast, if there is one: a token takes the time it took without stalls, and what
        its misses will make it wait. Otherwise the bound that the drive alone sets.

        Args:
            drive_bytes_per_s: of all drives together; None takes them as measured.

        Returns:
            None if nothing is read, or nothing is known of the drive.
        """
        if self.is_resident:
            return None
        if drive_bytes_per_s is None and self.drive_rates:
            # The recorded run may have had other drives.
            drive_bytes_per_s = self.drive_bytes_per_s
        if self.forecast is not None:
            speed = self.forecast.tokens_per_s(drive_bytes_per_s)
            if speed is not None:
                return speed
        drive = drive_bytes_per_s or self.drive_bytes_per_s
        return None if drive is None else self.tokens_per_s(drive, self.expected_hit_rate or 0.0)

    @property
    def repack_seconds_per_token(self) -> float | None:
        """Seconds of one core that a token takes to pack all it reads, if no expert is held."""
        rate = self.repack_bytes_per_s
        return None if rate is None else self.cold_bytes_per_token / rate

    def with_drives(self, rates: tuple[float, ...], bytes_per_s: float) -> "MemoryPlan":
        """Return the plan with the bandwidth of each of several drives, and of all together."""
        return replace(self, drive_rates=rates, drive_bytes_per_s=bytes_per_s)

    def with_forecast(self, forecast: Forecast | None) -> "MemoryPlan":
        """Return the plan with what a replay of the last tokens says of its slots."""
        if forecast is None:
            return self
        return replace(self, forecast=forecast, expected_hit_rate=forecast.hit_rate)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        forecast = None if self.forecast is None else self.forecast.as_dict()
        return {**asdict(self), "forecast": forecast}


def plan_memory(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    num_threads: int,
    held_bytes: int | None = None,
    is_tokenizer_held: bool = True,
    counts: npt.NDArray[np.float64] | None = None,
    reading: Reading | None = None,
) -> MemoryPlan:
    """Measure a checkpoint's headers and divide the memory; see `make_plan`.

    Args:
        spec: of the model.
        checkpoint: opened, not loaded.
        config: what the caller asks for.
        num_threads: computing threads.
        held_bytes: what this process holds without weights; None estimates it.
        is_tokenizer_held: whether `held_bytes` has the tokenizer in it, or it is still to come.
        counts: of a history.
    """
    sizes = measure_sizes(spec, checkpoint, config.kv)
    ceiling = config.memory if config.memory != "auto" else auto_ceiling(held_bytes or 0)
    interpreter = held_bytes
    if held_bytes is not None and not is_tokenizer_held:
        interpreter = held_bytes + sizes.tokenizer_bytes
    return make_plan(
        sizes,
        config,
        ceiling,
        num_threads=num_threads,
        interpreter_bytes=interpreter,
        counts=counts,
        reading=reading,
    )


def auto_ceiling(held_bytes: int = 0, root: Path = Path("/")) -> int:
    """Choose a ceiling: what is available and what this process holds already, less the headroom.

    Raises:
        ConfigError: the system does not say what is available.
    """
    available = available_memory_bytes(root)
    if available is None:
        raise ConfigError("cannot tell how much memory is available\nhint: give `--memory`")
    return max(1, available + held_bytes - headroom_bytes(available))


def headroom_bytes(available: int) -> int:
    """What `auto` leaves to everybody else of what is available."""
    return max(HEADROOM_BYTES, int(HEADROOM_SHARE * available))


def make_plan(
    sizes: ModelSizes,
    config: EngineConfig,
    ceiling_bytes: int,
    *,
    num_threads: int,
    interpreter_bytes: int | None = None,
    counts: npt.NDArray[np.float64] | None = None,
    reading: Reading | None = None,
) -> MemoryPlan:
    """Divide `ceiling_bytes` among the parts of a model.

    Order of wishes: everything but slots is given first. The embedding stays on the drive as long
    as some record has no slot, because a token needs one row of it and many records. The chunk is
    the largest of 512, 256, ... whose work buffers take no more than a fifth of what work and slots
    have together, or half of it where that is little beside all records: smaller chunks read the
    experts more often, larger ones push them out.

    Args:
        sizes: of the model.
        config: what the caller asks for.
        ceiling_bytes: for the whole process.
        num_threads: computing threads.
        interpreter_bytes: what the process holds before any weight is loaded; None estimates it.
        counts: [Lm, E], how often a history says each record was wanted; None without one.
        reading: where the readers in `config` come from, and what the drive gave them.

    Raises:
        MemoryBudgetError: the parts that must be there do not fit; the message is the sum.
        ConfigError: the context asked for is longer than the model's.
    """
    context = _context(sizes, config)
    logits_rows = max(1, min(LARGEST_CHUNK, LOGITS_BYTES // (4 * sizes.vocab_size)))
    num_readers = config.experts.num_readers * (1 + len(config.experts.drive))
    num_readers = num_readers if reading is None else reading.num_readers
    fixed = _fixed_parts(sizes, config, context, num_threads, num_readers, interpreter_bytes)
    floor_slots = sizes.floor_slots * sizes.record_bytes
    least_chunk = min(SMALLEST_CHUNK if config.chunk == "auto" else config.chunk, context)

    def work(chunk: int) -> int:
        # A step either fills a chunk or scores a few rows of a text, never both (the scheduler).
        num = config.sequences
        scored = min(chunk, logits_rows)
        return max(
            work_bytes(sizes, num + chunk, num, context),
            work_bytes(sizes, num + scored, num + scored, context),
        )

    floor_bytes = _check_floor(sizes, config, ceiling_bytes, fixed, work(least_chunk), floor_slots)
    margin = margin_bytes(ceiling_bytes)
    rest = ceiling_bytes - sum(fixed.values()) - margin
    all_records = sizes.num_records * sizes.record_bytes
    fits_whole = rest >= sizes.embedding_bytes + all_records + work(least_chunk)
    is_resident = _must_be_resident(sizes, config) or (config.embedding == "auto" and fits_whole)
    embedding_bytes = sizes.embedding_bytes if is_resident else 0
    rest -= embedding_bytes
    chunk = min(context, LARGEST_CHUNK) if config.chunk == "auto" else least_chunk
    while chunk > least_chunk and not _is_chunk_right(rest, work(chunk), all_records, floor_slots):
        chunk = max(least_chunk, chunk // 2)
    rest -= work(chunk)
    num_slots = _num_slots(sizes, config, rest)
    return MemoryPlan(
        ceiling_bytes=ceiling_bytes,
        ceiling_from="available" if config.memory == "auto" else "option",
        **fixed,
        margin_bytes=margin,
        embedding_bytes=embedding_bytes,
        work_bytes=work(chunk),
        slots_bytes=num_slots * sizes.record_bytes,
        unused_bytes=rest - num_slots * sizes.record_bytes,
        floor_bytes=floor_bytes,
        context=context,
        sequences=config.sequences,
        chunk=chunk,
        max_logits_rows=logits_rows,
        num_pages=num_pages(config, context),
        kv=config.kv,
        embedding="resident" if is_resident else "drive" if sizes.embedding_bytes else "tied",
        num_slots=num_slots,
        num_records=sizes.num_records,
        record_bytes=sizes.record_bytes,
        working_set_records=sizes.working_set_records,
        working_set_bytes=sizes.working_set_records * sizes.record_bytes,
        cold_bytes_per_token=sizes.working_set_records * sizes.record_read_bytes,
        expected_hit_rate=_expected_hit_rate(sizes, num_slots, counts),
        readers=config.experts.num_readers,
        block_bytes=config.experts.largest_read_bytes,
        readers_from="default" if reading is None else reading.source,
        drive_bytes_per_s=None if reading is None else reading.drive_bytes_per_s,
        drive_rates=(),
        notes=_notes(sizes, num_slots),
        forecast=None,
    )


def _must_be_resident(sizes: ModelSizes, config: EngineConfig) -> bool:
    if not sizes.embedding_bytes and config.embedding == "drive":
        raise ConfigError(
            "option `embedding` cannot be `drive`: the model's table is its output head as well, "
            "and every token needs all of it\nexpected auto or resident"
        )
    if sizes.embedding_has_rows:
        return config.embedding == "resident"
    if config.embedding == "drive":
        raise ConfigError(
            "option `embedding` cannot be `drive`: the model's table is in codes, and single rows "
            "of it are not read\nexpected auto or resident"
        )
    return True


def _num_slots(sizes: ModelSizes, config: EngineConfig, rest: int) -> int:
    """Slots in the `rest` of the memory: all that are of use, or as many as were asked for."""
    if not sizes.num_records:
        return 0
    fitting = min(sizes.num_records, rest // sizes.record_bytes)
    if config.slots == "auto":
        return fitting
    if config.slots < sizes.floor_slots:
        raise ConfigError(
            f"option `slots` is below what one layer of a token needs\n"
            f"expected at least {sizes.floor_slots}, got {config.slots}"
        )
    return min(fitting, config.slots)


def _expected_hit_rate(
    sizes: ModelSizes, num_slots: int, counts: npt.NDArray[np.float64] | None
) -> float | None:
    """Share of past requests that went to the `num_slots` most wanted records."""
    if num_slots >= sizes.num_records:
        return 1.0
    if counts is None or not counts.sum() > 0:
        return None
    hottest = np.sort(counts, axis=None)[::-1]
    return float(hottest[:num_slots].sum() / counts.sum())


def num_pages(config: EngineConfig, context: int) -> int:
    """KV pages for every sequence at full context."""
    return config.sequences * -(-context // PAGE_TOKENS)


def margin_bytes(ceiling_bytes: int) -> int:
    """What is left alone below a ceiling."""
    return max(MARGIN_BYTES, int(MARGIN_SHARE * ceiling_bytes))


def _fixed_parts(
    sizes: ModelSizes,
    config: EngineConfig,
    context: int,
    num_threads: int,
    num_readers: int,
    interpreter_bytes: int | None,
) -> dict[str, int]:
    """The parts that do not depend on the ceiling."""
    if interpreter_bytes is None:
        interpreter_bytes = INTERPRETER_BYTES + sizes.tokenizer_bytes + sizes.metadata_bytes
    readers = num_readers if sizes.num_records else 0
    return {
        "interpreter_bytes": interpreter_bytes,
        "dense_bytes": sizes.dense_bytes,
        "kv_bytes": num_pages(config, context) * PAGE_TOKENS * sizes.kv_bytes_per_token,
        "readers_bytes": readers * (THREAD_BYTES + _scratch_bytes(sizes, config))
        + num_threads * (THREAD_BYTES + TILE_BYTES)
        + _policy_bytes(sizes),
    }


def _scratch_bytes(sizes: ModelSizes, config: EngineConfig) -> int:
    """What a reader holds at a time: in place a tensor, or small ones that are read together."""
    if not sizes.reader_bytes:
        return 0
    together = min(2 * sizes.record_read_bytes, config.experts.largest_read_bytes)
    return max(sizes.reader_bytes, together)


def _policy_bytes(sizes: ModelSizes) -> int:
    """What the policy knows of every record."""
    if not sizes.num_records:
        return 0
    return policy_bytes(sizes.num_moe_layers, sizes.num_records // sizes.num_moe_layers)


def _is_chunk_right(rest: int, work: int, all_records: int, floor_slots: int) -> bool:
    if rest - work >= all_records:
        return True
    share = 0.5 if work <= LITTLE_SHARE * all_records else WORK_SHARE
    return work <= share * rest and rest - work >= floor_slots


def _check_floor(
    sizes: ModelSizes,
    config: EngineConfig,
    ceiling: int,
    fixed: dict[str, int],
    work: int,
    floor_slots: int,
) -> int:
    """Return the least ceiling that runs, or refuse with the sum."""
    embedding = sizes.embedding_bytes if _must_be_resident(sizes, config) else 0
    parts = sum(fixed.values()) + embedding + work + floor_slots
    floor = max(parts + MARGIN_BYTES, math.ceil(parts / (1 - MARGIN_SHARE)))
    if ceiling >= floor:
        return floor
    lines = [
        ("interpreter and libraries", fixed["interpreter_bytes"]),
        ("dense weights", fixed["dense_bytes"]),
        ("embedding", embedding),
        ("keys and values", fixed["kv_bytes"]),
        ("work buffers", work),
        ("readers, policy, threads", fixed["readers_bytes"]),
        (f"{sizes.floor_slots} expert slots", floor_slots),
        ("margin", floor - parts),
    ]
    table = "\n".join(f"  {name:<26}{_mib(count):>14}" for name, count in lines if count)
    raise MemoryBudgetError(
        f"memory is below the floor: granted {_mib(ceiling)}, needed {mib_up(floor)}\n"
        f"{table}\n  {'sum':<26}{mib_up(floor):>14}\n"
        "hint: grant more `--memory`, or ask for a shorter `--context` or fewer sequences"
    )


def work_bytes(sizes: ModelSizes, num_rows: int, num_logits_rows: int, context: int) -> int:
    """Bytes of the buffers of one step, all layers using the same ones.

    The native pool keeps a buffer per size it was ever asked for at once and rounds sizes up by at
    most a quarter, hence the factor.

    Args:
        sizes: of the model.
        num_rows: T, rows of the step.
        num_logits_rows: R, rows whose scores are wanted.
        context: tokens that a row may see.
    """
    attention = 3 * sizes.q_size + 6 * sizes.kv_size
    active = sizes.num_experts_per_tok
    # Mixture: each token's A contributions [T*A, D]; gate, up and quantised input of its experts.
    mixture = active * (sizes.hidden_size + 3 * sizes.moe_intermediate_size)
    dense = 3 * sizes.intermediate_size
    per_row = 4 * (6 * sizes.hidden_size + max(attention, mixture, dense))
    scores = 3 * 4 * num_logits_rows * sizes.vocab_size  # logits, log-softmax, a copy
    # Pages of few rows are attended to one by one and joined: a state of each query for each page,
    # its maximum and sum in a vector beside it, which at most doubles one of 8 dims or more.
    states = 4 * 2 * num_rows * sizes.q_size * -(-context // PAGE_TOKENS)
    parts = min(PARTS_BYTES, states)
    return int(1.25 * (num_rows * per_row + parts)) + scores


def _context(sizes: ModelSizes, config: EngineConfig) -> int:
    if config.context == "auto":
        return min(DEFAULT_CONTEXT, sizes.max_context)
    if config.context > sizes.max_context:
        raise ConfigError(
            f"option `context` is longer than the model's\n"
            f"expected at most {sizes.max_context} tokens (max_position_embeddings), "
            f"got {config.context}"
        )
    return config.context


def _notes(sizes: ModelSizes, num_slots: int) -> tuple[str, ...]:
    if not sizes.num_records:
        return ("a dense model: everything is resident, nothing is read while it runs",)
    if num_slots >= sizes.num_records:
        return ("every expert has a slot: each is read once",)
    if num_slots < sizes.working_set_records:
        return (
            f"slots hold less than one token's working set ({num_slots} of "
            f"{sizes.working_set_records} records): nearly every expert is read for every token",
        )
    return ()


def mib_up(count: int) -> str:
    """Write what is needed at least: never less than it is."""
    return f"{math.ceil(10 * count / (1 << 20)) / 10:.1f} MiB"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
