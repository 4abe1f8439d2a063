"""Speed of the native kernels beside what the machine can do: reading memory, and arithmetic.

    python bench/kernels.py [--isa amx avx512 avx2] [--threads N] [--rows 1 4 16 64 512]
        [--only linear moe attention latent] [--working-set 1.5] [--repeat 5] [--json kernels.json]

Weights come from a working set meant to be larger than any cache, so that few rows measure memory.
Every line is the median of paired samples: first the ceilings (a plain read of the same memory by
the same threads; operations on registers alone, of the unit that the op uses), then the op, so that
a noisy minute spoils both. GB/s counts bytes of weights (or of keys and values) once per call; a
multiply-add is two operations. Prints machine, commit and the time the host stole: above 5 % a run
is void. `bench/roofline.py` draws the JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np

from headrace import _core, ops, quant
from machine import Steal, describe

FORMATS = [
    ("q4", 64), ("q4", 32), ("mxfp4", 32), ("q8", 32), ("bf16", 1), ("f16", 1), ("f32", 1),
    ("q4f", 64), ("q4f", 32), ("q4a", 64), ("q4a", 32), ("q8f", 32), ("q8f", 16),
    ("q8a", 32), ("q8a", 16), ("f8", 128), ("f8", 32),
    *((name, kind.group) for name, kind in quant.MULTIPLES.items()),
]  # fmt: skip
KEPT = {"q4f": (-8, 8), "q4a": (0, 16), "q8f": (-128, 128), "q8a": (-128, 128), "f8": (-126, 126)}
"""Formats that hold codes of foreign checkpoints, and the codes to draw."""
INTEGER = ("q4", "mxfp4", "q8", "q4f", "q4a", "q8f", "q8a", *quant.MULTIPLES)
HIDDEN, INNER = 2048, 768  # the experts of Qwen3-30B-A3B
CHOSEN, NUM_EXPERTS = 8, 128
READ_BYTES = 20 << 20  # what 8 such experts take in q4
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 4, 128, 16  # its attention, and layers to walk through
LATENT_HEADS, LATENT_DIM, LATENT_ROPE_DIM = 16, 512, 64  # the attention of DeepSeek-V2-Lite
KEPT_TOKENS = [
    ("f16", 512), ("f16", 4096), ("f16", 8192), ("bf16", 4096), ("f32", 4096), ("q8", 4096),
]  # fmt: skip
"""Formats of keys, values and latents, and tokens of context."""
SAMPLE_SECONDS = 0.08


@dataclass(frozen=True)
class Row:
    """One line of the table: medians, and medians of the ratios to the ceilings beside them."""

    op: str
    format: str
    isa: str
    threads: int
    rows: int
    seconds: float
    bytes_per_s: float
    share_of_read: float
    operations_per_s: float
    share_of_peak: float
    intensity: float
    """Operations per byte."""


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, as `headrace.state.StepRows` has them."""

    positions: np.ndarray
    sequences: np.ndarray
    page_table: np.ndarray


@dataclass(frozen=True)
class Load:
    """What a call moves and computes."""

    op: str
    format: str
    rows: int
    nbytes: int
    operations: int
    call: Callable[[], object]

    @property
    def unit(self) -> str:
        """The arithmetic unit that bounds it."""
        is_product = self.op in ("linear", "moe_ffn")
        return "int8" if is_product and self.format.split()[0] in INTEGER else "float"


def sample_seconds(call: Callable[[], object]) -> float:
    """Mean seconds of a call over a short sample."""
    count, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < SAMPLE_SECONDS or count == 0:
        call()
        count += 1
    return (now - begin) / count


class Ceilings:
    """What the threads reach at reading memory, and at operations on registers."""

    def __init__(self, working_set_bytes: int) -> None:
        memory = filled(working_set_bytes, np.arange(4096, dtype=np.uint32).view(np.uint8))
        self._size = min(READ_BYTES, memory.size)
        starts = range(0, memory.size - self._size + 1, self._size)
        self._parts = cycle([memory[i : i + self._size] for i in starts])

    def read(self) -> float:
        """Bytes per second, in calls as large as a layer's experts."""
        return self._size / sample_seconds(lambda: _core.read_bytes([next(self._parts)]))

    def peak(self, unit: str) -> float:
        """Operations per second."""
        rounds, seconds = 1000, 0.0
        while seconds < SAMPLE_SECONDS / 4:
            rounds *= 4
            begin = time.perf_counter()
            operations = _core.peak_operations(unit, rounds)
            seconds = time.perf_counter() - begin
        return operations / seconds


def measure(load: Load, ceilings: Ceilings, repeat: int) -> Row:
    """Take paired samples and their medians."""
    load.call()
    reads, peaks, times = [], [], []
    for _ in range(repeat):
        reads.append(ceilings.read())
        peaks.append(ceilings.peak(load.unit))
        times.append(sample_seconds(load.call))
    pairs = list(zip(times, reads, peaks, strict=True))
    return Row(
        op=load.op,
        format=load.format,
        isa=_core.isa(),
        threads=_core.num_threads(),
        rows=load.rows,
        seconds=median(times),
        bytes_per_s=load.nbytes / median(times),
        share_of_read=median(load.nbytes / t / read for t, read, _ in pairs),
        operations_per_s=load.operations / median(times),
        share_of_peak=median(load.operations / t / peak for t, _, peak in pairs),
        intensity=load.operations / load.nbytes,
    )


def filled(num_bytes: int, pattern: np.ndarray) -> np.ndarray:
    """Memory of about num_bytes holding the pattern again and again, at multiples of 64."""
    step = -(-pattern.size // 64) * 64
    memory = _core.aligned_empty(max(1, num_bytes // step) * step)
    memory.reshape(-1, step)[:, : pattern.size] = pattern
    return memory


def random_packed(shape: tuple[int, int], format: str, group: int) -> np.ndarray:
    """Packed bytes of a matrix of random weights or codes."""
    rng = np.random.default_rng(3)
    if format in quant.MULTIPLES:
        packed = _core.aligned_empty(_core.packed_bytes(format, *shape, group))
        packed[:] = rng.integers(0, 64, packed.size, np.uint8)
        # Units, of scales and of minimums, come first in a super-group.
        supers = packed.reshape(-1, _core.packed_bytes(format, 16, quant.SUPER_INPUTS, group))
        supers[:, :64] = np.full(32, 1e-4, np.float16).view(np.uint8)
        return packed
    if format not in KEPT:
        w = rng.standard_normal(shape).astype(np.float32) / 32
        return _core.pack(w, format, group)
    codes = rng.integers(*KEPT[format], shape).astype(np.int8)
    if format == "f8":
        codes[codes == -1] = 0  # NaN
    numbers = rng.uniform(0.001, 0.002, (shape[0], -(-shape[1] // group))).astype(np.float32)
    minimums = -numbers if format in ("q4a", "q8a") else None
    return _core.pack_codes(codes, numbers, minimums, format, group)


def linear_loads(rows: list[int], working_set_bytes: int) -> Iterator[Load]:
    """One packed matrix of an expert's shape times some rows, a cold matrix every time."""
    rng = np.random.default_rng(1)
    for format, group in FORMATS:
        pattern = random_packed((INNER, HIDDEN), format, group)
        memory = filled(working_set_bytes, pattern)
        step = -(-pattern.size // 64) * 64
        views = [
            _core.Matrix(memory[i : i + pattern.size], format, INNER, HIDDEN, group)
            for i in range(0, memory.size, step)
        ]
        source = cycle(views)
        for count in rows:
            x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
            # Few rows: eight matrices in one call, as attention has its projections.
            many = 8 if count <= 4 else 1

            def call(
                x: np.ndarray = x, many: int = many, source: Iterator[_core.Matrix] = source
            ) -> None:
                ops.linears(x, [next(source) for _ in range(many)])

            yield Load("linear", name_of(format, group), count, many * pattern.size,
                       many * 2 * INNER * HIDDEN * count, call)  # fmt: skip


def name_of(format: str, group: int) -> str:
    """Format and group as one word."""
    return format if group == 1 else f"{format} g{group}"


class ExpertLayer:
    """Records of one format all over a working set, to make layers of experts from."""

    def __init__(self, format: str, group: int, working_set_bytes: int) -> None:
        shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
        rng = np.random.default_rng(3)
        parts = [random_packed(s, format, group) for s in shapes]
        sizes = [-(-p.size // 64) * 64 for p in parts]
        record = np.concatenate(
            [np.pad(p, (0, n - p.size)) for p, n in zip(parts, sizes, strict=True)]
        )
        self.record_bytes = record.size
        self._memory = filled(working_set_bytes, record)
        self._places = rng.permutation(self._memory.size // record.size)
        offsets = [0, sizes[0], sizes[0] + sizes[1]]
        self._layout = [(format, *s, group, o) for s, o in zip(shapes, offsets, strict=True)]

    def feeds(self, used: np.ndarray) -> Iterator[_core.ResidentFeed]:
        """Feeds of the experts named, endlessly, each time from other places."""
        size, layers = self.record_bytes, []
        if len(used) > len(self._places):
            needed = len(used) * size / 2**30
            raise SystemExit(f"a layer takes {needed:.2f} GiB: give `--working-set` more")
        for start in range(0, len(self._places) - len(used) + 1, len(used)):
            records = {
                int(e): self._memory[p * size : (p + 1) * size]
                for e, p in zip(used, self._places[start:], strict=False)
            }
            layers.append(_core.ResidentFeed(*self._layout, records, step=len(used)))
        return cycle(layers)


def moe_loads(rows: list[int], working_set_bytes: int) -> Iterator[Load]:
    """A layer of experts: every token to its own 8 of 128, records all over the working set."""
    for format, group in FORMATS[:4]:
        layer = ExpertLayer(format, group, working_set_bytes)
        for count in rows:
            rng = np.random.default_rng(count)
            chosen = [rng.permutation(NUM_EXPERTS)[:CHOSEN] for _ in range(count)]
            ids = np.stack(chosen).astype(np.int32)
            used = np.unique(ids)
            x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
            weights = np.full((count, CHOSEN), 1 / CHOSEN, np.float32)
            feeds = layer.feeds(used)

            def call(
                x: np.ndarray = x,
                ids: np.ndarray = ids,
                weights: np.ndarray = weights,
                source: Iterator[_core.ResidentFeed] = feeds,
            ) -> None:
                feed = next(source)
                ops.moe_ffn(x, ids, weights, feed)
                feed.rewind()

            yield Load("moe_ffn", name_of(format, group), count, len(used) * layer.record_bytes,
                       2 * 3 * INNER * HIDDEN * count * CHOSEN, call)  # fmt: skip


def steps_at(length: int, rows: list[int]) -> Iterator[StepRows]:
    """All rows of a context, then the last of them in each number that it has."""
    table = np.arange(length // 64, dtype=np.int32)[None]
    positions, sequences = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
    for count in (length, *(n for n in rows if n <= length)):
        yield StepRows(positions[-count:], sequences[:count], table)


def attention_loads(rows: list[int]) -> Iterator[Load]:
    """One layer of Qwen3-30B-A3B's attention, layer after layer, at the end of some contexts."""
    rng = np.random.default_rng(4)
    for dtype, length in KEPT_TOKENS:
        pool = ops.KVPool(LAYERS, length // 64, KV_HEADS, HEAD_DIM, dtype=dtype)
        layers = cycle(range(LAYERS))
        whole, *steps = steps_at(length, rows)
        k = rng.standard_normal((length, KV_HEADS, HEAD_DIM)).astype(np.float32)
        for layer in range(LAYERS):
            ops.kv_write(pool, layer, k, k, whole)
        for step in steps:
            count = len(step.positions)
            q = rng.standard_normal((count, HEADS, HEAD_DIM)).astype(np.float32)

            def call(
                q: np.ndarray = q,
                step: StepRows = step,
                pool: ops.KVPool = pool,
                layers: Iterator[int] = layers,
            ) -> None:
                ops.paged_attention(q, pool, next(layers), step, HEAD_DIM**-0.5)

            seen = int(step.positions.sum()) + count
            yield Load("attention", f"{dtype}, {length} tokens", count, pool.nbytes // LAYERS,
                       4 * HEADS * HEAD_DIM * seen, call)  # fmt: skip


def latent_loads(rows: list[int]) -> Iterator[Load]:
    """The same for one layer of DeepSeek-V2-Lite's latent attention."""
    rng = np.random.default_rng(5)
    width = LATENT_DIM + LATENT_ROPE_DIM
    for dtype, length in KEPT_TOKENS:
        pool = ops.LatentPool(LAYERS, length // 64, LATENT_DIM, LATENT_ROPE_DIM, dtype=dtype)
        layers = cycle(range(LAYERS))
        whole, *steps = steps_at(length, rows)
        latents = rng.standard_normal((length, width)).astype(np.float32)
        for layer in range(LAYERS):
            ops.latent_write(pool, layer, latents, whole)
        for step in steps:
            count = len(step.positions)
            q = rng.standard_normal((count, LATENT_HEADS, width)).astype(np.float32)

            def call(
                q: np.ndarray = q,
                step: StepRows = step,
                pool: ops.LatentPool = pool,
                layers: Iterator[int] = layers,
            ) -> None:
                ops.latent_attention(q, pool, next(layers), step, width**-0.5)

            seen = int(step.positions.sum()) + count
            yield Load("latent", f"{dtype}, {length} tokens", count, pool.nbytes // LAYERS,
                       2 * LATENT_HEADS * (width + LATENT_DIM) * seen, call)  # fmt: skip


def show(row: Row) -> None:
    """Print a line of the table."""
    print(
        f"| {row.op} | {row.format} | {row.isa} | {row.rows} | {row.seconds * 1e6:.0f} "
        f"| {row.bytes_per_s / 1e9:.1f} | {row.share_of_read:.0%} "
        f"| {row.operations_per_s / 1e9:.0f} | {row.share_of_peak:.0%} |",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    isas = _core.available_isas()
    parser.add_argument("--isa", nargs="+", choices=isas, default=[_core.isa()])
    parser.add_argument("--threads", type=int, default=0, help="0: every processor")
    parser.add_argument("--working-set", type=float, default=1.5, help="GiB of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--repeat", type=int, default=5, help="paired samples per line")
    kinds = ["linear", "moe", "attention", "latent"]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--json", type=Path, help="write the rows and ceilings here as well")
    args = parser.parse_args()
    _core.set_threads(args.threads)
    num_bytes = int(args.working_set * 2**30)
    makers: dict[str, Callable[[], Iterator[Load]]] = {
        "linear": lambda: linear_loads(args.rows, num_bytes),
        "moe": lambda: moe_loads(args.rows, num_bytes),
        "attention": lambda: attention_loads(args.rows),
        "latent": lambda: latent_loads(args.rows),
    }
    machine = describe()
    print(machine)
    ceilings, table, peaks = Ceilings(num_bytes), [], {}
    with Steal() as steal:
        read = median(ceilings.read() for _ in range(args.repeat))
        for isa in args.isa:
            _core.set_isa(isa)
            peaks[isa] = {unit: ceilings.peak(unit) for unit in ("float", "int8")}
        print(f"reading: {read / 1e9:.1f} GB/s")
        for isa, units in peaks.items():
            print(f"{isa}, registers:", {u: f"{p / 1e9:.0f} GOP/s" for u, p in units.items()})
        print("\n| op | format | isa | rows | us | GB/s | of read | GOP/s | of peak |")
        print("|---|---|---|---|---|---|---|---|---|")
        for kind in args.only:
            for load in makers[kind]():
                for isa in args.isa:
                    _core.set_isa(isa)
                    table.append(measure(load, ceilings, args.repeat))
                    show(table[-1])
    print(f"\nsteal {steal.share:.1%}")
    if args.json:
        report = {
            "machine": machine,
            "steal": steal.share,
            "read_bytes_per_s": read,
            "peak_operations_per_s": peaks,
            "rows": [asdict(row) for row in table],
        }
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
