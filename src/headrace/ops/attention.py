"""Keys and values in pages, and grouped-query attention over them."""

from typing import Protocol

from headrace import _core
from headrace.arrays import Float32, Int32


class StepRowsLike(Protocol):
    """Where each row of a step stands. `headrace.state.StepRows` is the one that models pass."""

    @property
    def positions(self) -> Int32:
        """[T] int32, the row's position in its sequence."""

    @property
    def sequences(self) -> Int32:
        """[T] int32, the row of page_table that holds the sequence's pages."""

    @property
    def page_table(self) -> Int32:
        """[B, P] int32, pages of the pool in ascending position; unused places are not read."""


def kv_write(pool: _core.KVPool, layer: int, k: Float32, v: Float32, rows: StepRowsLike) -> None:
    """Round keys and values to the pool's type and store them at their rows' positions.

    Args:
        pool: K kv heads of Dh dims, in pages.
        layer: 0 to the pool's layers - 1.
        k: [T, K, Dh] float32.
        v: [T, K, Dh] float32.
        rows: positions and pages of the T rows.

    Raises:
        ShapeError: a shape differs, or a row points outside its pages.
    """
    _core.kv_write(pool, layer, k, v, rows)


def paged_attention(
    q: Float32, pool: _core.KVPool, layer: int, rows: StepRowsLike, scale: float
) -> Float32:
    """Attend from each row to positions 0..position of its own sequence.

    Head h reads kv head h // (H/K). Pages in ascending order; in a page the scores are chains
    over the head's dims, then maximum, exponentials, tree sum, and a chain over the values; pages
    join by online softmax. So the bits do not depend on the other rows, on chunking or on
    batching.

    Args:
        q: [T, H, Dh] float32; H a multiple of the pool's K.
        pool: keys and values written before, those of this step included.
        layer: 0 to the pool's layers - 1.
        rows: positions and pages of the T rows.
        scale: multiplies the scores, usually Dh ** -0.5.

    Returns:
        [T, H * Dh] float32.

    Raises:
        ShapeError: a shape differs, or a row points outside its pages.

    Source:
        Vaswani et al., Attention Is All You Need, equation 1; Ainslie et al., GQA; online softmax
        as in Milakov and Gimelshein, arXiv 1805.02867.
    """
    return _core.paged_attention(q, pool, layer, rows, scale)
