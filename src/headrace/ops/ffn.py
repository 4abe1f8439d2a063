"""Gated feed-forward networks: resident ones, and mixtures whose experts arrive one by one."""

from headrace import _core
from headrace.arrays import Float32, Int32


def swiglu_ffn(x: Float32, gate: _core.Matrix, up: _core.Matrix, down: _core.Matrix) -> Float32:
    """Compute down(silu(gate x) * (up x)).

    Args:
        x: [T, D] float32.
        gate: packed [F, D].
        up: packed [F, D].
        down: packed [D, F].

    Returns:
        [T, D] float32.

    Raises:
        ShapeError: the sizes do not fit each other, or x is not float32 in C order.
        NumericError: a matrix is quantised and its input holds a NaN or an infinity.

    Source:
        Shazeer, GLU Variants Improve Transformer, equation 6 (SwiGLU).
    """
    return _core.swiglu_ffn(x, gate, up, down)


def moe_ffn(x: Float32, ids: Int32, weights: Float32, lease: _core.RecordFeed) -> Float32:
    """Mix the chosen experts of every token, computing records in the order in which they arrive.

    Each expert is a SwiGLU network. Contributions are kept apart until all are there, then added
    by one fused multiply-add each in ascending expert id, starting from 0; the order of arrival
    cannot show.

    Args:
        x: [T, D] float32.
        ids: [T, A] int32, distinct in a row.
        weights: [T, A] float32.
        lease: the records of all ids; blocks until they are ready.

    Returns:
        [T, D] float32.

    Raises:
        ShapeError: sizes do not fit, or an id is not in the lease.
        NumericError: the experts are quantised and an input holds a NaN or an infinity.
        ExpertReadError: a record could not be read.
    """
    return _core.moe_ffn(x, ids, weights, lease)


def moe_activations(
    x: Float32, ids: Int32, weights: Float32, lease: _core.RecordFeed
) -> tuple[Float32, Float32]:
    """Compute `moe_ffn`, and keep what each chosen expert's down matrix was given.

    For who studies a model; no model calls it.

    Args:
        x, ids, weights, lease: as in `moe_ffn`.

    Returns:
        [T, D] float32, the same bits as `moe_ffn`, and [T, A, F] float32.

    Raises:
        What `moe_ffn` raises.
    """
    return _core.moe_activations(x, ids, weights, lease)


def routed_ffn(
    x: Float32,
    router: _core.Matrix,
    source: _core.RecordSource,
    layer: int,
    *,
    top_k: int,
    renormalize: bool,
    following: tuple[Float32, Float32, float, _core.Matrix, int] | None = None,
) -> Float32:
    """Route every token, fetch the chosen experts' records, and mix: one native call.

    The same bits as `router_topk` and `moe_ffn` in turn.

    Args:
        x: [T, D] float32.
        router: packed [E, D] in format f32.
        source: gives the records of the experts chosen.
        layer: the layer number that the source knows.
        top_k: A, experts per token.
        renormalize: as in `router_topk`.
        following: for advice to the source, which changes no result: the hidden state [T, D] that
            x was normed from, and the norm's weight [D] and eps, router and number of the next
            layer that routes, for as many experts per token.

    Returns:
        [T, D] float32.

    Raises:
        ShapeError: sizes do not fit, or the source has no such layer.
        NumericError: a router logit, or an input of a quantised expert, is NaN or infinite.
        ExpertReadError: a record could not be read.
    """
    return _core.routed_ffn(
        x, router, source, layer, top_k=top_k, renormalize=renormalize, following=following
    )
