"""Two drives at 3:1: what the slower one is given, and what both give together.

    headrace synth qwen3-30b-a3b big --layers 12
    python bench/mirrors.py big [--memory 1536MiB] [--rates 300MB/s,100MB/s] [--tokens 24]

Beside the model a folder of links to its experts stands for a full mirror, and reads of both take
as long as on drives of the stated bandwidths. Every round decodes alone at the sum of both, with
both drives, and alone at the first one's; ids must be the same. Prints share and speed of each
round and the medians. Steal above 5 % voids a round, and another takes its place, as long as no
more are void than count.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from headrace import LLM, EngineConfig, ExpertConfig, SamplingParams, _core
from headrace.config import parse_bytes
from headrace.llm import Completion
from machine import Rounds, describe, with_slots_of

PROMPT = "The quick brown fox jumps over the lazy dog."
READERS = 4


def answer(
    model: Path, memory: int, tokens: int, drives: tuple[Path, ...], rates: tuple[float, ...]
) -> Completion:
    """Decode once from an empty store with these drives at these rates, the model's first."""
    for folder, bytes_per_s in zip((model, *drives), rates, strict=True):
        _core.slow_drive(f"{folder}/experts-", bytes_per_s=bytes_per_s)
    experts = ExpertConfig(readers=READERS, block_bytes=1 << 20, history="off", drive=drives)
    try:
        config = with_slots_of(model, EngineConfig(memory=memory, experts=experts))
        with LLM(model, config) as llm:
            return llm.generate(PROMPT, SamplingParams(max_tokens=tokens, temperature=0.0))
    finally:
        _core.clear_slow_drives()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("1536MiB"))
    parser.add_argument(
        "--rates", default="300MB/s,100MB/s", help="the model's drive, the mirror's"
    )
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    model = args.model.resolve()
    first, second = (float(parse_bytes(r.removesuffix("/s"))) for r in args.rates.split(","))
    print(describe())
    shares, speeds, gains = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        mirror = Path(folder)
        for path in model.glob("experts-*.safetensors"):
            (mirror / path.name).symlink_to(path)
        rounds = Rounds(args.repeat)
        for steal in rounds:
            with steal:
                sum_ = answer(model, args.memory, args.tokens, (), (first + second,))
                both = answer(model, args.memory, args.tokens, (mirror,), (first, second))
                alone = answer(model, args.memory, args.tokens, (), (first,))
            assert sum_.ids == both.ids == alone.ids, "a drive changed a token"
            share = both.receipt.drives[1]["share"]
            speed = both.receipt.decode_tokens_per_s
            of_sum = speed / sum_.receipt.decode_tokens_per_s
            gain = speed / alone.receipt.decode_tokens_per_s
            print(
                f"  mirror {share:.1%} of bytes; {speed:.2f} tok/s, {of_sum:.0%} of one "
                f"drive as fast as both, {gain:.2f} x the first alone   {rounds.verdict(steal)}"
            )
            if steal.is_void:
                continue
            shares.append(share)
            speeds.append(of_sum)
            gains.append(gain)
    if not shares:
        raise SystemExit("every round is void")
    print(
        f"median: mirror {median(shares):.1%} of bytes (of bandwidth "
        f"{second / (first + second):.1%}), {median(speeds):.0%} of the sum, "
        f"{median(gains):.2f} x the first alone"
    )


if __name__ == "__main__":
    main()
