"""What each stored type costs: repacking it on a reader thread, memory, and a product with it.

    python bench/formats.py [--working-set 0.5] [--repeat 5] [--json formats.json]

The first table has a line per packed format: bytes of a weight in memory, and the speed of a
product of one row with a cold matrix on one thread beside a plain read of the same memory. The
second has a line per foreign type, GGUF's and those of Hugging Face checkpoints: bytes of a weight
in the file, what it becomes, bytes of that, the speed of repacking on one thread into memory that
is there already, as slots are, in bytes of the file read from memory and as a share of a plain
read, and the speed of a product with what it became. All are medians of several samples. Prints
machine, commit and the time the host stole: above 5 % a run is void.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
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
    share_of_read: float
    product_bytes_per_s: float


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


@dataclass(frozen=True)
class Repack:
    """A type of a foreign file, and how a matrix of it is packed."""

    name: str
    format: str
    group: int
    file_bytes: int
    pack: Callable[[np.ndarray, np.ndarray], None]
    """Of the bytes of the file and of the packed matrix."""


def repacks() -> Iterator[Repack]:
    """All types, at an expert's shape."""
    for format, size in (("bf16", 2), ("f16", 2), ("f32", 4)):
        yield Repack(
            format.upper(), format, 1, INNER * HIDDEN * size,
            lambda data, out, format=format: _core.repack_rows(data, format, INNER, HIDDEN, out),
        )  # fmt: skip
    for name, (number, values, nbytes, format, group) in GGUF_TYPES.items():

        def pack_gguf(
            data: np.ndarray, out: np.ndarray, number: int = number, format: str = format,
            group: int = group,
        ) -> None:  # fmt: skip
            _core.repack_gguf(data.reshape(INNER, -1), number, HIDDEN, format, group, out)

        yield Repack(name, format, group, INNER * HIDDEN // values * nbytes, pack_gguf)
    for name, (format, group, tensors) in CODED_TYPES.items():
        sizes = [round(INNER * HIDDEN * share) for *_, share in tensors]
        names = [(0, kind, scales, "none", shared, 1) for kind, scales, shared, _ in tensors]
        cuts = np.cumsum(sizes)[:-1]

        def pack_coded(
            data: np.ndarray, out: np.ndarray, cuts: np.ndarray = cuts, format: str = format,
            names: list[tuple[int, str, str, str, int, int]] = names, group: int = group,
        ) -> None:  # fmt: skip
            described = list(zip(names, np.split(data, cuts), strict=True))
            _core.repack_coded(described, format, INNER, HIDDEN, group, out)

        yield Repack(name, format, group, sum(sizes), pack_coded)


def foreign_rows(
    working_set: int, repeat: int, products: Mapping[str, float]
) -> Iterator[ForeignRow]:
    """Repack cold matrices of random bytes whose scales are finite, on one thread.

    Args:
        working_set: bytes of matrices to go through.
        repeat: samples.
        products: bytes per second of a product, by the name of a packed format.
    """
    ceilings = Ceilings(working_set)
    rng = np.random.default_rng(2)
    for one in repacks():
        # Below 0x70 no byte, nor a pair of them, is a scale or code of NaN or infinity.
        pattern = rng.integers(0, 0x70, one.file_bytes, np.uint8)
        memory = filled(working_set, pattern)
        step = -(-pattern.size // 64) * 64
        starts = cycle(range(0, memory.size - pattern.size + 1, step))
        packed = _core.aligned_empty(_core.packed_bytes(one.format, INNER, HIDDEN, one.group))

        def repack(
            one: Repack = one,
            starts: Iterator[int] = starts,
            memory: np.ndarray = memory,
            packed: np.ndarray = packed,
        ) -> None:
            start = next(starts)
            one.pack(memory[start : start + one.file_bytes], packed)

        repack()
        pairs = [(ceilings.read(), sample_seconds(repack)) for _ in range(repeat)]
        rate = one.file_bytes / median(seconds for _, seconds in pairs)
        becomes = name_of(one.format, one.group)
        yield ForeignRow(
            one.name,
            one.file_bytes / (INNER * HIDDEN),
            becomes,
            memory_bytes(one.format, one.group),
            rate,
            median(one.file_bytes / seconds / read for read, seconds in pairs),
            products[becomes],
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
              "| repacking, GB/s of the file | of read | product, GB/s |")  # fmt: skip
        print("|---|---|---|---|---|---|---|")
        products = {row.format: row.bytes_per_s for row in formats}
        for one in foreign_rows(num_bytes, args.repeat, products):
            foreign.append(one)
            print(
                f"| {one.name} | {one.file_bytes_per_weight:.2f} | {one.becomes} "
                f"| {one.bytes_per_weight:.2f} | {one.file_bytes_per_s / 1e9:.2f} "
                f"| {one.share_of_read:.0%} | {one.product_bytes_per_s / 1e9:.1f} |",
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
