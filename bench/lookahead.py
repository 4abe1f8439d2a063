"""Decoding with lookahead and without, at several bandwidths of the drive.

    headrace synth qwen3-30b-a3b big --layers 12
    python bench/lookahead.py big [--memory 1536MiB] [--rates 200MB/s,600MB/s,own] [--tokens 48]

Two models of one process take turns at the same prompt with the same seed, in pairs, the one first
and then the other; ids must be the same. Reads take as long as on a drive of the stated bandwidth;
`own` leaves the drive as it is. A first answer that is not counted warms the slots. Prints for
each pair recall and precision, waiting for reads that was saved, bytes read in vain, both per
token, and the ratio of speeds; then the medians. Steal above 5 % voids a pair, and another takes
its place, as long as no more are void than count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from headrace import LLM, EngineConfig, ExpertConfig, SamplingParams, _core
from headrace.config import parse_bytes
from headrace.metrics import Receipt
from machine import Rounds, describe, with_slots_of

PROMPT = "The quick brown fox jumps over the lazy dog."
MODES = "off", "auto"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("1536MiB"))
    parser.add_argument("--rates", default="200MB/s,600MB/s,own")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    model = args.model.resolve()
    print(describe())
    for rate in args.rates.split(","):
        if rate != "own":
            bytes_per_s = float(parse_bytes(rate.removesuffix("/s")))
            _core.slow_drive(f"{model}/experts-", bytes_per_s=bytes_per_s)
        try:
            measure(model, args.memory, args.tokens, args.pairs, rate)
        finally:
            _core.clear_slow_drives()


def measure(model: Path, memory: int, num_tokens: int, num_pairs: int, rate: str) -> None:
    """Take pairs at one bandwidth and print them."""
    ratios = []
    configs = {
        mode: with_slots_of(
            model,
            EngineConfig(memory=memory, experts=ExpertConfig(history="off", lookahead=mode)),
        )
        for mode in MODES
    }
    with LLM(model, configs["off"]) as off, LLM(model, configs["auto"]) as auto:
        llms = {"off": off, "auto": auto}
        for llm in llms.values():
            llm.generate(PROMPT, SamplingParams(max_tokens=num_tokens, seed=0))
        rounds = Rounds(num_pairs)
        for seed, steal in enumerate(rounds, start=1):
            params = SamplingParams(max_tokens=num_tokens, seed=seed)
            with steal:
                order = MODES if seed % 2 else MODES[::-1]
                answers = {mode: llms[mode].generate(PROMPT, params) for mode in order}
            assert answers["off"].ids == answers["auto"].ids, "lookahead changed a token"
            ratio = report(rate, answers["off"].receipt, answers["auto"].receipt)
            print(f"   {rounds.verdict(steal)}", flush=True)
            if not steal.is_void:
                ratios.append(ratio)
    print(
        f"{rate}: median ratio {median(ratios):.3f} of {len(ratios)} pairs"
        if ratios
        else f"{rate}: every pair is void",
        flush=True,
    )


def report(rate: str, off: Receipt, auto: Receipt) -> float:
    """Print a pair; how many times as fast lookahead decoded."""
    ratio = auto.decode_tokens_per_s / off.decode_tokens_per_s
    tokens = auto.completion_tokens
    print(
        f"{rate:>8}  recall {auto.lookahead_recall:.0%}, precision {auto.lookahead_precision:.0%}, "
        f"stall {1e3 * off.stall_s / tokens:.1f} -> {1e3 * auto.stall_s / tokens:.1f} ms, "
        f"in vain {auto.lookahead_wasted_bytes / tokens / 1e6:.1f} MB of "
        f"{(auto.prefetch_bytes + auto.decode_bytes_read) / tokens / 1e6:.1f} MB, "
        f"{off.decode_tokens_per_s:.2f} -> {auto.decode_tokens_per_s:.2f} tok/s, ratio {ratio:.3f}",
        end="",
    )
    return ratio


if __name__ == "__main__":
    main()
