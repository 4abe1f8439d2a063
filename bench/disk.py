"""Measures what our readers get from the drive by direct reads of whole records.

Reads distinct, randomly chosen record-sized ranges of the given files once each, by the readers
that the expert store uses but without the store, so that no page cache and no repeated offset
flatters the figure. Shows what readers and block sizes are worth; `run.py` has a probe without
them. The command prints one line or one JSON object.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace import _core
from machine import Steal

ALIGNMENT = 4096
BATCH_BYTES = 256 << 20
"""Bytes asked for in one call: long against the start of its threads, small against memory."""


@dataclass(frozen=True)
class DiskResult:
    """One measurement. `steal` is the share of CPU time the host took; above 0.05 it is void."""

    bytes_read: int
    seconds: float
    bytes_per_s: float
    record_bytes: int
    num_records: int
    readers: int
    block_bytes: int
    direct: bool
    steal: float


def record_places(files: Sequence[Path], record_bytes: int, seed: int) -> list[tuple[Path, int]]:
    """Return every place that holds a whole record, shuffled."""
    places = [
        (path, offset)
        for path in files
        for offset in range(0, path.stat().st_size - record_bytes + 1, record_bytes)
    ]
    random.Random(seed).shuffle(places)
    return places


def _batches(places: list[tuple[Path, int]], size: int) -> Iterator[list[tuple[Path, int]]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def measure(
    files: Sequence[Path],
    record_bytes: int,
    *,
    readers: int = 4,
    block_bytes: int = 1 << 20,
    direct: bool = True,
    seconds: float = 3.0,
    seed: int = 0,
) -> DiskResult:
    """Read random records until `seconds` have passed or every record was read once.

    Args:
        files: what to read; together larger than what a short run reads.
        record_bytes: length of one read range; rounded up to whole pages of 4096 bytes.
        readers: threads that read.
        block_bytes: largest single read.
        direct: read past the page cache.
        seconds: least duration, unless the files end first.
        seed: of the order.

    Raises:
        SystemExit: no file holds a whole record.
    """
    record_bytes = -(-record_bytes // ALIGNMENT) * ALIGNMENT
    places = record_places(files, record_bytes, seed)
    if not places:
        sys.exit(f"no file holds a whole record of {record_bytes} bytes")
    batch = max(1, min(BATCH_BYTES // record_bytes, len(places)))
    slots = _core.aligned_empty(batch * record_bytes).reshape(batch, record_bytes)
    slots[:, ::ALIGNMENT] = 1  # touched, so that no page fault is measured
    num_records = 0
    with Steal() as steal:
        start = time.perf_counter()
        for group in _batches(places, batch):
            requests = [(str(path), offset, slots[i]) for i, (path, offset) in enumerate(group)]
            _core.read_many(requests, readers=readers, block_bytes=block_bytes, direct=direct)
            num_records += len(group)
            if time.perf_counter() - start >= seconds:
                break
        elapsed = time.perf_counter() - start
    return DiskResult(
        bytes_read=num_records * record_bytes,
        seconds=elapsed,
        bytes_per_s=num_records * record_bytes / elapsed,
        record_bytes=record_bytes,
        num_records=num_records,
        readers=readers,
        block_bytes=block_bytes,
        direct=direct,
        steal=steal.share,
    )


def main() -> None:
    """Measure the files of the command line."""
    parser = argparse.ArgumentParser(description="bandwidth of direct reads at record size")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--record-bytes", type=int, required=True)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--buffered", action="store_true", help="through the page cache")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(
        args.files,
        args.record_bytes,
        readers=args.readers,
        block_bytes=args.block_bytes,
        direct=not args.buffered,
        seconds=args.seconds,
        seed=args.seed,
    )
    if args.json:
        print(json.dumps(asdict(result)))
        return
    print(
        f"{result.bytes_per_s / 1e9:.2f} GB/s: {result.num_records} records of "
        f"{result.record_bytes} bytes in {result.seconds:.2f} s, {result.readers} readers, "
        f"{'direct' if result.direct else 'buffered'}, steal {result.steal:.1%}"
    )


if __name__ == "__main__":
    main()
