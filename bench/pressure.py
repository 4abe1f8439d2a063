"""What becomes of an answer while another program takes the memory, and when it gives it back.

    python bench/pressure.py MODEL [--room 4096] [--tokens 900] [--seconds 25]

A first balloon leaves the machine --room MiB, so that `--memory auto` has a small machine to judge.
One process answers under it. After a quarter of the tokens a second program takes what is available
but for a quarter of the headroom, holds it for --seconds and gives it back. Prints, second by
second, slots, memory available to everybody and tokens per second; then the receipt, and whether
the ids are those of an undisturbed run. Run it alone: it squeezes the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from balloon import available_mib, balloon
from headrace import LLM, EngineConfig, ExpertConfig, SamplingParams
from headrace.plan import headroom_bytes
from machine import describe

PROMPT = "The river was high that spring, and the miller"


def answer(model: str, tokens: int) -> None:
    """In a process of its own: answer, one JSON line per step and one for the receipt."""
    config = EngineConfig(memory="auto", context=tokens + 64, experts=ExpertConfig(history="off"))
    with LLM(model, config) as llm:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        stream = llm.stream(PROMPT, params)
        assert llm.store is not None, "a model without experts has no slots"
        while not stream.is_finished:
            stream.advance()
            print(json.dumps({"at": time.time(), "slots": llm.store.num_slots}), flush=True)
        result = stream.result()
        print(json.dumps({"ids": result.ids, "receipt": asdict(result.receipt)}), flush=True)


def run(args: argparse.Namespace, is_squeezed: bool) -> tuple[list[int], dict[str, Any]]:
    """One answer; prints a line per second when squeezed. Returns its ids and its receipt."""
    command = [sys.executable, __file__, str(args.model), "--tokens", str(args.tokens), "--child"]
    end: dict[str, Any] = {}
    steps, second, steps_then, low_mib = 0, 0, 0, available_mib()
    taker: subprocess.Popen[str] | None = None
    let_go_at = 0.0
    phase = "before"
    speeds: dict[str, list[float]] = {"before": [], "while": [], "after": []}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        began = 0.0
        for line in child.stdout:
            row = json.loads(line)
            if "receipt" in row:
                end = row
                continue
            began = began or row["at"]
            steps += 1
            low_mib = min(low_mib, available_mib())
            if is_squeezed and taker is None and steps >= args.tokens // 4:
                left = headroom_bytes(available_mib() << 20) // 4 >> 20
                taker = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("balloon.py")), str(left),
                     str(args.seconds)], stdout=subprocess.DEVNULL, text=True,
                )  # fmt: skip
                let_go_at, phase = time.time() + args.seconds, "while"
            if taker is not None and phase == "while" and taker.poll() is not None:
                phase = "after"
            if row["at"] - began >= second + 1:
                second = int(row["at"] - began)
                speeds[phase].append(float(steps - steps_then))
                if is_squeezed:
                    print(
                        f"  {second:4} s  {phase:6}  {row['slots']:5} slots  "
                        f"{available_mib():6} MiB available  {steps - steps_then:4} tok/s",
                        flush=True,
                    )
                steps_then = steps
    if taker is not None:
        taker.wait()
        if let_go_at > time.time():
            print("  the answer ended before the memory was given back: raise --tokens")
    if child.returncode:
        raise SystemExit(f"the answer failed with status {child.returncode}")
    if is_squeezed:
        shown = {name: median(values) for name, values in speeds.items() if values}
        print(f"  least available {low_mib} MiB; median tok/s {shown}")
    return end["ids"], end["receipt"]


def main() -> None:
    """Run undisturbed and squeezed, and compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--room", type=int, default=4096, help="MiB that are left at the start")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        answer(str(args.model), args.tokens)
        return
    print(describe())
    with balloon(args.room, 600) as available:
        print(f"{available} MiB available at the start")
        ids, receipt = run(args, is_squeezed=True)
    given, again = receipt["slots_given_back"], receipt["slots_taken_again"]
    print(
        f"  {given} slots given back in {receipt['give_backs']} steps, {again} taken again; "
        f"peak {receipt['peak_memory_bytes'] >> 20} of {receipt['memory_ceiling_bytes'] >> 20} MiB"
    )
    undisturbed, _ = run(args, is_squeezed=False)
    print("  ids are those of an undisturbed run" if ids == undisturbed else "  IDS DIFFER")
    if ids != undisturbed or not given:
        sys.exit(1)


if __name__ == "__main__":
    main()
