"""Root-mean-square norm."""

from headrace import _core
from headrace.arrays import Float32


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """Divide each row by its root mean square and multiply by the weight.

    The squares are summed in sixteen lanes, then by a tree; per-head norms call it on
    `x.reshape(-1, head_dim)`.

    Args:
        x: [R, D] float32.
        weight: [D] float32.
        eps: added to the mean of the squares, inside the root.

    Returns:
        [R, D] float32: (x / sqrt(mean(x^2) + eps)) * weight.

    Raises:
        ShapeError: D differs, or an array is not float32 in C order.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization, equation 4.
    """
    return _core.rms_norm(x, weight, eps)
