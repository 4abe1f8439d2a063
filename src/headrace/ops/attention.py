"""Keys, values and latents in pages, and attention over them: grouped-query and latent."""

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

    A pool of q8 keeps, per 32 dims of a key or a value, int8 codes and one f16 scale, the least one
    not below max|x| / 127: an item is off by at most half a scale. A group with a NaN or an
    infinity reads as NaN.

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
    q: Float32,
    pool: _core.KVPool,
    layer: int,
    rows: StepRowsLike,
    scale: float,
    *,
    window: int | None = None,
    sinks: Float32 | None = None,
) -> Float32:
    """Attend from each row to its own sequence, up to the row's position.

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
        window: W >= 1; a row sees the last W positions only, its own included. Pages wholly before
            it are not read and need not exist. None: all positions.
        sinks: [H] float32, one more score per head, not scaled, that takes its share of the softmax
            and has no value. None: no sinks.

    Returns:
        [T, H * Dh] float32.

    Raises:
        ShapeError: a shape differs, the window is below 1, or a row points outside its pages.

    Source:
        Vaswani et al., Attention Is All You Need, equation 1; Ainslie et al., GQA; online softmax
        as in Milakov and Gimelshein, arXiv 1805.02867; sinks and windows as in the gpt-oss
        reference model.
    """
    return _core.paged_attention(q, pool, layer, rows, scale, window=window, sinks=sinks)


def rotary_attention(
    q: Float32,
    k: Float32,
    v: Float32,
    angles: tuple[Float32, Float32],
    pool: _core.KVPool,
    layer: int,
    rows: StepRowsLike,
    scale: float,
    *,
    q_norm: Float32 | None = None,
    k_norm: Float32 | None = None,
    eps: float = 0.0,
    window: int | None = None,
    sinks: Float32 | None = None,
) -> Float32:
    """Norm and turn the heads of q and k, write keys and values, attend: one native call.

    The same bits as `rms_norm` of each head, `rope`, `kv_write` and `paged_attention` in turn.

    Args:
        q: [T, H * Dh] float32; H a multiple of the pool's K.
        k: [T, K * Dh] float32.
        v: [T, K * Dh] float32.
        angles: cos and sin of the rows, each [T, d/2]; see `rope`.
        pool: K kv heads of Dh dims, in pages; the rows' keys and values are written.
        layer: 0 to the pool's layers - 1.
        rows: positions and pages of the T rows.
        scale: multiplies the scores, usually Dh ** -0.5.
        q_norm: [Dh] float32, the weight that norms every query head by itself. None: no norm.
        k_norm: as q_norm, for the key heads.
        eps: of both norms.
        window: as in `paged_attention`.
        sinks: as in `paged_attention`.

    Returns:
        [T, H * Dh] float32.

    Raises:
        ShapeError: a shape differs, or a row points outside its pages.
    """
    return _core.rotary_attention(
        q,
        k,
        v,
        angles,
        pool,
        layer,
        rows,
        scale,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        window=window,
        sinks=sinks,
    )


def latent_write(pool: _core.LatentPool, layer: int, latents: Float32, rows: StepRowsLike) -> None:
    """Round latents to the pool's type and store them at their rows' positions.

    Args:
        pool: latents of R dims with rope keys of dr dims, in pages.
        layer: 0 to the pool's layers - 1.
        latents: [T, R + dr] float32, the normed latent followed by the turned rope key.
        rows: positions and pages of the T rows.

    Raises:
        ShapeError: a shape differs, or a row points outside its pages.
    """
    _core.latent_write(pool, layer, latents, rows)


def latent_attention(
    q: Float32,
    pool: _core.LatentPool,
    layer: int,
    rows: StepRowsLike,
    scale: float,
    *,
    window: int | None = None,
    sinks: Float32 | None = None,
) -> Float32:
    """Attend as `paged_attention` does, all heads to the same latents.

    A token's key is its latent with its rope key, its value the latent alone.

    Args:
        q: [T, H, R + dr] float32, the query absorbed into the latent's space, with its rope part.
        pool: latents written before, those of this step included.
        layer: 0 to the pool's layers - 1.
        rows: positions and pages of the T rows.
        scale: multiplies the scores; the model's own, not a power of R + dr.
        window: as in `paged_attention`.
        sinks: as in `paged_attention`.

    Returns:
        [T, H, R] float32, in the latent's space.

    Raises:
        ShapeError: a shape differs, the window is below 1, or a row points outside its pages.

    Source:
        DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1, with the up-projections absorbed.
    """
    return _core.latent_attention(q, pool, layer, rows, scale, window=window, sinks=sinks)
