"""headrace beside llama.cpp on the same weights: decode after short and long contexts, and prefill.

    headrace synth qwen3-30b-a3b big-q4 --layers 12 --experts q4 --dense q4 --group 32
    headrace convert big-q4 big-q4.gguf
    python bench/compare.py big-q4 big-q4.gguf --llama-bench PATH/llama-bench
        [--pairs 5] [--deep 8000] [--deep-pairs 3] [--threads 2] [--memory 12GiB] [--json out.json]
        [--setting 1-on]

The GGUF file must be the one that `convert` made of the model without options: the same codes and
scales, so the same bits. llama.cpp is built for this processor (GGML_NATIVE=ON), with AVX-512 and
AMX. GCC 12 breaks its AMX path: it needs `asm volatile("" :: "m"(tc) : "memory");` before
`_tile_loadconfig` in ggml-cpu/amx/mmq.cpp, or another compiler.

First llama.cpp is tried with every combination of --repack 0|1 and -fa on|off, each in a process of
its own, and the fastest is kept for each measurement (after the long context, with the repacking
that decoded fastest); --setting leaves this search out. Then samples are taken in pairs, ours first
in one and theirs first in the next. A sample of theirs is a run of llama-bench on random tokens,
model loaded and warmed up; one of ours is an answer to random ids from a model that stays loaded
with all experts resident. Both keep keys and values as f16. Decode counts tokens after a context of
100 (or --deep), prefill a prompt of 512 with nothing cached. The long context is computed once by
us (its pages are found again) and once in each process by llama-bench, which is most of the time
that this takes: about twenty minutes in all, most of them for the long context; --deep 0 leaves it
out.

Prints every pair, medians and ratios, with machine, commit, the time that the host stole and what
other processes used: a pair with more than 5 % of either is void and stays out of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace import LLM, ExpertConfig, SamplingParams
from machine import VOID_SHARE, Steal, describe

SHALLOW_TOKENS = 100
PREFILL_TOKENS = 512
DECODE_TOKENS = 64
DEEP_DECODE_TOKENS = 32
SEARCH_REPETITIONS = 2
WARM_SECONDS = 300
DEEP_REPETITIONS = 3  # llama-bench computes the context once for all of them


@dataclass(frozen=True)
class Setting:
    """How llama-bench is called."""

    repack: int
    flash_attention: str

    def __str__(self) -> str:
        return f"repack {self.repack}, flash attention {self.flash_attention}"


@dataclass(frozen=True)
class Measurement:
    """What is measured on both sides, in tokens per second."""

    name: str
    prompt: int
    generate: int
    depth: int
    repetitions: int = 1


@dataclass(frozen=True)
class Pair:
    """One sample of each side, taken one after the other."""

    ours: float
    theirs: float
    steal: float
    others: float

    @property
    def ratio(self) -> float:
        """How many times as fast we were."""
        return self.ours / self.theirs

    @property
    def is_void(self) -> bool:
        """Whether somebody else had too much of the machine."""
        return max(self.steal, self.others) > VOID_SHARE


class Peer:
    """llama-bench on one model."""

    def __init__(self, program: Path, model: Path, threads: int) -> None:
        self.program, self.model, self.threads = program, model, threads
        self.build = ""

    def run(self, what: Measurement, setting: Setting) -> list[float]:
        """Tokens per second of each repetition; none if the program fails."""
        options = {
            "-m": self.model, "-t": self.threads, "-p": what.prompt, "-n": what.generate,
            "-d": what.depth, "-r": what.repetitions, "-fa": setting.flash_attention,
            "--repack": setting.repack, "-o": "json",
        }  # fmt: skip
        command = [str(self.program), *(str(x) for option in options.items() for x in option)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"  llama-bench fails with {setting}: status {done.returncode}, {error}")
            return []
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        self.build = f"{rows[0]['build_number']} {rows[0]['build_commit']}"
        return [float(speed) for speed in rows[0]["samples_ts"]]

    def fastest(self, what: Measurement, settings: list[Setting]) -> Setting:
        """Try settings, print each, return the one with the best sample; a single one untried."""
        if len(settings) == 1:
            return settings[0]
        best: dict[Setting, float] = {}
        for setting in settings:
            speeds = self.run(replace(what, repetitions=SEARCH_REPETITIONS), setting)
            if speeds:
                best[setting] = max(speeds)
                print(f"  {what.name}: {max(speeds):8.2f} tok/s with {setting}", flush=True)
        if not best:
            raise SystemExit(f"llama-bench ran with none of its settings: {self.model}")
        return max(best, key=lambda setting: best[setting])


class Ours:
    """A loaded model, all resident, answering random ids."""

    def __init__(self, llm: LLM, deep: int) -> None:
        self.llm = llm
        self.random = np.random.default_rng(0)
        self.deep_prompt = self.prompt(deep) if deep else []

    def prompt(self, num_tokens: int) -> list[int]:
        """Ids that no earlier prompt began with."""
        return self.random.integers(self.llm.spec.vocab_size - 1, size=num_tokens).tolist()

    def run(self, what: Measurement) -> float:
        """Tokens per second of one answer, from its receipt."""
        if what.prompt:
            receipt = self.answer(self.prompt(what.prompt), 1)
            assert receipt.cached_tokens == 0, "a fresh prompt was found in the cache"
            return receipt.prompt_tokens / receipt.prefill_s
        prompt = self.deep_prompt if what.depth > SHALLOW_TOKENS else self.prompt(what.depth)
        receipt = self.answer(prompt, 1 + what.generate)
        return float(receipt.decode_tokens_per_s)

    def answer(self, prompt: list[int], num_tokens: int) -> Any:
        """Generate exactly so many tokens; the receipt of an answer that read nothing."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        receipt = self.llm.generate(prompt, params).receipt
        assert receipt.completion_tokens == num_tokens
        assert receipt.expert_misses == 0, "a resident run read from the drive"
        return receipt

    def warm_up(self, measurements: list[Measurement]) -> None:
        """Read every record, routed or not, and touch every buffer."""
        store, records = self.llm.store, self.llm.checkpoint.records
        if store is None or records is None or not self.llm.plan.is_resident:
            raise SystemExit("not every record fits, or there are none: give more --memory")
        store.warm((layer, e) for layer in records.layers for e in range(records.num_experts))
        all_bytes = records.num_records * store.record_bytes
        end = time.perf_counter() + WARM_SECONDS
        while store.stats().prefetch_bytes + store.stats().bytes_read < all_bytes:
            if time.perf_counter() > end:
                raise SystemExit(f"the records were not read within {WARM_SECONDS} s")
            time.sleep(0.05)
        for what in measurements:
            self.run(what)


@contextmanager
def foreign_load() -> Iterator[Callable[[], float]]:
    """Gives the share of the machine's time that processes other than ours and theirs used."""

    def own() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    def busy() -> float:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        user, nice, system, _, _, irq, soft = fields[:7]
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")

    start, busy_before, own_before = time.perf_counter(), busy(), own()
    result = 0.0

    def share() -> float:
        return result

    yield share
    seconds = (time.perf_counter() - start) * (os.cpu_count() or 1)
    result = max(0.0, (busy() - busy_before) - (own() - own_before)) / seconds


def measure(
    ours: Ours, peer: Peer, what: Measurement, setting: Setting, num_pairs: int
) -> list[Pair]:
    """Take pairs, printing each."""
    print(f"\n{what.name}, llama.cpp with {setting}")
    pairs: list[Pair] = []
    for index in range(num_pairs):
        with Steal() as steal, foreign_load() as others:
            if index % 2:
                theirs = peer.run(what, setting)
                own = ours.run(what)
            else:
                own = ours.run(what)
                theirs = peer.run(what, setting)
        if not theirs:
            raise SystemExit("llama-bench failed with a setting that it ran with before")
        pair = Pair(own, median(theirs), steal.share, others())
        pairs.append(pair)
        print(
            f"  ours {pair.ours:8.2f} tok/s, llama.cpp {pair.theirs:8.2f} tok/s, "
            f"ratio {pair.ratio:5.2f}   steal {pair.steal:.1%}, others {pair.others:.1%}"
            f"{'   VOID' if pair.is_void else ''}",
            flush=True,
        )
    return pairs


def summary(name: str, pairs: list[Pair]) -> dict[str, Any]:
    """Print and return the medians of the pairs that are not void, or of all if all are."""
    good = [p for p in pairs if not p.is_void] or pairs
    ours, theirs = median(p.ours for p in good), median(p.theirs for p in good)
    ratio = median(p.ratio for p in good)
    count = f"{len(good)} of {len(pairs)} pairs"
    if all(p.is_void for p in pairs):
        count = f"ALL {len(pairs)} PAIRS VOID"
    print(f"  {name:22} {ours:8.2f} {theirs:10.2f} {ratio:7.2f}   {count}")
    return {"ours": ours, "theirs": theirs, "ratio": ratio, "pairs": [asdict(p) for p in pairs]}


def compare(args: argparse.Namespace, llm: LLM) -> None:
    """Search the peer's settings, measure, print the table."""
    decode = Measurement(f"decode after {SHALLOW_TOKENS}", 0, DECODE_TOKENS, SHALLOW_TOKENS)
    prefill = Measurement(f"prefill of {PREFILL_TOKENS}", PREFILL_TOKENS, 0, 0)
    deep = Measurement(
        f"decode after {args.deep}", 0, DEEP_DECODE_TOKENS, args.deep, DEEP_REPETITIONS
    )
    peer = Peer(args.llama_bench, args.gguf, args.threads)
    ours = Ours(llm, args.deep)
    all_settings = [Setting(r, f) for r in (1, 0) for f in ("on", "off")]
    if args.setting is not None:
        repack, flash_attention = args.setting.split("-")
        all_settings = [Setting(int(repack), flash_attention)]
    print("\nllama.cpp's settings")
    chosen = {what: peer.fastest(what, all_settings) for what in (decode, prefill)}
    planned = [(decode, args.pairs), (prefill, args.pairs)]
    if args.deep:
        kept = [s for s in all_settings if s.repack == chosen[decode].repack]
        chosen[deep] = peer.fastest(deep, kept)
        planned.append((deep, args.deep_pairs))
    ours.warm_up([what for what, _ in planned])
    taken = {what: measure(ours, peer, what, chosen[what], num) for what, num in planned}
    print(f"\nllama.cpp build {peer.build}")
    print(f"\n  medians, tok/s         headrace  llama.cpp   ratio\n  {'-' * 66}")
    rows = {what.name: summary(what.name, pairs) for what, pairs in taken.items()}
    if args.deep:
        kept_speed = rows[deep.name]["ours"] / rows[decode.name]["ours"]
        print(f"  after {args.deep} tokens we keep {kept_speed:.0%} of our speed after 100")
    if args.json is not None:
        settings = {what.name: asdict(setting) for what, setting in chosen.items()}
        report = {"machine": describe(), "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path, help="a container")
    parser.add_argument("gguf", type=Path, help="the file that `headrace convert` made of it")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--deep", type=int, default=8000, help="tokens of context; 0: leave out")
    parser.add_argument("--deep-pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--setting",
        choices=[f"{repack}-{fa}" for repack in (1, 0) for fa in ("on", "off")],
        help="llama.cpp's repacking and flash attention, instead of a search",
    )
    parser.add_argument("--memory", default="12GiB", help="our ceiling; all must be resident")
    parser.add_argument("--json", type=Path, help="write settings, pairs and medians there")
    args = parser.parse_args()
    for path in (args.model, args.gguf, args.llama_bench):
        if not path.exists():
            sys.exit(f"no such file or directory: {path}")
    context = max(args.deep, PREFILL_TOKENS) + 2 * DECODE_TOKENS
    with LLM(
        args.model,
        memory=args.memory,
        context=context,
        threads=args.threads,
        kv="f16",
        experts=ExpertConfig(history="off"),
    ) as llm:
        print(describe())
        print(
            f"model {args.model.name}, {args.gguf.name} {args.gguf.stat().st_size / 2**30:.2f} GiB"
        )
        compare(args, llm)


if __name__ == "__main__":
    main()
