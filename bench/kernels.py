"""Speed of the native kernels beside the read bandwidth that the same threads reach.

    python bench/kernels.py [--isa auto] [--threads N] [--working-set 1.5] [--rows 1 8 64]

Weights come from a working set meant to be larger than any cache, so that one row measures memory.
Prints the machine, the commit, a line per op, and the steal time: above 5 % the run is void.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from headrace import _core, ops
from machine import Steal, describe

FORMATS = [("q4", 64), ("q4", 32), ("mxfp4", 32), ("q8", 32), ("bf16", 1), ("f32", 1)]
HIDDEN, INNER = 2048, 768  # the experts of Qwen3-30B-A3B
CHOSEN = 8
READ_BYTES = 20 << 20  # what 8 such experts take in q4


@dataclass(frozen=True)
class Rows:
    """The rows of a step, as `headrace.state.StepRows` has them."""

    positions: np.ndarray
    sequences: np.ndarray
    page_table: np.ndarray


def median_seconds(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call, repeated for about `seconds`."""
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def filled(num_bytes: int, pattern: np.ndarray) -> np.ndarray:
    """Memory of at least num_bytes holding the pattern again and again, at multiples of 64."""
    step = -(-pattern.size // 64) * 64
    memory = _core.aligned_empty(max(1, num_bytes // step) * step)
    memory.reshape(-1, step)[:, : pattern.size] = pattern
    return memory


def matrices(
    format: str, group: int, shape: tuple[int, int], num_bytes: int
) -> Iterator[_core.Matrix]:
    """Packed matrices, each at its own place in a working set of num_bytes."""
    w = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    pattern = _core.pack(w, format, group)
    memory = filled(num_bytes, pattern)
    step = -(-pattern.size // 64) * 64
    views = [
        _core.Matrix(memory[i : i + pattern.size], format, *shape, group)
        for i in range(0, memory.size, step)
    ]
    return cycle(views)


def bench_linear(args: argparse.Namespace, bandwidth: float) -> None:
    """One packed matrix times some rows."""
    for format, group in FORMATS:
        source = matrices(format, group, (INNER, HIDDEN), args.bytes)
        nbytes = next(source).nbytes
        for rows in args.rows:
            x = np.random.default_rng(2).standard_normal((rows, HIDDEN)).astype(np.float32)
            calls = max(1, int(2000 / rows / 10)) if rows > 1 else 64

            def call(x: np.ndarray = x, calls: int = min(calls, 64)) -> None:
                for _ in range(calls):
                    ops.linear(x, next(source))  # noqa: B023

            seconds = median_seconds(call, args.seconds) / min(calls, 64)
            report(f"linear {format} g{group} {INNER}x{HIDDEN}", rows, seconds, nbytes, bandwidth,
                   2 * INNER * HIDDEN * rows)  # fmt: skip


def bench_moe(args: argparse.Namespace, bandwidth: float) -> None:
    """A layer of experts: every token to its own 8 of them, records from the whole working set."""
    for format, group in FORMATS[:4]:
        shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
        rng = np.random.default_rng(3)
        parts = [
            _core.pack(rng.standard_normal(s).astype(np.float32) / 32, format, group)
            for s in shapes
        ]
        sizes = [-(-p.size // 64) * 64 for p in parts]
        record = np.concatenate(
            [np.pad(p, (0, n - p.size)) for p, n in zip(parts, sizes, strict=True)]
        )
        memory = filled(args.bytes, record)
        places = rng.permutation(memory.size // record.size)
        offsets = [0, sizes[0], sizes[0] + sizes[1]]
        layout = [(format, *s, group, o) for s, o in zip(shapes, offsets, strict=True)]
        for rows in args.rows:
            num_experts = min(CHOSEN if rows == 1 else 128, len(places))
            ids = np.stack([rng.permutation(num_experts)[:CHOSEN] for _ in range(rows)]).astype(
                np.int32
            )
            used = np.unique(ids)
            x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
            weights = np.full((rows, CHOSEN), 1 / CHOSEN, np.float32)
            feeds = []
            for start in range(0, len(places) - num_experts + 1, num_experts):
                records = {
                    int(e): memory[p * record.size : (p + 1) * record.size]
                    for e, p in zip(used, places[start:], strict=False)
                }
                feeds.append(_core.ResidentFeed(*layout, records, step=len(used)))
            source = cycle(feeds)

            def call(
                x: np.ndarray = x, ids: np.ndarray = ids, weights: np.ndarray = weights
            ) -> None:
                feed = next(source)  # noqa: B023
                ops.moe_ffn(x, ids, weights, feed)
                feed.rewind()

            seconds = median_seconds(call, args.seconds)
            flops = 2 * 3 * INNER * HIDDEN * rows * CHOSEN
            report(f"moe_ffn {format} g{group} {len(used)} experts", rows, seconds,
                   len(used) * record.size, bandwidth, flops)  # fmt: skip


def bench_attention(args: argparse.Namespace, bandwidth: float) -> None:
    """One step of Qwen3-30B-A3B's attention over 4096 tokens."""
    heads, kv_heads, head_dim, length = 32, 4, 128, 4096
    pool = ops.KVPool(16, length // 64, kv_heads, head_dim)
    table = np.arange(length // 64, dtype=np.int32)[None]
    rng = np.random.default_rng(4)
    all_rows = Rows(np.arange(length, dtype=np.int32), np.zeros(length, np.int32), table)
    k = rng.standard_normal((length, kv_heads, head_dim)).astype(np.float32)
    for layer in range(16):
        ops.kv_write(pool, layer, k, k, all_rows)
    layers = cycle(range(16))
    for count in args.rows:
        rows = Rows(all_rows.positions[-count:], all_rows.sequences[:count], table)
        q = rng.standard_normal((count, heads, head_dim)).astype(np.float32)

        def call(q: np.ndarray = q, rows: Rows = rows) -> None:
            ops.paged_attention(q, pool, next(layers), rows, head_dim**-0.5)

        report(f"attention f16 {heads}/{kv_heads} heads, {length} tokens", count,
               median_seconds(call, args.seconds), pool.nbytes // 16, bandwidth,
               4 * heads * head_dim * length * count)  # fmt: skip


def report(name: str, rows: int, seconds: float, nbytes: int, bandwidth: float, flops: int) -> None:
    """Print one line."""
    speed = nbytes / seconds / 1e9
    print(f"{name:42} rows {rows:4}  {seconds * 1e6:10.1f} us  {speed:6.2f} GB/s "
          f"({speed / bandwidth:4.0%} of read)  {flops / seconds / 1e9:8.1f} GFLOP/s")  # fmt: skip


def read_bandwidth(args: argparse.Namespace) -> float:
    """GB/s of reading the working set with the pool's threads, in calls as large as a layer's."""
    memory = filled(args.bytes, np.arange(4096, dtype=np.uint32).view(np.uint8))
    size = min(READ_BYTES, memory.size)
    parts = cycle([memory[i : i + size] for i in range(0, memory.size - size + 1, size)])
    return size / median_seconds(lambda: _core.read_bytes(next(parts)), args.seconds) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="auto", choices=["auto", *_core.available_isas()])
    parser.add_argument("--threads", type=int, default=0, help="0: every processor")
    parser.add_argument("--working-set", type=float, default=1.5, help="GiB of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    parser.add_argument("--only", choices=["linear", "moe", "attention"])
    args = parser.parse_args()
    _core.set_isa(args.isa)
    _core.set_threads(args.threads)
    args.bytes = int(args.working_set * 2**30)
    print(describe())
    with Steal() as steal:
        bandwidth = read_bandwidth(args)
        print(f"reading {args.working_set} GiB: {bandwidth:.2f} GB/s")
        benches = {"linear": bench_linear, "moe": bench_moe, "attention": bench_attention}
        for name, bench in benches.items():
            if args.only in (None, name):
                bench(args, bandwidth)
    print(f"steal {steal.share:.1%}")


if __name__ == "__main__":
    main()
