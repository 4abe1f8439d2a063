"""Products with packed weight matrices."""

from collections.abc import Sequence

from headrace import _core
from headrace.arrays import Float32


def linear(x: Float32, w: _core.Matrix) -> Float32:
    """Multiply rows by a packed matrix: x W^T.

    Quantised weights meet inputs quantised per row and group to int8 (scale amax / 127, half to
    even); integer dots are exact and groups join by one fused multiply-add each, in ascending
    order. Floating weights: one fused chain over ascending inputs per output.

    Args:
        x: [T, K] float32.
        w: packed [N, K].

    Returns:
        [T, N] float32; a row's bits depend on that row alone.

    Raises:
        ShapeError: K differs, or x is not float32 in C order.
        NumericError: w is quantised and x holds a NaN or an infinity.
    """
    return _core.linear(x, w)


def linears(x: Float32, matrices: Sequence[_core.Matrix]) -> tuple[Float32, ...]:
    """Multiply the same rows by several matrices; the same bits as `linear` for each.

    The input is quantised once for each distinct group size.

    Args:
        x: [T, K] float32.
        matrices: packed [N_i, K].

    Returns:
        One [T, N_i] float32 array per matrix.

    Raises:
        ShapeError: K differs, or x is not float32 in C order.
        NumericError: a matrix is quantised and x holds a NaN or an infinity.
    """
    return _core.linears(x, matrices)


def norm_linears(
    x: Float32, weight: Float32, eps: float, matrices: Sequence[_core.Matrix]
) -> tuple[Float32, ...]:
    """Norm the rows, then multiply them by several matrices: `rms_norm` and `linears` in one call.

    Args:
        x: [T, K] float32.
        weight: [K] float32, of the norm.
        eps: of the norm.
        matrices: packed [N_i, K].

    Returns:
        One [T, N_i] float32 array per matrix.

    Raises:
        ShapeError: K differs, or an array is not float32 in C order.
        NumericError: a matrix is quantised and a normed row holds a NaN or an infinity.
    """
    return _core.norm_linears(x, weight, eps, matrices)


def linear_add(x: Float32, w: _core.Matrix, y: Float32) -> Float32:
    """Compute y + x W^T: `linear` and `add` in one call.

    Args:
        x: [T, K] float32.
        w: packed [N, K].
        y: [T, N] float32.

    Returns:
        [T, N] float32.

    Raises:
        ShapeError: a shape differs, or an array is not float32 in C order.
        NumericError: w is quantised and x holds a NaN or an infinity.
    """
    return _core.linear_add(x, w, y)
