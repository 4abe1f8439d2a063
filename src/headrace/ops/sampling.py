"""From logits to a token."""

from headrace import _core
from headrace.arrays import Float32, Int32


def sample(
    logits: Float32,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """Draw a token: temperature, then top-k, then min-p, then top-p.

    p = exp((logit - max) / temperature). top_k keeps the k largest, min_p those with p at least
    min_p times the largest, top_p the smallest set of the largest that reaches top_p of what is
    left. Sums are exact: of p * 2**40 cut to integers. The draw walks what is kept in ascending id.
    Its random number is a function of (seed, position) alone, so a token does not depend on what
    else runs.

    Args:
        logits: [V] float32; -inf marks a forbidden token.
        temperature: 0 takes the largest logit, ties to the lower id.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.
        seed: 0 to 2**64 - 1.
        position: of the token to be drawn in its sequence.

    Returns:
        The token's id.

    Raises:
        ShapeError: a parameter is out of range, or logits is not float32 in C order.
        NumericError: a logit is NaN or +inf, or all are -inf.
    """
    return _core.sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position,
    )


def log_softmax(logits: Float32) -> Float32:
    """Log-probabilities of every token.

    Args:
        logits: [R, V] float32.

    Returns:
        [R, V] float32: (x - max) - log(sum(exp(x - max))).

    Raises:
        ShapeError: logits is not float32 in C order with two dimensions.
    """
    return _core.log_softmax(logits)


def apply_penalties(
    logits: Float32,
    ids: Int32,
    counts: Int32,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Float32:
    """Make tokens that were seen before less likely.

    A seen token's logit is divided by `repetition` if positive, else multiplied; then, if it was
    generated, `frequency` times its count and `presence` are taken off.

    Args:
        logits: [V] float32.
        ids: [C] int32, the distinct tokens of the prompt and the answer.
        counts: [C] int32, how often each was generated; 0 if only the prompt has it.
        repetition: above 0; 1 changes nothing.
        presence: 0 changes nothing.
        frequency: 0 changes nothing.

    Returns:
        [V] float32, a new array.

    Raises:
        ShapeError: an id is outside 0..V-1, the lengths differ, or repetition is not above 0.

    Source:
        Keskar et al., CTRL, section 4.1 (repetition); the OpenAI API reference (presence,
        frequency).
    """
    return _core.apply_penalties(
        logits, ids, counts, repetition=repetition, presence=presence, frequency=frequency
    )
