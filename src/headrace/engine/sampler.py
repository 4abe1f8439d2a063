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
        best = np.argsort(-row, kind="stable")[:num_top]
        top = tuple((int(i), float(row[i])) for i in best)
        result.append(TokenLogprob(token, float(row[token]), top))
    return result


def _penalised(sequence: Sequence, logits: Float32) -> Float32:
    """Lower the scores of tokens that were there before.

    The repetition penalty looks at prompt and answer: it divides positive scores and multiplies
    negative ones. Presence and frequency look at the answer alone and subtract.

    Source:
        Hugging Face `RepetitionPenaltyLogitsProcessor`; the OpenAI API defines the other two.
    """
    params = sequence.params
    repetition = np.float32(params.repetition_penalty)
    changes_answer = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if repetition == 1.0 and not changes_answer:
        return logits
    scores = logits.copy()
    if repetition != 1.0:
        seen = np.fromiter(sequence.seen, np.int64, len(sequence.seen))
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / repetition, old * repetition)
    if changes_answer and sequence.output_counts:
        ids, counts = np.array(list(sequence.output_counts.items()), np.int64).T
        scores[ids] -= np.float32(params.presence_penalty)
        scores[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    return scores
