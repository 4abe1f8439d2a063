"""The same GGUF file in headrace and in llama.cpp: greedy ids side by side.

    python bench/parity_llamacpp.py FILE.gguf --server PATH/llama-server [--prompts 20]
        [--tokens 64] [--bound 0.5] [--port 8077] [--memory 3GiB] [--ids]

Both answer the same prompts, given as ids so that tokenizers play no part, and decode greedily
until the model ends its text. Both round activations to 8 bits wherever weights are quantised, by
different rules and in another order of summation, so that close calls fall differently. Where the
ids part, llama.cpp's own log-probabilities say how close the call was: the margin of its token over
ours. From there on the two answer different texts, so only the first difference of a prompt is
judged. Exit status 1 if a margin is above --bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config import SamplingParams
from headrace.llm import LLM

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small village by the sea, and",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three laws of motion say that",
    "My favourite recipe for bread starts with",
    "In 1969 the first people walked on the moon. They",
    "To install the package, run the following command:",
    "The difference between a list and a tuple is",
    "Q: What is the largest planet?\nA:",
    "Dear Sir or Madam, I am writing to",
    "The river had been rising for three days when",
    "A prime number is",
    "SELECT name, count(*) FROM",
    "The most important thing about sleep is",
    "She opened the letter and read:",
    "The speed of light in a vacuum is",
    "List three animals that live in the desert:",
    "Photosynthesis is the process by which",
    "If it rains tomorrow, we will",
)
NUM_PROBABLE = 20


class Peer:
    """A running llama-server."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request; its answer as JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def complete(self, ids: Sequence[int], num_tokens: int) -> list[dict[str, Any]]:
        """Decode greedily; each token with the log-probabilities of the likeliest."""
        body = {
            "prompt": list(ids),
            "n_predict": num_tokens,
            "temperature": 0,
            "n_probs": NUM_PROBABLE,
            "cache_prompt": False,
        }
        found: list[dict[str, Any]] = self.ask("/completion", body)["completion_probabilities"]
        return found


@contextmanager
def serve(server: Path, model: Path, port: int, context: int) -> Iterator[Peer]:
    """Run llama-server on a model, from when it answers."""
    command = [str(server), "-m", str(model), "--port", str(port), "-c", str(context)]
    process = subprocess.Popen(
        [*command, "--parallel", "1", "--no-webui", "-t", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peer = Peer(port)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{server} ended with status {process.returncode}")
            try:
                peer.ask("/health")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        yield peer
    finally:
        process.terminate()
        process.wait()


def random_ids(seed: int, vocab_size: int) -> list[int]:
    """A prompt for models without a language: 24 ids."""
    return [(seed * 7919 + i * i * 104729 + 17 * i) % (vocab_size - 300) + 200 for i in range(24)]


def first_difference(
    ours: Sequence[int], theirs: Sequence[dict[str, Any]]
) -> tuple[int, float] | None:
    """Where the ids part, and how much likelier llama.cpp finds its own token there."""
    for at, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own == other["id"]:
            continue
        probable = {item["id"]: item["logprob"] for item in other["top_logprobs"]}
        return at, other["logprob"] - probable.get(own, float("-inf"))
    return None


def main() -> int:
    """Compare; print a line per prompt and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bound", type=float, default=0.5, help="largest margin, in nats")
    parser.add_argument("--port", type=int, default=8077)
    parser.add_argument("--memory", default="auto", help="ceiling of headrace")
    parser.add_argument("--ids", action="store_true", help="prompts of arbitrary ids, not texts")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    with LLM(args.model, memory=args.memory, context=512) as llm:
        vocab = llm.tokenizer.vocab_size
        prompts = [
            random_ids(i, vocab) if args.ids else llm.tokenizer.encode(PROMPTS[i])
            for i in range(args.prompts)
        ]
        answers = [list(llm.generate(ids, params).ids) for ids in prompts]
    differences = []
    with serve(args.server, args.model, args.port, 512) as peer:
        for number, (ids, ours) in enumerate(zip(prompts, answers, strict=True)):
            found = first_difference(ours, peer.complete(ids, args.tokens))
            if found is None:
                print(f"{number:3} equal, {len(ours)} ids", flush=True)
                continue
            differences.append(found)
            print(f"{number:3} parts at {found[0]:3}, margin {found[1]:.3f}", flush=True)
    margins = sorted(margin for _, margin in differences)
    print(f"{len(prompts) - len(differences)} of {len(prompts)} equal over {args.tokens} ids")
    if margins:
        middle = margins[len(margins) // 2]
        print(f"margins where they part: median {middle:.3f}, largest {margins[-1]:.3f} nats")
    return int(any(margin > args.bound for margin in margins))


if __name__ == "__main__":
    sys.exit(main())
