"""How busy the drive is: bytes read per second of an answer beside the best direct reads.

    headrace synth qwen3-30b-a3b big --layers 12
    python bench/busy.py big [--memory 1536MiB,2560MiB] [--tokens 48] [--prompt 512] [--repeat 5]

One process per ceiling. A round is a prompt of random tokens, then an answer to a short one, with a
sample of the drive directly before and after each: direct reads of records at random places, whole
and in the run's blocks, by as many plain threads as give the most. The share is bytes read, on
demand and ahead, over wall time, over the mean of the two samples. Beside it: the share of the time
that computing did not wait for reads, and that with a read in flight. The drive's share or that of
computing should be near one. Steal above 5 % voids a round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np

from headrace import LLM, EngineConfig, ExpertConfig, SamplingParams
from headrace.config import parse_bytes
from headrace.plan import MemoryPlan
from headrace.profile import PhaseProfile
from machine import Rounds, Steal, describe
from run import drive_bandwidth

READERS = (2, 4)
PROBE_SECONDS = 0.3
SHORT_PROMPT = 8


class Shares:
    """The shares of one phase over the rounds that count."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.drive: list[float] = []
        self.computing: list[float] = []

    def add(self, sums: PhaseProfile, before: float, after: float, steal: Steal) -> None:
        """Count a phase's sums, unless the host stole too much of it, and print them."""
        limit = (before + after) / 2
        drive = sums.bytes_read / sums.wall_s / limit
        computing = sums.compute_utilisation
        print(
            f"  {self.phase:<8}{1e3 * sums.wall_s / sums.num_steps:9.1f} ms per step, "
            f"{sums.hits / sums.requests:4.0%} hit, {sums.bytes_read / 1e6:6.0f} MB, "
            f"drive {drive:4.0%} of {before / 1e9:.2f} {after / 1e9:.2f} GB/s, computing "
            f"{computing:4.0%}, reads in flight {sums.drive_utilisation:4.0%}   "
            + Rounds.verdict(steal),
            flush=True,
        )
        if not steal.is_void:
            self.drive.append(drive)
            self.computing.append(computing)

    def line(self) -> str:
        """The medians."""
        if not self.drive:
            return f"  {self.phase}: no round counts"
        return (
            f"  median {self.phase}: drive {median(self.drive):.0%}, "
            f"computing {median(self.computing):.0%} ({len(self.drive)} rounds)"
        )


def best_bandwidth(model: Path, plan: MemoryPlan) -> float:
    """Bytes per second of direct reads of records, whole or in the run's blocks: the best."""
    blocks = -(-plan.record_bytes // plan.block_bytes)
    return max(
        drive_bandwidth(model, readers, PROBE_SECONDS, parts)
        for readers in READERS
        for parts in {1, blocks}
    )


def measured(llm: LLM, prompt: list[int], tokens: int) -> PhaseProfile:
    """Answer once; the sums of the phase asked about: prefill where only one token is wanted."""
    assert llm.profile is not None, "opened without a profile"
    llm.profile.phases.clear()
    llm.generate(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return llm.profile.phases["prefill" if tokens == 1 else "decode"]


def measure(args: argparse.Namespace, memory: str) -> None:
    """All rounds of one ceiling, printed."""
    experts = ExpertConfig(readers=args.readers, lookahead=args.lookahead, history="off")
    context = max(args.prompt, SHORT_PROMPT + max(args.tokens, args.warm)) + 16
    config = EngineConfig(
        memory=parse_bytes(memory), context=context, experts=experts, profile=True
    )
    rng = np.random.default_rng(args.seed)
    phases = [(Shares("prefill"), args.prompt, 1), (Shares("decode"), SHORT_PROMPT, args.tokens)]
    with LLM(args.model, config) as llm:
        plan = llm.plan
        print(
            f"\n{memory}: {plan.num_slots} slots of {plan.num_records} records of "
            f"{plan.record_bytes / 1e6:.2f} MB, chunk {plan.chunk}, {plan.readers} readers "
            f"of {plan.block_bytes >> 10} KiB ({plan.readers_from})"
        )
        measured(llm, rng.integers(0, llm.spec.vocab_size, SHORT_PROMPT).tolist(), args.warm)
        for _ in range(args.repeat):
            for shares, length, tokens in phases:
                prompt = rng.integers(0, llm.spec.vocab_size, length).tolist()
                before = best_bandwidth(args.model, plan)
                with Steal() as steal:
                    sums = measured(llm, prompt, tokens)
                after = best_bandwidth(args.model, plan)
                shares.add(sums, before, after, steal)
    for shares, _, _ in phases:
        print(shares.line())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="1536MiB,2560MiB", help="ceilings")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of the answer")
    parser.add_argument("--warm", type=int, default=48, help="tokens of an answer not counted")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--readers", type=lambda text: text if text == "auto" else int(text),
                        default="auto")  # fmt: skip
    parser.add_argument("--lookahead", choices=["auto", "off"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    memories = args.memory.split(",")
    if len(memories) == 1:
        measure(args, memories[0])
        return
    print(describe(), flush=True)
    for memory in memories:  # two models in one process would share one ceiling
        rest = [*sys.argv[1:], "--memory", memory]
        subprocess.run([sys.executable, __file__, *rest], check=True)


if __name__ == "__main__":
    main()
