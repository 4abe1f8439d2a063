"""Every op in plain NumPy, step by step in the order of the numeric contract.

The specification and oracle of the native kernels: same names, same signatures, equal bits. NumPy
has no fused multiply-add, so `fma` emulates one exactly. Slow; it runs in tests and where
somebody asks for it. Keys, values and latents live in this module's own pools, experts
in its own `Experts`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import _core, quant
from headrace.arrays import Float32, Int32
from headrace.errors import NumericError
from headrace.ops.attention import StepRowsLike

_LANES = 16
_LEAST_AMAX = np.float32(1e-36)  # a group below this counts as zero: 127 / amax would overflow


def fma(a: Any, b: Any, c: Any) -> Any:
    """Compute a * b + c in float32 with one rounding.

    The product of two float32 is exact in float64. The sum is rounded to odd there (the last bit
    says that something was lost), which makes the second rounding, to float32, come out as if it
    were the only one.

    Source:
        Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms using
        rounding to odd.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.atleast_1d(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        adjust = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(adjust, bits + step, bits).view(np.float64)
        return odd.astype(np.float32).reshape(np.shape(product + addend))


def tree_sum(lanes: Float32) -> Float32:
    """Sum the last axis, 16 lanes, as (l, l+8), (l, l+4), (l, l+2), (l, l+1)."""
    half = _LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


def _in_lanes(x: Float32) -> Float32:
    """[..., D] as [..., steps, 16], zero padded."""
    padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // _LANES) * _LANES), np.float32)
    padded[..., : x.shape[-1]] = x
    return padded.reshape(*x.shape[:-1], -1, _LANES)


def _sum(x: Float32) -> Float32:
    steps = _in_lanes(x)
    lanes = np.zeros_like(steps[..., 0, :])
    for step in range(steps.shape[-2]):
        lanes = lanes + steps[..., step, :]
    return tree_sum(lanes)


def exp(x: Float32) -> Any:
    """exp by x = n ln2 + r and a Taylor series of degree 7."""
    f = np.float32
    with np.errstate(all="ignore"):
        x = np.where(f(-104) > x, f(-104), x)
        x = np.where(f(89) < x, f(89), x)
        magic = f(12582912)
        shifted = fma(x, f(1.44269504), magic)
        n = shifted - magic
        r = fma(n, f(-1.42860677e-6), fma(n, f(-0.693145752), x))
        p = np.full_like(r, f(1.98412698e-4))
        for c in (1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0):
            p = fma(p, r, f(c))
        whole = shifted.view(np.int32) - magic.view(np.int32)
        half = whole >> 1
        p = p * ((half + 127) << 23).view(np.float32)
        return p * ((whole - half + 127) << 23).view(np.float32)


def silu(x: Float32) -> Any:
    """x / (1 + exp(-x))."""
    with np.errstate(all="ignore"):
        return x / (np.float32(1) + exp(np.float32(0) - x))


def embedding(ids: Int32, table: _core.Matrix | npt.NDArray[Any]) -> Float32:
    """See `headrace.ops.embedding`."""
    if isinstance(table, _core.Matrix):
        return _values(table)[ids]
    return quant.widen(table[ids])


def rms_norm(x: Float32, weight: Float32, eps: float) -> Any:
    """See `headrace.ops.rms_norm`."""
    steps = _in_lanes(x)
    lanes = np.zeros_like(steps[:, 0, :])
    for step in range(steps.shape[1]):
        lanes = fma(steps[:, step], steps[:, step], lanes)
    mean = tree_sum(lanes) / np.float32(x.shape[1])
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return (x * inverse[:, None]) * weight


def add(x: Float32, y: Float32) -> Float32:
    """See `headrace.ops.add`."""
    return x + y


def clamp(x: Float32, limit: float) -> Float32:
    """See `headrace.ops.clamp`."""
    high = np.float32(limit)
    x = np.where(-high > x, -high, x)
    return np.where(high < x, high, x)


def quantise_rows(x: Float32, group: int) -> tuple[npt.NDArray[np.int8], Float32]:
    """Int8 codes [T, Kp] and scales [T, Kp/group] of activations."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % group)))
    groups = padded.reshape(x.shape[0], -1, group)
    amax = np.abs(groups).max(axis=2)
    is_zero = amax < _LEAST_AMAX
    safe = np.where(is_zero, np.float32(1), amax)
    scales = np.where(is_zero, np.float32(0), amax / np.float32(127))
    inverse = np.where(is_zero, np.float32(0), np.float32(127) / safe)
    codes = np.rint(groups * inverse[:, :, None]).astype(np.int8)
    return codes.reshape(padded.shape), scales


def _values(w: _core.Matrix) -> Float32:
    return quant.unpack(w.data, w.format, w.rows, w.cols, w.group)


def linear(x: Float32, w: _core.Matrix) -> Float32:
    """See `headrace.ops.linear`."""
    acc = np.zeros((x.shape[0], w.rows), np.float32)
    if w.format in quant.FLOATING or w.format == "f8":
        values = _values(w)
        for k in range(w.cols):
            acc = fma(values[None, :, k], x[:, k, None], acc)
        return acc
    if not np.isfinite(x).all():
        raise NumericError("linear: NaN or infinity in the input")
    matrix = quant.codes(w.data, w.format, w.rows, w.cols, w.group)
    codes, scales = quantise_rows(x, w.group)
    for g in range(scales.shape[1]):
        here = slice(g * w.group, (g + 1) * w.group)
        dot = codes[:, here].astype(np.int32) @ matrix.codes[:, here].astype(np.int32).T
        scale = scales[:, g, None] * matrix.scales[None, :, g]
        acc = fma(dot.astype(np.float32), scale, acc)
        if matrix.minimums is not None:
            total = codes[:, here].astype(np.int32).sum(axis=1)[:, None]
            minimum = scales[:, g, None] * matrix.minimums[None, :, g]
            acc = fma(total.astype(np.float32), minimum, acc)
    return acc


def linears(x: Float32, matrices: Sequence[_core.Matrix]) -> tuple[Float32, ...]:
    """See `headrace.ops.linears`."""
    return tuple(linear(x, w) for w in matrices)


def norm_linears(
    x: Float32, weight: Float32, eps: float, matrices: Sequence[_core.Matrix]
) -> tuple[Float32, ...]:
    """See `headrace.ops.norm_linears`."""
    return linears(rms_norm(x, weight, eps), matrices)


def linear_add(x: Float32, w: _core.Matrix, y: Float32) -> Float32:
    """See `headrace.ops.linear_add`."""
    return y + linear(x, w)


def sin_cos(x: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """sin and cos in double precision: pi/2 taken off in three parts, then Taylor series."""
    quadrant = np.rint(x * 0.63661977236758134308)
    r = (x - quadrant * float.fromhex("0x1.921fb54p+0")) - quadrant * float.fromhex(
        "0x1.10b461p-30"
    )
    r = r - quadrant * float.fromhex("0x1.a62633145c06ep-58")
    z = r * r
    s = np.full_like(r, -1.0 / 1307674368000.0)
    for term in (6227020800.0, -39916800.0, 362880.0, -5040.0, 120.0, -6.0):
        s = s * z + 1.0 / term
    sine = r + r * z * s
    c = np.full_like(r, 1.0 / 20922789888000.0)
    for term in (-87178291200.0, 479001600.0, -3628800.0, 40320.0, -720.0, 24.0, -2.0):
        c = c * z + 1.0 / term
    cosine = 1.0 + z * c
    turn = quadrant.astype(np.int64) & 3
    sin = np.choose(turn, [sine, cosine, -sine, -cosine])
    cos = np.choose(turn, [cosine, -sine, -cosine, sine])
    return sin, cos


def rope_angles(
    positions: Int32, inv_freq: Float32, factor: float = 1.0
) -> tuple[Float32, Float32]:
    """See `headrace.ops.rope_angles`."""
    angles = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    sin, cos = sin_cos(angles.astype(np.float64))
    scale = np.float32(factor)
    return cos.astype(np.float32) * scale, sin.astype(np.float32) * scale


def rope(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """See `headrace.ops.rope`."""
    half = cos.shape[1]
    a, b = x[:, :, :half], x[:, :, half : 2 * half]
    c, s = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[:, :, :half] = fma(np.float32(0) - b, s, a * c)
    out[:, :, half : 2 * half] = fma(a, s, b * c)
    return out


_KV_GROUP = 32  # items that share a scale in q8


def _kept(x: Float32, dtype: str) -> Float32:
    """The values that a pool of `dtype` keeps of x [..., items]."""
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return quant.bf16_to_float(quant.float_to_bf16(x))
    if dtype == "q8":
        return _kept_in_q8(x)
    return x


def _kept_in_q8(x: Float32) -> Float32:
    """code * scale; the scale is the least float16 that is not below the group's max|x| / 127."""
    items = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -items % _KV_GROUP)])
    groups = padded.reshape(*x.shape[:-1], -1, _KV_GROUP)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    exact = amax / np.float32(127)
    with np.errstate(all="ignore"):
        half = exact.astype(np.float16)
        up = np.where(half.astype(np.float32) < exact, np.nextafter(half, np.float16(np.inf)), half)
        scale = np.minimum(up, np.float16(65504)).astype(np.float32)
        scale = np.where(np.isfinite(amax), scale, np.float32(np.nan))
        codes = np.rint(np.clip(groups / scale, -127, 127)) + np.float32(0)  # integers have no -0
        kept = np.where(scale == 0, np.float32(0), codes * scale)
    return kept.astype(np.float32).reshape(padded.shape)[..., :items]


class KVPool:
    """The reference's keys and values: [layer, page, kv_head, page_tokens, head_dim], as kept."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_tokens: int = 64,
        dtype: str = "f16",
    ) -> None:
        shape = (num_layers, num_pages, num_kv_heads, page_tokens, head_dim)
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)
        self.head_dim = head_dim
        self.page_tokens = page_tokens
        self.dtype = dtype


def kv_write(pool: KVPool, layer: int, k: Float32, v: Float32, rows: StepRowsLike) -> None:
    """See `headrace.ops.kv_write`."""
    for t, (position, sequence) in enumerate(zip(rows.positions, rows.sequences, strict=True)):
        page = rows.page_table[sequence, position // pool.page_tokens]
        slot = position % pool.page_tokens
        pool.keys[layer, page, :, slot] = _kept(k[t], pool.dtype)
        pool.values[layer, page, :, slot] = _kept(v[t], pool.dtype)


def paged_attention(
    q: Float32,
    pool: KVPool,
    layer: int,
    rows: StepRowsLike,
    scale: float,
    *,
    window: int | None = None,
    sinks: Float32 | None = None,
) -> Float32:
    """See `headrace.ops.paged_attention`."""
    tokens, heads, head_dim = q.shape
    out = np.zeros((tokens, heads, head_dim), np.float32)
    share = heads // pool.keys.shape[2]
    for t in range(tokens):
        for h in range(heads):
            state: tuple[Any, Any, Any] | None = None
            for page, slots in _seen(rows, t, pool.page_tokens, window):
                keys = pool.keys[layer, page, h // share, slots]
                values = pool.values[layer, page, h // share, slots]
                state = _merge(state, _one_page(q[t, h], keys, values, scale, slots.start))
            out[t, h] = _finish(state, None if sinks is None else sinks[h])
    return out.reshape(tokens, heads * head_dim)


class LatentPool:
    """The reference's latents: [layer, page, page_tokens, latent_dim + rope_dim], as kept."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        latent_dim: int,
        rope_dim: int,
        page_tokens: int = 64,
        dtype: str = "f16",
    ) -> None:
        shape = (num_layers, num_pages, page_tokens, latent_dim + rope_dim)
        self.latents = np.zeros(shape, np.float32)
        self.latent_dim = latent_dim
        self.page_tokens = page_tokens
        self.dtype = dtype


def latent_write(pool: LatentPool, layer: int, latents: Float32, rows: StepRowsLike) -> None:
    """See `headrace.ops.latent_write`."""
    for t, (position, sequence) in enumerate(zip(rows.positions, rows.sequences, strict=True)):
        page = rows.page_table[sequence, position // pool.page_tokens]
        pool.latents[layer, page, position % pool.page_tokens] = _kept(latents[t], pool.dtype)


def latent_attention(
    q: Float32,
    pool: LatentPool,
    layer: int,
    rows: StepRowsLike,
    scale: float,
    *,
    window: int | None = None,
    sinks: Float32 | None = None,
) -> Float32:
    """See `headrace.ops.latent_attention`."""
    tokens, heads, _ = q.shape
    out = np.zeros((tokens, heads, pool.latent_dim), np.float32)
    for t in range(tokens):
        for h in range(heads):
            state: tuple[Any, Any, Any] | None = None
            for page, slots in _seen(rows, t, pool.page_tokens, window):
                keys = pool.latents[layer, page, slots]
                values = keys[:, : pool.latent_dim]
                state = _merge(state, _one_page(q[t, h], keys, values, scale, slots.start))
            out[t, h] = _finish(state, None if sinks is None else sinks[h])
    return out


def _seen(
    rows: StepRowsLike, t: int, page_tokens: int, window: int | None
) -> Iterator[tuple[int, slice]]:
    """The pages that row t sees, ascending, and which of their tokens."""
    end = int(rows.positions[t]) + 1
    begin = 0 if window is None else max(0, end - window)
    for p in range(begin // page_tokens, -(-end // page_tokens)):
        before = p * page_tokens
        slots = slice(max(begin - before, 0), min(end - before, page_tokens))
        yield int(rows.page_table[rows.sequences[t], p]), slots


def _finish(state: tuple[Any, Any, Any] | None, sink: Any) -> Any:
    assert state is not None, "a row sees at least itself"
    if sink is None:
        return state[2] / state[1]
    maximum = max(state[0], sink)
    keep, take = exp(np.array([state[0] - maximum, sink - maximum], np.float32))
    return (state[2] * keep) / fma(state[1], keep, take)


def _one_page(
    q: Float32, keys: Float32, values: Float32, scale: float, first: int
) -> tuple[Any, Any, Any]:
    """Maximum, sum and unnormalised output of one page, whose first seen token is `first`.

    The sum's lanes go by the token's place in the page.
    """
    scores = np.zeros(keys.shape[0], np.float32)
    for d in range(q.shape[0]):
        scores = fma(q[d], keys[:, d], scores)
    scores = scores * np.float32(scale)
    maximum = scores.max()
    e = exp(scores - maximum)
    out = np.zeros(values.shape[1], np.float32)
    for key in range(keys.shape[0]):
        out = fma(e[key], values[key], out)
    return maximum, _sum(np.pad(e, (first, 0))), out


def _merge(state: tuple[Any, Any, Any] | None, page: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    if state is None:
        return page
    maximum = max(state[0], page[0])
    keep, take = exp(np.array([state[0] - maximum, page[0] - maximum], np.float32))
    total = fma(state[1], keep, page[1] * take)
    return maximum, total, fma(state[2], keep, page[2] * take)


def rotary_attention(
    q: Float32,
    k: Float32,
    v: Float32,
    angles: tuple[Float32, Float32],
    pool: KVPool,
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
    """See `headrace.ops.rotary_attention`."""

    def turned(x: Float32, weight: Float32 | None) -> Float32:
        heads = x.reshape(-1, pool.head_dim)
        if weight is not None:
            heads = rms_norm(heads, weight, eps)
        return rope(heads.reshape(x.shape[0], -1, pool.head_dim), *angles)

    kv_write(pool, layer, turned(k, k_norm), v.reshape(v.shape[0], -1, pool.head_dim), rows)
    return paged_attention(turned(q, q_norm), pool, layer, rows, scale, window=window, sinks=sinks)


def router_topk(
    x: Float32, weight: _core.Matrix, *, top_k: int, renormalize: bool
) -> tuple[Int32, Float32]:
    """See `headrace.ops.router_topk`."""
    logits = linear(x, weight)
    if not np.isfinite(logits).all():
        raise NumericError("router_topk: NaN or infinity in the router logits")
    e = exp(logits - logits.max(axis=1, keepdims=True))
    p = e / _sum(e)[:, None]
    ids = np.argsort(-p, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    weights = np.take_along_axis(p, ids, axis=1)
    if renormalize:
        total = np.zeros(x.shape[0], np.float32)
        for a in range(top_k):
            total = total + weights[:, a]
        weights = weights / total[:, None]
    return ids, weights


def swiglu_ffn(x: Float32, gate: _core.Matrix, up: _core.Matrix, down: _core.Matrix) -> Float32:
    """See `headrace.ops.swiglu_ffn`."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


@dataclass(frozen=True)
class Experts:
    """What the reference sees of a lease: the matrices gate, up and down of every expert by id."""

    matrices: Mapping[int, tuple[_core.Matrix, _core.Matrix, _core.Matrix]]


def moe_ffn(x: Float32, ids: Int32, weights: Float32, lease: Experts) -> Float32:
    """See `headrace.ops.moe_ffn`."""
    out = np.zeros_like(x)
    for t in range(x.shape[0]):
        for a in np.argsort(ids[t], kind="stable"):
            gate, up, down = lease.matrices[int(ids[t, a])]
            y = swiglu_ffn(x[t : t + 1], gate, up, down)[0]
            out[t] = fma(weights[t, a], y, out[t])
    return out


def routed_ffn(
    x: Float32, router: _core.Matrix, experts: Experts, *, top_k: int, renormalize: bool
) -> Float32:
    """See `headrace.ops.routed_ffn`; of one layer, whose experts are given."""
    ids, weights = router_topk(x, router, top_k=top_k, renormalize=renormalize)
    return moe_ffn(x, ids, weights, experts)


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of the SplitMix64 finaliser."""
    bits = _mix((_mix(seed) + position * 0xD1342543DE82EF95) & ((1 << 64) - 1))
    return float((bits >> 11) * 2.0**-53)


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
    """See `headrace.ops.sample`."""
    if np.isnan(logits).any() or (logits == np.inf).any() or (logits == -np.inf).all():
        raise NumericError("sample: NaN or infinity in the logits")
    if temperature == 0:
        return int(logits.argmax())
    p = exp((logits - logits.max()) / np.float32(temperature))
    kept = np.arange(logits.shape[0])
    if 0 < top_k < kept.shape[0]:
        kept = np.sort(np.argsort(-p, kind="stable")[:top_k])
    if min_p > 0:
        kept = kept[p[kept] >= np.float32(min_p)]
    weight = (p.astype(np.float64) * 2.0**40).astype(np.int64)
    if top_p < 1:
        descending = kept[np.argsort(-p[kept], kind="stable")]
        sums = np.cumsum(weight[descending])
        wanted = np.ceil(float(np.float32(top_p)) * float(sums[-1]))
        kept = np.sort(descending[: np.flatnonzero(sums >= wanted)[0] + 1])
    kept = kept[weight[kept] > 0]
    sums = np.cumsum(weight[kept])
    beyond = np.flatnonzero(sums > int(uniform(seed, position) * float(sums[-1])))
    return int(kept[beyond[0]] if beyond.size else kept[-1])


def log(x: npt.NDArray[np.float64]) -> Any:
    """Logarithm of positive normal doubles: 2 atanh((m - 1) / (m + 1)) + e ln2."""
    m, exponent = np.frexp(x)
    is_low = m < 0.70710678118654752440
    m = np.where(is_low, m * 2, m)
    exponent = np.where(is_low, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = np.full_like(z, 1.0 / 23.0)
    for n in range(21, 0, -2):
        series = series * z + 1.0 / n
    return 2.0 * s * series + exponent * 0.69314718055994530942


def log_softmax(logits: Float32) -> Any:
    """See `headrace.ops.log_softmax`."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = log(_sum(exp(shifted)).astype(np.float64)).astype(np.float32)
    return shifted - total[:, None]


def apply_penalties(
    logits: Float32,
    ids: Int32,
    counts: Int32,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Float32:
    """See `headrace.ops.apply_penalties`."""
    out = logits.copy()
    seen = out[ids]
    seen = np.where(seen > 0, seen / np.float32(repetition), seen * np.float32(repetition))
    generated = seen - np.float32(frequency) * counts.astype(np.float32)
    generated = generated - np.float32(presence)
    out[ids] = np.where(counts > 0, generated, seen)
    return out
