"""Process start to first token, and what it is made of, in fresh processes.

    python bench/startup.py [demo] [--repeat 9]
    python bench/startup.py big --memory 8GiB --repeat 3 --touch

For each: wall time and CPU time (user and system, of all threads) of `headrace --help` and of
`headrace run MODEL hi -n 1`, and the phases of the same road through the Python interface. For a
model with experts that all fit, also the time until every record is in memory, beside the time of
reading the same files once with direct reads (four threads, one buffer each, nothing kept).

`--touch` lets another process write to as much memory as the model needs right before each run:
some guests pay more for the first touch of memory than for the read into it (docs/experiments.md).
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
from pathlib import Path
from statistics import median

from headrace.config import parse_bytes
from headrace.llm import resolve_model
from machine import Steal, describe

READERS, BLOCK_BYTES = 4, 1 << 20
COMMAND = "import sys; from headrace.cli import main; sys.exit(main())"
# Prints one JSON object: seconds after the parent's start of the process.
PHASES = """
import json, os, sys, time
spent = {"interpreter": time.monotonic()}
from headrace.config import ExpertConfig, SamplingParams
from headrace.llm import LLM
spent["imports"] = time.monotonic()
llm = LLM(sys.argv[1], memory=sys.argv[2], experts=ExpertConfig(history="off"))
spent["dense weights"] = time.monotonic()
stream = llm.stream("hi", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
while not stream._sequence.num_generated:
    stream.advance()
spent["first token"] = time.monotonic()
if llm.store is not None and llm.plan.is_resident:
    wanted = llm.plan.num_records * llm.plan.record_bytes
    while (s := llm.store.stats()).bytes_read + s.prefetch_bytes < wanted:
        time.sleep(0.005)
    spent["all experts"] = time.monotonic()
print(json.dumps(spent))
os._exit(0)
"""


def timed(*arguments: str) -> tuple[float, float]:
    """Run a Python process to its end; return its wall and CPU seconds."""
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    message = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(message.decode())
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime


def phases(model: str, memory: str) -> dict[str, float]:
    """Seconds from the start of a process to the end of each phase."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PHASES, model, memory], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return {name: at - start for name, at in json.loads(done.stdout).items()}


def direct_read_s(folder: Path) -> float:
    """Seconds to read every weight file of a folder once, past the page cache."""
    places = [
        (os.open(path, os.O_RDONLY | os.O_DIRECT), at)
        for path in sorted(folder.glob("*.safetensors"))
        for at in range(0, path.stat().st_size, BLOCK_BYTES)
    ]
    lock, left = threading.Lock(), iter(places)

    def read() -> None:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        while True:
            with lock:
                place = next(left, None)
            if place is None:
                return
            os.preadv(place[0], [buffer], place[1])

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    for handle in {handle for handle, _ in places}:
        os.close(handle)
    return seconds


def touch(num_bytes: int) -> None:
    """Let another process write to memory and end."""
    code = (
        "import mmap, sys\nm = mmap.mmap(-1, int(sys.argv[1]))\nm.madvise(mmap.MADV_HUGEPAGE)\n"
        "for at in range(0, len(m), 4096): m[at] = 1"
    )
    subprocess.run([sys.executable, "-c", code, str(num_bytes)], check=True)


def commands(model: str, memory: str, repeat: int) -> None:
    """Print the medians of the command line."""
    run = ("run", model, "hi", "-n", "1", "--memory", memory, "--history", "off")
    for words in (("--help",), run):
        runs = [timed("-c", COMMAND, *words) for _ in range(repeat)]
        wall, cpu = (median(values) for values in zip(*runs, strict=True))
        print(f"headrace {' '.join(words)}: {wall * 1e3:.0f} ms wall, {cpu * 1e3:.0f} ms of CPU")


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--touch", action="store_true")
    options = parser.parse_args()
    print(describe())
    folder = resolve_model(options.model)
    with Steal() as steal:
        if options.model == "demo":
            commands(options.model, options.memory, options.repeat)
        runs = []
        for _ in range(options.repeat):
            read_s = direct_read_s(folder)
            if options.touch:
                touch(parse_bytes(options.memory))
            runs.append({**phases(options.model, options.memory), "direct reads": read_s})
            print("  " + ", ".join(f"{name} {at:.2f}" for name, at in runs[-1].items()))
    print("seconds after the start of the process, medians:")
    for name in runs[0]:
        print(f"  {name:<14}{median(run[name] for run in runs):8.3f}")
    print(f"steal {steal.share:.1%}")


if __name__ == "__main__":
    main()
