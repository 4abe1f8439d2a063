"""Decode of a container beside the two limits of the machine: memory bandwidth and the drive.

    headrace synth qwen3-30b-a3b big --layers 12
    python bench/run.py big [--streamed 1536MiB] [--resident 8GiB] [--tokens 64] [--repeat 3]

Beside each run, in the same minute, the limit it meets is measured. For the resident run that is
the pool's threads reading the same records in memory and doing nothing else; for the streamed run,
direct reads of records at random places by as many plain threads as the engine has readers. Prints
a row per run and the medians, with the machine, the commit and the share of time that the host
stole: above 5 % a run is void. A third part shows what is left of the speed when another process
takes one processor. Weights read per token are the dense weights and one token's records. The
resident model is filled by a first answer, which is not counted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace import LLM, ExpertConfig, SamplingParams, _core
from headrace.inspect import open_model
from machine import Steal, describe

READERS = 4
PROBE_SECONDS = 2.0
PROMPT = "The quick brown fox jumps over the lazy dog."


def headrace(*arguments: str) -> dict[str, Any]:
    """Run a command of headrace and take the JSON object it prints."""
    code = "import sys; from headrace.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def memory_bandwidth(llm: LLM) -> float:
    """Bytes per second that the pool's threads read from the store's own pages, doing no more.

    A token's worth of random records after another, each in one call.
    """
    assert llm.store is not None, "a model without experts"
    chosen = llm.spec.num_experts_per_tok
    rng = np.random.default_rng(time.time_ns())
    speeds = []
    for _ in range(7):
        ids = [rng.permutation(llm.spec.num_experts)[None, :chosen] for _ in llm.spec.moe_layers]
        with ExitStack() as stack:
            records = []
            for layer, layer_ids in zip(llm.spec.moe_layers, ids, strict=True):
                lease = stack.enter_context(llm.store.acquire(layer, layer_ids.astype(np.int32)))
                while ready := lease.next_ready():
                    records += [lease.data(index) for index in ready]
            start = time.perf_counter()
            _core.read_bytes(records)
            seconds = time.perf_counter() - start
            speeds.append(sum(record.size for record in records) / seconds)
    return float(median(speeds))


def drive_bandwidth(
    model: Path,
    readers: int = READERS,
    probe_seconds: float = PROBE_SECONDS,
    blocks: int = 1,
) -> float:
    """Bytes per second of direct reads of records, at random places, by plain threads.

    Not by the engine's readers, as `headrace bench disk` does it: a slow reader must not lower the
    limit that its own runs are compared with. A record is read whole, or in `blocks` equal parts by
    several threads.
    """
    records = open_model(model)[1].records
    if records is None or records.repack is not None:
        raise SystemExit("the drive is measured on a container with experts")
    length = int(records.length.min())
    places = [(int(f), int(o)) for f, o in zip(records.file.flat, records.offset.flat, strict=True)]
    step = -(-length // blocks // mmap.PAGESIZE) * mmap.PAGESIZE
    order = np.random.default_rng(time.time_ns()).permutation(len(places))
    parts = [(index, start) for index in order for start in range(0, length, step)]
    handles = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in records.files]
    counts = [0] * readers
    end = time.perf_counter() + probe_seconds

    def read(thread: int) -> None:
        buffer = mmap.mmap(-1, length)
        for index, start in parts[thread::readers]:
            if time.perf_counter() > end:
                return
            file, offset = places[index]
            view = memoryview(buffer)[: min(step, length - start)]
            counts[thread] += os.preadv(handles[file], [view], offset + start)

    start = time.perf_counter()
    threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for handle in handles:
        os.close(handle)
    return sum(counts) / seconds


def resident(model: Path, memory: str, tokens: int, repeat: int) -> None:
    """Decode with every record in its slot: the first answer loads them, the next are measured."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    speeds, shares = [], []
    with LLM(model, memory=memory, experts=ExpertConfig(history="off")) as llm:
        if not llm.plan.is_resident:
            raise SystemExit(f"{memory} does not hold every record of {model}")
        weights = llm.plan.dense_bytes + llm.plan.cold_bytes_per_token
        print(f"weights read per token: {weights / 1e6:.1f} MB")
        llm.generate(PROMPT, params)
        for _ in range(repeat):
            with Steal() as steal:
                before = memory_bandwidth(llm)
                receipt = llm.generate(PROMPT, params).receipt
                limit = (before + memory_bandwidth(llm)) / 2
            assert receipt.expert_misses == 0, "a resident run read from the drive"
            speed = receipt.decode_tokens_per_s or 0.0
            speeds.append(speed)
            shares.append(speed * weights / limit)
            print(
                f"  {speed:6.2f} tok/s = {speed * weights / 1e9:5.2f} GB/s, "
                f"{shares[-1]:4.0%} of {limit / 1e9:.1f} GB/s read   steal {steal.share:.1%}"
            )
    print(f"  median {median(speeds):.2f} tok/s, {median(shares):.0%} of memory bandwidth")


def beside_a_neighbour(model: Path, memory: str, tokens: int, repeat: int) -> None:
    """Resident decode in pairs: alone, then while another process takes all of one processor."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    busy = [sys.executable, "-c", "while True: pass"]
    shares = []
    with LLM(model, memory=memory, experts=ExpertConfig(history="off")) as llm:
        memory_bandwidth(llm)  # fills the slots
        llm.generate(PROMPT, params)
        for _ in range(repeat):
            with Steal() as steal:
                alone = llm.generate(PROMPT, params).receipt.decode_tokens_per_s or 0.0
                with subprocess.Popen(busy) as neighbour:
                    beside = llm.generate(PROMPT, params).receipt.decode_tokens_per_s or 0.0
                    neighbour.kill()
            shares.append(beside / alone)
            print(
                f"  {alone:6.2f} tok/s alone, {beside:6.2f} beside a busy process, "
                f"{shares[-1]:4.0%}   steal {steal.share:.1%}"
            )
    print(f"  median {median(shares):.0%} of the quiet speed")


def streamed(model: Path, memory: str, tokens: int, repeat: int) -> None:
    """Decode with a ceiling below the model, each run from an empty store in its own process."""
    speeds, shares = [], []
    for _ in range(repeat):
        with Steal() as steal:
            before = drive_bandwidth(model)
            run = headrace(
                "run", str(model), PROMPT, "--memory", memory, "--max-tokens", str(tokens),
                "--temperature", "0", "--history", "off",
            )  # fmt: skip
            limit = (before + drive_bandwidth(model)) / 2
        row = run["receipt"]
        used = row["decode_bytes_read"] / row["decode_s"]
        speeds.append(row["decode_tokens_per_s"])
        shares.append(used / limit)
        print(
            f"  {speeds[-1]:6.2f} tok/s, {row['expert_hit_rate']:.0%} hit, "
            f"{used / 1e9:4.2f} GB/s used, {shares[-1]:4.0%} of {limit / 1e9:.2f} GB/s, "
            f"peak {row['peak_memory_bytes'] / 2**20:.0f} MiB   steal {steal.share:.1%}"
        )
    print(f"  median {median(speeds):.2f} tok/s, {median(shares):.0%} of the drive")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streamed", default="1536MiB", help="ceiling of the streamed runs")
    parser.add_argument("--resident", default="8GiB", help="ceiling of the resident run")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=["resident", "neighbour", "streamed"])
    args = parser.parse_args()
    print(describe())
    if args.only in (None, "resident"):
        print(f"\nresident ({args.resident}), {args.tokens} tokens")
        resident(args.model, args.resident, args.tokens, args.repeat)
    if args.only in (None, "neighbour"):
        print(f"\nresident ({args.resident}), one processor taken by another process")
        beside_a_neighbour(args.model, args.resident, args.tokens, args.repeat)
    if args.only in (None, "streamed"):
        print(f"\nstreamed ({args.streamed}), {args.tokens} tokens")
        streamed(args.model, args.streamed, args.tokens, args.repeat)


if __name__ == "__main__":
    main()
