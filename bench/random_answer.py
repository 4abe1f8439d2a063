"""One answer to a random prompt with nearly random tokens, in a process of its own, as JSON.

    python bench/random_answer.py MODEL MEMORY PROMPT_TOKENS TOKENS THREADS

What llama-bench does: neither prompt nor answer mean anything, so experts are asked for as the
router's weights alone say. A first short answer warms up. Used by bench/vs_llamacpp.py.
"""

import json
import sys
from dataclasses import asdict

import numpy as np

from headrace import LLM, ExpertConfig, SamplingParams

WARM_TOKENS = 4
HOT = 100.0  # a temperature at which every token is about as likely as any other


def main() -> None:
    """Answer and print the receipt."""
    model, memory, prompt_tokens, tokens, threads = sys.argv[1:]
    random = np.random.default_rng(0)
    context = int(prompt_tokens) + int(tokens) + 1
    with LLM(
        model,
        memory=memory,
        context=context,
        threads=int(threads),
        kv="f16",
        experts=ExpertConfig(history="off"),
    ) as llm:

        def answer(num_prompt: int, num_tokens: int) -> dict[str, object]:
            params = SamplingParams(
                max_tokens=num_tokens, temperature=HOT, top_k=0, top_p=1.0, ignore_eos=True, seed=1
            )
            prompt = random.integers(llm.spec.vocab_size - 1, size=num_prompt).tolist()
            return asdict(llm.generate(prompt, params).receipt)

        answer(WARM_TOKENS, WARM_TOKENS)
        print(json.dumps(answer(int(prompt_tokens), int(tokens) + 1)))


if __name__ == "__main__":
    main()
