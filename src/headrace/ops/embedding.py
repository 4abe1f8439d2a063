"""Token ids to hidden states."""

from typing import Any

import numpy.typing as npt

from headrace import _core
from headrace.arrays import Float32, Int32


def embedding(ids: Int32, table: _core.Matrix | npt.NDArray[Any]) -> Float32:
    """Look up the row of each token.

    Args:
        ids: [T] int32. table: a packed matrix [V, D] (a head that the model ties to its
        embedding: the token's output
            is read back as real values), or rows [V, D] of float32, float16, or uint16 holding
            bfloat16.

    Returns:
        [T, D] float32, exact.

    Raises:
        ShapeError: an id is outside 0..V-1, or an array has another dtype, rank or order.
    """
    if isinstance(table, _core.Matrix):
        return _core.embedding_packed(ids, table)
    return _core.embedding_rows(ids, table)
