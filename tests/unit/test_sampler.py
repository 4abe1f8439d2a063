"""Log-probabilities: which alternatives are named, and in which order."""

import numpy as np
import pytest

from headrace.engine.sampler import token_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 3, 20])
def test_the_likeliest_come_first_and_a_tie_goes_to_the_lower_id(num_top: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.integers(-3, 3, (40, 17)).astype(np.float32)  # full of ties
    for row, got in zip(logits, token_logprobs(logits, [5] * 40, num_top), strict=True):
        expected = sorted(range(17), key=lambda i: (-row[i], i))[:num_top]
        assert [i for i, _ in got.top] == expected
