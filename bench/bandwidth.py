"""Decoding against the bandwidth of the drive, beside what `plan` predicts.

    headrace synth qwen3-30b-a3b big --layers 12
    python bench/bandwidth.py big [--memory 1536MiB] [--rates 100MB/s,200MB/s,...] [--tokens 24]

One machine stands for many: reads of the model take as long as on a drive of the stated bandwidth
and latency. The machine's own drive must be the faster one; a copy of the model in tmpfs
stands for drives that are faster than it. Some answers, at the machine's own speed, fill the
history; then every row is another answer from a store that the history warmed, and its prediction
comes from a plan made with the same history, at the row's bandwidth.
A rate of `own` leaves the drive as it is; its prediction is the pace recorded in the history.
`--repeat` rows per rate, in turns. Steal above 5 % voids a row, and another takes its place, as
long as no more are void than count.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from headrace import LLM, EngineConfig, ExpertConfig, SamplingParams, _core
from headrace.config import parse_bytes
from headrace.llm import plan_model
from machine import Rounds, Steal, describe, with_slots_of

PROMPT = "The quick brown fox jumps over the lazy dog."
RATES = "100MB/s,200MB/s,400MB/s,800MB/s,own"
READERS = 4
LEARNING_RUNS = 2


def rate(text: str) -> float | None:
    """Bytes per second of `400MB/s`; None of `own`."""
    return None if text == "own" else float(parse_bytes(text.removesuffix("/s")))


def name(bytes_per_s: float | None) -> str:
    """What a row is called."""
    return "own" if bytes_per_s is None else f"{bytes_per_s / 1e6:.0f} MB/s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("1536MiB"))
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds per read")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--learn", type=int, default=128, help="tokens of each answer before")
    parser.add_argument("--history", type=Path, help="kept there; learned only if it is missing")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    model = args.model.resolve()
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    rows: dict[float | None, list[tuple[float, float]]] = {
        rate(r): [] for r in args.rates.split(",")
    }
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        experts = ExpertConfig(
            readers=READERS,
            block_bytes=1 << 20,
            direct=True,
            history_path=args.history or Path(folder) / "history",
        )
        config = with_slots_of(model, EngineConfig(memory=args.memory, experts=experts))
        is_known = args.history is not None and args.history.exists()
        for seed in range(0 if is_known else LEARNING_RUNS):
            with LLM(model, config) as llm:
                llm.generate(PROMPT, SamplingParams(max_tokens=args.learn, seed=seed))
        columns = ("drive", 11), ("tok/s", 8), ("plan", 8), ("of plan", 9), ("MB/token", 10)
        print("".join(f"{text:>{width}}" for text, width in (*columns, ("plan", 7), ("steal", 7))))
        config = replace(config, experts=replace(experts, history="read"))
        turns = {bytes_per_s: iter(Rounds(args.repeat)) for bytes_per_s in rows}
        while turns:
            for bytes_per_s in list(turns):
                steal = next(turns[bytes_per_s], None)
                if steal is None:
                    del turns[bytes_per_s]
                    continue
                one = measure(model, config, params, bytes_per_s, args.latency, steal)
                if not steal.is_void:
                    rows[bytes_per_s].append(one)
    for bytes_per_s, seen in rows.items():
        if not seen:
            print(f"{name(bytes_per_s)}: every row is void")
            continue
        speed, plan = (median(values) for values in zip(*seen, strict=True))
        print(f"median at {name(bytes_per_s)}: {speed:.2f} tok/s, {speed / plan:.0%} of plan")


def measure(
    model: Path,
    config: EngineConfig,
    params: SamplingParams,
    bytes_per_s: float | None,
    latency_s: float,
    steal: Steal,
) -> tuple[float, float]:
    """One answer at a bandwidth: tokens per second, and those that the plan predicted."""
    plan = plan_model(model, config)
    expected = plan.predicted_tokens_per_s(bytes_per_s) or math.nan
    per_token = plan.forecast.bytes_per_token if plan.forecast is not None else 0.0
    if bytes_per_s is not None:
        _core.slow_drive(f"{model}/experts-", bytes_per_s=bytes_per_s, latency_s=latency_s)
    try:
        with steal, LLM(model, config) as llm:
            receipt = llm.generate(PROMPT, params).receipt
    finally:
        _core.clear_slow_drives()
    speed = receipt.decode_tokens_per_s
    print(
        f"{name(bytes_per_s):>11}{speed:8.2f}{expected:8.2f}{speed / expected:9.0%}"
        f"{receipt.bytes_read_per_token / 1e6:10.1f}{per_token / 1e6:7.1f}"
        f"   {Rounds.verdict(steal)}",
        flush=True,
    )
    return speed, expected


if __name__ == "__main__":
    main()
