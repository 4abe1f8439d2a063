"""How far each policy comes from LRU (0) to Belady (1), on traces: files, and two synthetic skews.

    python bench/traces.py [FILE ...]

The skews have 12 layers of 64 experts, 8 per token: `zipf`, where every token draws anew by Zipf's
law, so that there is nothing to know but the popularity of each expert; and `topics`, where six
popularities take turns and an expert just used is likelier again.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from headrace.config import POLICIES
from headrace.experts.policy import BELADY, replay
from headrace.experts.trace import Block, Pace, Trace, TraceFile, TraceHeader, read_trace

LAYERS, EXPERTS, ACTIVE, TOKENS = 12, 64, 8, 3000
HALF_LIFE = 32.0


def draw(rng: np.random.Generator, log_weights: np.ndarray) -> np.ndarray:
    """Draw ACTIVE experts without replacement: the largest of weights disturbed by Gumbel noise."""
    return np.argsort(-(log_weights + rng.gumbel(size=EXPERTS)))[:ACTIVE].astype(np.int32)


def zipf(rng: np.random.Generator) -> list[np.ndarray]:
    """Ids [A] of each layer of each token, drawn by Zipf's law."""
    popularity = [rng.permutation(-np.log(np.arange(1, EXPERTS + 1))) for _ in range(LAYERS)]
    return [draw(rng, popularity[layer]) for _ in range(TOKENS) for layer in range(LAYERS)]


def topics(rng: np.random.Generator) -> list[np.ndarray]:
    """The same with six popularities of about 80 tokens, and a bonus for what was just used."""
    ranks = -np.log(np.arange(1, EXPERTS + 1))
    popularity = [[rng.permutation(ranks) for _ in range(LAYERS)] for _ in range(6)]
    bonus = np.zeros((LAYERS, EXPERTS))
    topic, visits = 0, []
    for _ in range(TOKENS):
        if rng.random() < 1 / 80:
            topic = int(rng.integers(6))
        for layer in range(LAYERS):
            ids = draw(rng, popularity[topic][layer] + bonus[layer])
            bonus[layer] = 0.0
            bonus[layer][ids] = 1.5
            visits.append(ids)
    return visits


def varint(value: int) -> bytes:
    """LEB128."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def make_trace(visits: list[np.ndarray]) -> Trace:
    """Write and read a trace in which every token is a step."""
    header = TraceHeader("synthetic", tuple(range(LAYERS)), EXPERTS, 4096, 4096, 0, 4, 16)
    payload = b"".join(
        varint(index % LAYERS + 1) + varint(1) + varint(ACTIVE) + ids.astype(np.uint8).tobytes()
        for index, ids in enumerate(visits)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = TraceFile(Path(folder) / "synthetic.hrt", header)
        file.add(Block(TOKENS, Pace(), payload))
        file.close()
        return read_trace(Path(folder) / "synthetic.hrt")


def print_table(name: str, trace: Trace) -> None:
    """Print hit rates of LRU and Belady, and what each policy gains of their distance."""
    num_records = len(trace.header.layers) * trace.header.num_experts
    working_set = trace.native.visit(0)[1].shape[1] * len(trace.header.layers)
    shares = (2 / 3, 5 / 6, 1, 4 / 3, 2)
    slots = sorted({round(working_set * s) for s in shares} | {num_records // 3, num_records // 2})
    results = {
        policy: [
            replay(trace, policy, num_slots=count, half_life_tokens=HALF_LIFE) for count in slots
        ]
        for policy in (*POLICIES, BELADY)
    }
    requests = results[BELADY][0].decode.requests + results[BELADY][0].prefill.requests
    print(f"\n{name}: {trace.num_tokens} tokens, working set {working_set} of {num_records}")
    print("| slots | " + " | ".join(map(str, slots)) + " |")
    print("|---" * (len(slots) + 1) + "|")
    for policy in ("lru", BELADY):
        rates = [f"{1 - result.misses / requests:.3f}" for result in results[policy]]
        print(f"| {policy}, hit rate | " + " | ".join(rates) + " |")
    for policy in POLICIES:
        if policy == "lru":
            continue
        cells = []
        for got, worst, best in zip(results[policy], results["lru"], results[BELADY], strict=True):
            distance = max(1, worst.misses - best.misses)
            cells.append(f"{(worst.misses - got.misses) / distance:.2f}")
        print(f"| {policy} | " + " | ".join(cells) + " |")


def main() -> None:
    """Print one table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    for file in options.files:
        print_table(file.name, read_trace(file))
    for make in (zipf, topics):
        print_table(make.__name__, make_trace(make(np.random.default_rng(0))))


if __name__ == "__main__":
    main()
