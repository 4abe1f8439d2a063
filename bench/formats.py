"""What each stored type costs: repacking it on a reader thread, memory, and a product with it.

    python bench/formats.py [--working-set 0.5] [--repeat 5] [--json formats.json]

The first table has a line per packed format: bytes of a weight in memory, and the speed of a
product of one row with a cold matrix on one thread beside a plain read of the same memory. The
second has a line per foreign type, GGUF's and those of Hugging Face checkpoints: bytes of a weight
in the file, what it becomes, and the speed of repacking on one thread into memory that is there
already, as slots are, in bytes of the file read from memory. Both are medians of several samples.
Prints machine, commit and the time the host stole: above 5 % a run is void.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, cycle
from pathlib import Path
from statistics import median

import numpy as np

from headrace import _core, ops
from kernels import FORMATS, HIDDEN, INNER, Ceilings, filled, name_of, random_packed, sample_seconds
from machine import Steal, describe

GGUF_TYPES = {  # name: its number, values and bytes of a block, packed format and group
    "Q4_0": (2, 32, 18, "q4", 32),
    "Q4_1": (3, 32, 20, "q4a", 32),
    "Q5_0": (6, 32, 22, "q8f", 32),
    "Q5_1": (7, 32, 24, "q8a", 32),
    "Q8_0": (8, 32, 34, "q8", 32),
    "Q2_K": (10, 256, 84, "q2k", 16),
    "Q3_K": (11, 256, 110, "q3k", 16),
    "Q4_K": (12, 256, 144, "q4k", 32),
    "Q5_K": (13, 256, 176, "q5k", 32),
    "Q6_K": (14, 256, 210, "q6k", 16),
    "IQ4_NL": (20, 32, 18, "q8f", 32),
    "IQ4_XS": (23, 256, 136, "q8f", 32),
    "MXFP4": (39, 32, 17, "mxfp4", 32),
}

CODED_TYPES: dict[str, tuple[str, int, list[tuple[str, str, int, float]]]] = {
    # name: packed format and group, and of each tensor its kind, the type of scales, inputs that
    # share a scale, and bytes per weight
    "fp8 128 x 128": ("f8", 128, [("bytes", "f32", 128, 1),
                                  ("scales_by_tile", "bf16", 128, 2**-13)]),
    "nvfp4": ("q8f", 16, [("nibbles_by_output", "f32", 16, 0.5),
                          ("scales_by_output", "e4m3", 16, 1 / 16)]),
    "mxfp4": ("mxfp4", 32, [("nibbles_by_output", "f32", 32, 0.5),
                            ("scales_by_output", "e8m0", 32, 1 / 32)]),
    "pack-quantized 128": ("q4f", 64, [("nibbles_by_output", "f32", 128, 0.5),
                                       ("scales_by_output", "bf16", 128, 1 / 64)]),
    "awq 128": ("q4a", 64, [("nibbles_interleaved", "f32", 128, 0.5),
                            ("scales_by_group", "f16", 128, 1 / 64),
                            ("zeros_interleaved", "f32", 128, 1 / 256)]),
    "gptq 128": ("q4a", 64, [("nibbles_by_input", "f32", 128, 0.5),
                             ("scales_by_group", "f16", 128, 1 / 64),
                             ("zeros_by_group", "f32", 128, 1 / 256)]),
}  # fmt: skip


@dataclass(frozen=True)
class FormatRow:
    """A packed format."""

    format: str
    bytes_per_weight: float
    bytes_per_s: float
    share_of_read: float
    weights_per_s: float


@dataclass(frozen=True)
class ForeignRow:
    """A type of a foreign file."""

    name: str
    file_bytes_per_weight: float
    becomes: str
    bytes_per_weight: float
    file_bytes_per_s: float
    packed_bytes_per_s: float


def memory_bytes(format: str, group: int) -> float:
    """Bytes of a weight, scales included, without padding."""
    return _core.packed_bytes(format, INNER, HIDDEN, group) / (INNER * HIDDEN)


def format_rows(working_set: int, repeat: int) -> Iterator[FormatRow]:
    """One row times a cold matrix of an expert's shape, on one thread."""
    ceilings = Ceilings(working_set)
    x = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32)
    for format, group in FORMATS:
        pattern = random_packed((INNER, HIDDEN), format, group)
        memory = filled(working_set, pattern)
        step = -(-pattern.size // 64) * 64
        matrices = cycle(
            [
                _core.Matrix(memory[i : i + pattern.size], format, INNER, HIDDEN, group)
                for i in range(0, memory.size, step)
            ]
        )

        def multiply(source: Iterator[_core.Matrix] = matrices) -> None:
            ops.linears(x, [next(source) for _ in range(8)])

        multiply()
        pairs = [(ceilings.read(), sample_seconds(multiply) / 8) for _ in range(repeat)]
        seconds = median(s for _, s in pairs)
        yield FormatRow(
            name_of(format, group),
            memory_bytes(format, group),
            pattern.size / seconds,
            median(pattern.size / s / read for read, s in pairs),
            INNER * HIDDEN / seconds,
        )


def foreign_rows(working_set: int, repeat: int) -> Iterator[ForeignRow]:
    """Repack cold rows of blocks of random bytes whose scales are finite."""
    rng = np.random.default_rng(2)
    for name, (number, values, nbytes, format, group) in GGUF_TYPES.items():
        row_bytes = HIDDEN // values * nbytes
        # Below 0x78 no byte pair is a NaN or an infinity of float16.
        pattern = rng.integers(0, 0x78, INNER * row_bytes, np.uint8)
        memory = filled(working_set, pattern)
        step = -(-pattern.size // 64) * 64
        sources = cycle(
            [
                memory[i : i + pattern.size].reshape(INNER, row_bytes)
                for i in range(0, memory.size, step)
            ]
        )

        packed = _core.aligned_empty(_core.packed_bytes(format, INNER, HIDDEN, group))

        def repack(
            source: Iterator[np.ndarray] = sources,
            number: int = number,
            format: str = format,
            group: int = group,
            packed: np.ndarray = packed,
        ) -> None:
            _core.repack_gguf(next(source), number, HIDDEN, format, group, packed)

        repack()
        seconds = median(sample_seconds(repack) for _ in range(repeat))
        yield ForeignRow(
            name,
            nbytes / values,
            name_of(format, group),
            memory_bytes(format, group),
            pattern.size / seconds,
            packed.size / seconds,
        )


def coded_rows(working_set: int, repeat: int) -> Iterator[ForeignRow]:
    """Pack cold matrices from tensors of random bytes whose scales are finite."""
    rng = np.random.default_rng(3)
    for name, (format, group, tensors) in CODED_TYPES.items():
        sizes = [round(INNER * HIDDEN * share) for *_, share in tensors]
        # Below 0x70 no byte, nor a pair of them, is a scale or code of NaN or infinity.
        pattern = rng.integers(0, 0x70, sum(sizes), np.uint8)
        memory = filled(working_set, pattern)
        step = -(-pattern.size // 64) * 64
        starts = cycle(range(0, memory.size - pattern.size + 1, step))
        names = [(0, kind, scales, "none", shared, 1) for kind, scales, shared, _ in tensors]
        ends = np.cumsum(sizes)

        packed = _core.aligned_empty(_core.packed_bytes(format, INNER, HIDDEN, group))

        def repack(
            starts: Iterator[int] = starts,
            memory: np.ndarray = memory,
            format: str = format,
            group: int = group,
            names: list[tuple[int, str, str, str, int, int]] = names,
            ends: np.ndarray = ends,
            packed: np.ndarray = packed,
        ) -> None:
            start = next(starts)
            parts = np.split(memory[start : start + int(ends[-1])], ends[:-1])
            described = list(zip(names, parts, strict=True))
            _core.repack_coded(described, format, INNER, HIDDEN, group, packed)

        repack()
        seconds = median(sample_seconds(repack) for _ in range(repeat))
        yield ForeignRow(
            name,
            pattern.size / (INNER * HIDDEN),
            name_of(format, group),
            memory_bytes(format, group),
            pattern.size / seconds,
            packed.size / seconds,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--working-set", type=float, default=0.5, help="GiB of weights")
    parser.add_argument("--repeat", type=int, default=5, help="samples per line")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    args = parser.parse_args()
    _core.set_threads(1)
    num_bytes = int(args.working_set * 2**30)
    print(machine := describe())
    formats, foreign = [], []
    with Steal() as steal:
        print("\n| format | bytes per weight | one row, GB/s | of read | G weights/s |")
        print("|---|---|---|---|---|")
        for row in format_rows(num_bytes, args.repeat):
            formats.append(row)
            print(
                f"| {row.format} | {row.bytes_per_weight:.2f} | {row.bytes_per_s / 1e9:.1f} "
                f"| {row.share_of_read:.0%} | {row.weights_per_s / 1e9:.1f} |",
                flush=True,
            )
        print("\n| foreign type | bytes per weight | becomes | bytes per weight "
              "| file GB/s per core | packed GB/s per core |")  # fmt: skip
        print("|---|---|---|---|---|---|")
        rows = chain(foreign_rows(num_bytes, args.repeat), coded_rows(num_bytes, args.repeat))
        for one in rows:
            foreign.append(one)
            print(
                f"| {one.name} | {one.file_bytes_per_weight:.2f} | {one.becomes} "
                f"| {one.bytes_per_weight:.2f} | {one.file_bytes_per_s / 1e9:.2f} "
                f"| {one.packed_bytes_per_s / 1e9:.2f} |",
                flush=True,
            )
    print(f"\nsteal {steal.share:.1%}")
    if args.json:
        report = {
            "machine": machine,
            "steal": steal.share,
            "formats": [asdict(row) for row in formats],
            "foreign": [asdict(one) for one in foreign],
        }
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
