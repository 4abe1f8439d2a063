"""Which experts each token goes to."""

from headrace import _core
from headrace.arrays import Float32, Int32


def router_topk(
    x: Float32, weight: _core.Matrix, *, top_k: int, renormalize: bool
) -> tuple[Int32, Float32]:
    """Pick the experts each token goes to.

    Softmax runs over all E experts before selection; a tie goes to the lower id.

    Args:
        x: [T, D] float32, hidden states after the pre-FFN norm.
        weight: packed [E, D] in format f32, the router matrix.
        top_k: A, experts per token; 1 <= A <= E.
        renormalize: divide the A kept weights by their sum, added in descending order.

    Returns:
        ids [T, A] int32 in descending weight, and weights [T, A] float32.

    Raises:
        ShapeError: D differs between x and weight, the router is not f32, or top_k is outside 1..E.
        NumericError: a router logit is NaN or infinite.

    Source:
        The Qwen3-MoE reference model (config field norm_topk_prob).
    """
    return _core.router_topk(x, weight, top_k=top_k, renormalize=renormalize)
