"""Rotary position embedding, half-split layout."""

from headrace import _core
from headrace.arrays import Float32, Int32


def rope_angles(
    positions: Int32, inv_freq: Float32, factor: float = 1.0
) -> tuple[Float32, Float32]:
    """Tabulate cos and sin of position times frequency.

    The angle is a float32 product; cos and sin are computed in double precision by our own
    reduction and series, rounded to float32, then multiplied by the factor.

    Args:
        positions: [T] int32.
        inv_freq: [d/2] float32, one frequency per rotated pair.
        factor: the attention factor of a scaled rope.

    Returns:
        cos and sin, each [T, d/2] float32.

    Raises:
        ShapeError: an array has another dtype, rank or order.
    """
    return _core.rope_angles(positions, inv_freq, factor)


def rope(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Turn the pairs (i, i + d/2) of the first d dims of every head; the other dims pass.

    Args:
        x: [T, H, Dh] float32.
        cos: [T, d/2] float32.
        sin: [T, d/2] float32.

    Returns:
        [T, H, Dh] float32.

    Raises:
        ShapeError: d > Dh, T differs, or an array is not float32 in C order.

    Source:
        Su et al., RoFormer, section 3.4.2, in the half-split order of the Hugging Face models.
    """
    return _core.rope(x, cos, sin)
