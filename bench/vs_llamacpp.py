"""headrace beside llama.cpp when the model is larger than the memory that both are left.

    headrace synth qwen3-30b-a3b even --layers 12 --experts q4 --dense q4 --group 32 --skew 0
    headrace convert even even.gguf
    python bench/vs_llamacpp.py even even.gguf --llama-bench PATH/llama-bench
        [--times 1.5 3 6] [--read-ahead 8192 1024 128] [--prompt 512] [--tokens 24] [--repeat 1]

For each of --times, a balloon leaves the machine the model's size divided by it, page cache
included, and both sides run in that: llama.cpp maps the file and does not repack, as its users must
when a model is larger than memory; we get a ceiling of what is left less CACHE_LOSS_MIB, which is
what the system keeps from a program's page cache as well. How far the kernel reads ahead decides
llama.cpp's speed, so it is measured with every --read-ahead in KiB (needs leave to write it; put
back afterwards); our reads are direct and do not depend on it. The file's pages are dropped before
each sample. Both sides answer a random prompt and then decode random tokens.

Prints prefill and decode of both sides and the ratios to llama.cpp with the first of --read-ahead
and with the best. Run it alone: it squeezes the machine, some minutes for each of --times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from balloon import balloon
from machine import Steal, describe

CACHE_LOSS_MIB = 150
"""Of what is available under a balloon, this much never becomes a program's page cache."""
PEER_SECONDS = 420


@dataclass(frozen=True)
class Sample:
    """Tokens per second of one run."""

    prefill: float
    decode: float
    steal: float
    note: str = ""


def read_ahead_file(path: Path) -> Path:
    """Return the setting of the drive that holds a file."""
    device = path.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for folder in (entry, entry.parent):
        if (folder / "queue/read_ahead_kb").exists():
            return folder / "queue/read_ahead_kb"
    raise SystemExit(f"the drive of {path} has no read-ahead that could be set")


@contextmanager
def read_ahead(path: Path, kib: int) -> Iterator[None]:
    """Set how far the kernel reads ahead on the drive of a file, and put it back."""
    setting = read_ahead_file(path)
    before = setting.read_text()
    try:
        setting.write_text(str(kib))
    except OSError as error:
        raise SystemExit(f"cannot set {setting}: {error.strerror}") from None
    try:
        yield
    finally:
        setting.write_text(before)


def drop_pages(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def theirs(args: argparse.Namespace) -> Sample:
    """One run of llama-bench: a prompt, then tokens."""
    command: list[str] = [
        str(args.llama_bench), "-m", str(args.gguf), "-t", str(args.threads), "-r", "1",
        "-p", str(args.prompt), "-n", str(args.tokens), "--repack", "0", "-lm", "mmap",
        "-o", "json",
    ]  # fmt: skip
    drop_pages(args.gguf)
    with Steal() as steal:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PEER_SECONDS
            )
        except subprocess.TimeoutExpired:
            return Sample(0.0, 0.0, 0.0, f"not done after {PEER_SECONDS} s")
    if done.returncode > 0:
        raise SystemExit(done.stderr)
    if done.returncode:  # out of memory, most likely
        return Sample(0.0, 0.0, 0.0, f"killed by signal {-done.returncode}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    prefill, decode = (row["avg_ts"] for row in rows)
    return Sample(float(prefill), float(decode), steal.share)


def ours(args: argparse.Namespace, memory_mib: int) -> Sample:
    """The same by us, under a ceiling."""
    command = [
        sys.executable, str(Path(__file__).with_name("random_answer.py")), str(args.model),
        f"{memory_mib}MiB", str(args.prompt), str(args.tokens), str(args.threads),
    ]  # fmt: skip
    with Steal() as steal:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row = json.loads(done.stdout)
    if row["peak_memory_bytes"] > memory_mib << 20:
        raise SystemExit(f"we took {row['peak_memory_bytes']} bytes of {memory_mib} MiB")
    note = (
        f"{row['num_slots']} slots, {row['expert_hit_rate']:.0%} hit, "
        f"{row['decode_bytes_read'] / row['decode_s'] / 1e9:.2f} GB/s read in decode, "
        f"peak {row['peak_memory_bytes'] >> 20} MiB"
    )
    return Sample(row["prefill_tokens_per_s"], row["decode_tokens_per_s"], steal.share, note)


def show(name: str, samples: list[Sample]) -> Sample:
    """Print the samples; return their medians."""
    for one in samples:
        print(
            f"  {name:24} prefill {one.prefill:8.2f}  decode {one.decode:7.2f} tok/s   "
            f"steal {one.steal:.1%}  {one.note}",
            flush=True,
        )
    return Sample(median(s.prefill for s in samples), median(s.decode for s in samples), 0.0)


def compare(args: argparse.Namespace, times: float) -> dict[str, Any]:
    """Both sides with a model `times` as large as the memory."""
    left_mib = int(args.gguf.stat().st_size / times) >> 20
    peers: dict[int, Sample] = {}
    runs = args.repeat * (1 + len(args.read_ahead))
    with balloon(left_mib, runs * PEER_SECONDS) as available:
        print(f"\nmodel {times:g} times the memory: {available} MiB available")
        own = show("headrace", [ours(args, left_mib - CACHE_LOSS_MIB) for _ in range(args.repeat)])
        for kib in args.read_ahead:
            with read_ahead(args.gguf, kib):
                samples = [theirs(args) for _ in range(args.repeat)]
            peers[kib] = show(f"llama.cpp, ahead {kib}", samples)
    first = peers[args.read_ahead[0]]
    ratios = {}
    for part in ("decode", "prefill"):
        speed, default = getattr(own, part), getattr(first, part)
        best = max(getattr(peer, part) for peer in peers.values())
        ratios[part] = (speed / default if default else None, speed / best if best else None)
        text = [f"{ratio:.2f} times" if ratio else "more than" for ratio in ratios[part]]
        print(f"  {part}: {text[0]} its default, {text[1]} its best")
    return {
        "times": times,
        "available_mib": available,
        "ours": asdict(own),
        "theirs": {kib: asdict(peer) for kib, peer in peers.items()},
        "ratios": ratios,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path, help="a container")
    parser.add_argument("gguf", type=Path, help="the file that `headrace convert` made of it")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--times", type=float, nargs="+", default=[1.5, 3.0, 6.0])
    parser.add_argument("--read-ahead", type=int, nargs="+", default=[8192, 1024, 128])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for path in (args.model, args.gguf, args.llama_bench):
        if not path.exists():
            sys.exit(f"no such file or directory: {path}")
    print(describe())
    rows = [compare(args, times) for times in args.times]
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
