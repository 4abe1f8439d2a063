"""Ops that treat every element alike."""

from headrace import _core
from headrace.arrays import Float32


def add(x: Float32, y: Float32) -> Float32:
    """Add two arrays of one shape, the residual connection.

    Args:
        x: any shape up to four dimensions, float32.
        y: the same shape.

    Returns:
        x + y.

    Raises:
        ShapeError: the shapes differ, or an array is not float32 in C order.
    """
    return _core.add(x, y)


def clamp(x: Float32, limit: float) -> Float32:
    """Limit every element to [-limit, limit]; NaN stays NaN.

    Args:
        x: any shape up to four dimensions, float32.
        limit: above 0.

    Returns:
        An array of the same shape.

    Raises:
        ShapeError: limit is not above 0, or x is not float32 in C order.

    Source:
        The OLMoE reference model (config field clip_qkv).
    """
    return _core.clamp(x, limit)
