"""From logits to the next token: penalties, then the native sampler; and log-probabilities.

The sampler draws from (seed, position) alone, so the choice does not depend on who shares the step.
"""

import numpy as np

from headrace import ops
from headrace.arrays import Float32
from headrace.engine.sequence import Sequence, TokenEvent, TokenLogprob


def choose(sequence: Sequence, logits: Float32) -> TokenEvent:
    """Choose the token after the sequence's last one.

    Args:
        sequence: gives parameters, seed, position and the tokens that penalties count.
        logits: [V] float32, the row of the last token; not changed.
    """
    params = sequence.params
    token = ops.sample(
        _penalised(sequence, logits),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=sequence.seed,
        position=len(sequence.tokens),
    )
    if params.logprobs is None:
        return TokenEvent(token)
    return TokenEvent(token, token_logprobs(logits[None], [token], params.logprobs)[0])


def token_logprobs(logits: Float32, ids: list[int], num_top: int) -> list[TokenLogprob]:
    """Return what the model itself gave each token, before penalties and temperature.

    Args:
        logits: [R, V] float32.
        ids: the R tokens asked about.
        num_top: how many of the likeliest tokens to name; a tie goes to the lower id.
    """
    rows = ops.log_softmax(logits)
    result = []
    for row, token in zip(rows, ids, strict=True):
        top = tuple((i, float(row[i])) for i in _likeliest(row, num_top))
        result.append(TokenLogprob(token, float(row[token]), top))
    return result


def _likeliest(row: Float32, num_top: int) -> list[int]:
    """Return the ids of the largest of row [V], in order; a vocabulary is not sorted for a few."""
    num_top = min(num_top, len(row))
    if num_top == 0:
        return []
    least = np.partition(row, -num_top)[-num_top]
    ids = np.flatnonzero(row >= least)
    best = ids[np.argsort(-row[ids], kind="stable")[:num_top]]
    return [int(i) for i in best]


def _penalised(sequence: Sequence, logits: Float32) -> Float32:
    params = sequence.params
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0):
        return logits
    seen = sequence.seen
    return ops.apply_penalties(
        logits,
        np.fromiter(seen.keys(), np.int32, len(seen)),
        np.fromiter(seen.values(), np.int32, len(seen)),
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )
