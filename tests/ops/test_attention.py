"""Paged and latent attention: the reference's bits, whatever the batch, chunk and machine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ops
from headrace.config import KV_DTYPES
from headrace.errors import ShapeError
from headrace.ops import reference
from headrace.state import kv_vector_bytes

from .conftest import assert_same_bits

Everywhere = Callable[[Callable[[], Any]], list[Any]]


@dataclass(frozen=True)
class Rows:
    positions: np.ndarray
    sequences: np.ndarray
    page_table: np.ndarray

    def cut(self, begin: int, end: int) -> "Rows":
        return Rows(self.positions[begin:end], self.sequences[begin:end], self.page_table)


def one_sequence(length: int, pages: list[int]) -> Rows:
    return Rows(
        np.arange(length, dtype=np.int32),
        np.zeros(length, np.int32),
        np.array([pages], np.int32),
    )


def qkv(rng: np.random.Generator, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    return (
        rng.standard_normal((tokens, heads, head_dim)).astype(np.float32),
        rng.standard_normal((tokens, kv_heads, head_dim)).astype(np.float32),
        rng.standard_normal((tokens, kv_heads, head_dim)).astype(np.float32),
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_tokens"), [
    (4, 4, 16, 64),
    (6, 2, 24, 16),
    (2, 1, 136, 80),
    (8, 1, 64, 32),  # a whole block of queries
])  # fmt: skip
def test_equals_reference(
    everywhere: Everywhere,
    rng: np.random.Generator,
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
) -> None:
    tokens = page_tokens + 37
    q, k, v = qkv(rng, tokens, heads, kv_heads, head_dim)
    rows = one_sequence(tokens, [3, 0, 4, 2][: -(-tokens // page_tokens)])
    oracle = reference.KVPool(2, 5, kv_heads, head_dim, page_tokens, dtype)
    reference.kv_write(oracle, 1, k, v, rows)
    last = rows.cut(tokens - 3, tokens)
    expected = reference.paged_attention(q[-3:], oracle, 1, last, head_dim**-0.5)

    def run() -> Any:
        pool = ops.KVPool(2, 5, kv_heads, head_dim, page_tokens, dtype)
        ops.kv_write(pool, 1, k, v, rows)
        return ops.paged_attention(q[-3:], pool, 1, last, head_dim**-0.5)

    for got in everywhere(run):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("half", [4, 12])
def test_rotary_equals_reference(
    everywhere: Everywhere, rng: np.random.Generator, with_norms: bool, half: int
) -> None:
    q, k, v = (x.reshape(45, -1) for x in qkv(rng, 45, 6, 2, 24))
    rows = one_sequence(45, [2, 0, 1])
    angles = reference.rope_angles(rows.positions, (0.3 ** np.arange(half)).astype(np.float32))
    options: Any = {"window": 20, "sinks": rng.standard_normal(6).astype(np.float32)}
    if with_norms:
        options["eps"] = 1e-6
        for name in ("q_norm", "k_norm"):
            options[name] = rng.standard_normal(24).astype(np.float32)
    oracle = reference.KVPool(2, 3, 2, 24, 16, "f16")
    expected = reference.rotary_attention(q, k, v, angles, oracle, 1, rows, 0.2, **options)

    def run() -> Any:
        pool = ops.KVPool(2, 3, 2, 24, 16, "f16")
        return ops.rotary_attention(q, k, v, angles, pool, 1, rows, 0.2, **options)

    for got in everywhere(run):
        assert_same_bits(got, expected)


def test_rotary_errors(rng: np.random.Generator) -> None:
    q, k, v = (x.reshape(5, -1) for x in qkv(rng, 5, 6, 2, 24))
    rows = one_sequence(5, [0])
    angles = (np.ones((5, 12), np.float32), np.ones((5, 12), np.float32))
    wide = (np.ones((5, 13), np.float32), np.ones((5, 13), np.float32))
    pool = ops.KVPool(1, 1, 2, 24, 16, "f16")
    norm = np.ones(23, np.float32)
    with pytest.raises(ShapeError, match="q of width 120 for 2 kv heads of 24"):
        ops.rotary_attention(q[:, :120].copy(), k, v, angles, pool, 0, rows, 0.2)
    with pytest.raises(ShapeError, match="`v`"):
        ops.rotary_attention(q, k, v[:4], angles, pool, 0, rows, 0.2)
    with pytest.raises(ShapeError, match="26 rotary dims in heads of 24"):
        ops.rotary_attention(q, k, v, wide, pool, 0, rows, 0.2)
    with pytest.raises(ShapeError, match="k_norm"):
        ops.rotary_attention(q, k, v, angles, pool, 0, rows, 0.2, k_norm=norm)
    with pytest.raises(ShapeError, match="layer 1 of 1"):
        ops.rotary_attention(q, k, v, angles, pool, 1, rows, 0.2)


def test_near_exact_attention(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, 150, 6, 2, 24)
    pool = ops.KVPool(1, 3, 2, 24, 64, "f32")
    rows = one_sequence(150, [2, 0, 1])
    ops.kv_write(pool, 0, k, v, rows)
    got = ops.paged_attention(q, pool, 0, rows, 24**-0.5).reshape(150, 6, 24)
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, 3, 1)).astype(np.float64) * 24**-0.5
    scores = np.where(np.tril(np.ones((150, 150), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    exact = np.einsum("hts,shd->thd", p, np.repeat(v, 3, 1))
    np.testing.assert_allclose(got, exact, atol=3e-6, rtol=1e-5)


def test_chunking_and_batching_change_nothing(
    everywhere: Everywhere, rng: np.random.Generator
) -> None:
    lengths = [70, 1, 131]
    tables = [[5, 1, 9], [0, 0, 0], [2, 8, 3]]
    data = [qkv(rng, n, 4, 2, 32) for n in lengths]

    def alone(chunk: int) -> list[Any]:
        results = []
        for n, pages, (q, k, v) in zip(lengths, tables, data, strict=True):
            pool = ops.KVPool(1, 10, 2, 32, 64, "f16")
            rows = one_sequence(n, pages)
            parts = []
            for begin in range(0, n, chunk):
                part = rows.cut(begin, begin + chunk)
                ops.kv_write(pool, 0, k[begin : begin + chunk], v[begin : begin + chunk], part)
                parts.append(ops.paged_attention(q[begin : begin + chunk], pool, 0, part, 0.17))
            results.append(np.concatenate(parts))
        return results

    def together() -> list[Any]:
        pool = ops.KVPool(1, 10, 2, 32, 64, "f16")
        order = rng.permutation(
            [(s, t) for s, n in enumerate(lengths) for t in range(n)]
        )  # rows of different sequences mixed
        rows = Rows(
            np.array([t for _, t in order], np.int32),
            np.array([s for s, _ in order], np.int32),
            np.array(tables, np.int32),
        )
        q, k, v = (np.stack([data[s][i][t] for s, t in order]) for i in range(3))
        ops.kv_write(pool, 0, k, v, rows)
        mixed = ops.paged_attention(q, pool, 0, rows, 0.17)
        results = [np.empty((n, 4 * 32), np.float32) for n in lengths]
        for row, (s, t) in zip(mixed, order, strict=True):
            results[s][t] = row
        return results

    expected = alone(1)
    for got in everywhere(lambda: [alone(200), alone(17), together()]):
        for variant in got:
            for a, b in zip(variant, expected, strict=True):
                assert_same_bits(a, b)


def test_stale_and_unused_places_do_not_show(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, 64, 2, 1, 16)
    clean = ops.KVPool(1, 1, 1, 16, 64, "f32")
    dirty = ops.KVPool(1, 1, 1, 16, 64, "f32")
    everything = one_sequence(64, [0])
    ops.kv_write(dirty, 0, np.full_like(k, np.nan), np.full_like(v, np.nan), everything)
    used = everything.cut(0, 21)
    for pool in (clean, dirty):
        ops.kv_write(pool, 0, k[:21], v[:21], used)
    got = [ops.paged_attention(q[:21], pool, 0, used, 0.25) for pool in (clean, dirty)]
    assert np.isfinite(got[1]).all()
    assert_same_bits(got[1], got[0])


def test_pool_costs_nothing_until_touched(rng: np.random.Generator) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident memory is read from /proc")

    def resident_kib() -> int:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmRSS"].split()[0])

    before = resident_kib()
    pool = ops.KVPool(4, 4000, 4, 128)
    assert pool.page_bytes == 4 * 2 * 4 * 128 * 64 * 2
    assert pool.nbytes == 4000 * pool.page_bytes > 2**30
    _, k, v = qkv(rng, 1, 4, 4, 128)
    ops.kv_write(pool, 0, k, v, one_sequence(1, [3999]))
    assert resident_kib() - before < 8 * 1024


@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("num_pages", [5, 16, 37])
def test_pages_do_not_overlap(rng: np.random.Generator, dtype: str, num_pages: int) -> None:
    # A sequence on each page, of one token: attention to it gives its value and nothing else.
    pool = ops.KVPool(3, num_pages, 2, 32, page_tokens=16, dtype=dtype)
    table = rng.permutation(num_pages).astype(np.int32)[:, None]
    rows = Rows(np.zeros(num_pages, np.int32), np.arange(num_pages, dtype=np.int32), table)
    q, _, _ = qkv(rng, num_pages, 2, 2, 32)
    codes = rng.integers(-126, 127, (3, num_pages, 2, 32))
    codes[..., 0] = 127  # so that the scale of q8 is 1
    values = codes.astype(np.float32)
    for layer in range(3):
        ops.kv_write(pool, layer, values[layer], values[layer], rows)
    for layer in range(3):
        expected = values[layer].reshape(num_pages, -1)
        assert_same_bits(ops.paged_attention(q, pool, layer, rows, 1.0), expected)


def test_refused_arguments(rng: np.random.Generator) -> None:
    _, k, v = qkv(rng, 2, 4, 2, 16)
    pool = ops.KVPool(1, 2, 2, 16)
    rows = one_sequence(2, [1])
    with pytest.raises(ShapeError, match="layer 1 of 1"):
        ops.kv_write(pool, 1, k, v, rows)
    with pytest.raises(ShapeError, match="needs page 2 of 2"):
        ops.kv_write(pool, 0, k, v, one_sequence(2, [2]))
    with pytest.raises(ShapeError, match="beyond its 1 pages"):
        ops.kv_write(pool, 0, k[:1], v[:1], one_sequence(65, [1]).cut(64, 65))
    with pytest.raises(ShapeError, match="3 query heads for 2 kv heads"):
        ops.paged_attention(np.ones((2, 3, 16), np.float32), pool, 0, rows, 1.0)
    with pytest.raises(ShapeError, match="page_tokens"):
        ops.KVPool(1, 1, 1, 16, 65)
    with pytest.raises(ShapeError, match="dtype must be"):
        ops.KVPool(1, 1, 1, 16, 64, "q4")


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [1, 33, 70, 500])
def test_windows_and_sinks_equal_reference(
    everywhere: Everywhere, rng: np.random.Generator, dtype: str, window: int
) -> None:
    tokens, heads, kv_heads, head_dim, page_tokens = 100, 8, 2, 40, 32
    q, k, v = qkv(rng, tokens, heads, kv_heads, head_dim)
    sinks = rng.standard_normal(heads).astype(np.float32) * 3
    rows = one_sequence(tokens, [3, 0, 4, 2])
    oracle = reference.KVPool(1, 5, kv_heads, head_dim, page_tokens, dtype)
    reference.kv_write(oracle, 0, k, v, rows)
    seen = rows.cut(90, tokens)
    for sink in (sinks, None):
        expected = reference.paged_attention(
            q[90:], oracle, 0, seen, 0.2, window=window, sinks=sink
        )

        def run(sink: Any = sink) -> Any:
            pool = ops.KVPool(1, 5, kv_heads, head_dim, page_tokens, dtype)
            ops.kv_write(pool, 0, k, v, rows)
            return ops.paged_attention(q[90:], pool, 0, seen, 0.2, window=window, sinks=sink)

        for got in everywhere(run):
            assert_same_bits(got, expected)


def test_near_exact_windows_and_sinks(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, 150, 6, 2, 24)
    sinks = rng.standard_normal(6).astype(np.float32)
    pool = ops.KVPool(1, 3, 2, 24, 64, "f32")
    rows = one_sequence(150, [2, 0, 1])
    ops.kv_write(pool, 0, k, v, rows)
    got = ops.paged_attention(q, pool, 0, rows, 24**-0.5, window=20, sinks=sinks)
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, 3, 1)).astype(np.float64) * 24**-0.5
    age = np.arange(150)[:, None] - np.arange(150)[None, :]
    p = np.exp(np.where((age >= 0) & (age < 20), scores, -np.inf))
    p /= p.sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, None]
    exact = np.einsum("hts,shd->thd", p, np.repeat(v, 3, 1))
    np.testing.assert_allclose(got.reshape(150, 6, 24), exact, atol=3e-6, rtol=1e-5)


def test_pages_before_the_window_are_never_read(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, 100, 2, 1, 16)
    pool = ops.KVPool(1, 4, 1, 16, 32, "f32")
    rows = one_sequence(100, [0, 1, 2, 3])
    ops.kv_write(pool, 0, k, v, rows)
    gone = Rows(rows.positions, rows.sequences, np.array([[-1, 99, 2, 3]], np.int32))
    last = slice(95, 100)  # see 64..99 at most with a window of 32
    expected = ops.paged_attention(q[last], pool, 0, rows.cut(95, 100), 0.25, window=32)
    got = ops.paged_attention(q[last], pool, 0, gone.cut(95, 100), 0.25, window=32)
    assert_same_bits(got, expected)
    with pytest.raises(ShapeError, match="needs page 99"):
        ops.paged_attention(q[last], pool, 0, gone.cut(95, 100), 0.25, window=33)
    with pytest.raises(ShapeError, match="window must be at least 1"):
        ops.paged_attention(q[last], pool, 0, rows.cut(95, 100), 0.25, window=0)


def test_later_rows_of_a_block_do_not_show(
    everywhere: Everywhere, rng: np.random.Generator
) -> None:
    # Four heads per kv head: two rows share a block of eight queries, and the second sees a NaN.
    q, k, v = qkv(rng, 20, 4, 1, 32)
    v[11] = np.nan
    pool = ops.KVPool(1, 1, 1, 32, 32, "f16")
    rows = one_sequence(20, [0])
    ops.kv_write(pool, 0, k, v, rows)
    expected = ops.paged_attention(q[10:11], pool, 0, rows.cut(10, 11), 0.2)
    assert np.isfinite(expected).all()
    for got in everywhere(lambda: ops.paged_attention(q, pool, 0, rows, 0.2)):
        assert_same_bits(got[10:11], expected)


def test_long_context_is_split_without_a_trace(
    everywhere: Everywhere, rng: np.random.Generator
) -> None:
    # One row of one kv head: more threads than walks, and more pages than one round of parts holds.
    tokens = 32 * 1024
    _, k, v = qkv(rng, tokens, 1, 1, 16)
    wide_q = rng.standard_normal((2, 8, 16)).astype(np.float32)
    pages = rng.permutation(tokens // 16).astype(np.int32)
    rows = Rows(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32), pages[None])
    pool = ops.KVPool(1, tokens // 16, 1, 16, 16, "f16")
    ops.kv_write(pool, 0, k, v, rows)
    last = rows.cut(tokens - 2, tokens)
    results = everywhere(lambda: ops.paged_attention(wide_q, pool, 0, last, 0.25))
    for got in results:
        assert_same_bits(got, results[0])
    scores = np.einsum("hd,sd->hs", wide_q[1].astype(np.float64), k[:, 0].astype(np.float16)) * 0.25
    p = np.exp(scores - scores.max(-1, keepdims=True))
    exact = (p / p.sum(-1, keepdims=True)) @ v[:, 0].astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(results[0][1].reshape(8, 16), exact, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 64, 512])
@pytest.mark.parametrize("is_latent", [False, True])
def test_long_context_makes_no_buffer_of_its_length(num_rows: int, is_latent: bool) -> None:
    """All scores of 64 rows and 8 heads over 32,768 tokens would take 64 MiB."""
    tokens, heads, width = 32 * 1024, 8, 16
    pages = np.arange(tokens // 64, dtype=np.int32)
    rows = Rows(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32), pages[None])
    last = rows.cut(tokens - num_rows, tokens)
    q = np.ones((num_rows, heads, width), np.float32)
    kept = np.ones((tokens, width), np.float32)
    if is_latent:
        latents = ops.LatentPool(1, len(pages), width, 0)
        ops.latent_write(latents, 0, kept, rows)
    else:
        pool = ops.KVPool(1, len(pages), 1, width)
        ops.kv_write(pool, 0, kept[:, None], kept[:, None], rows)
    ops.pool_trim()
    held = ops.pool_bytes()
    if is_latent:
        out = ops.latent_attention(q, latents, 0, last, 0.25)
    else:
        out = ops.paged_attention(q, pool, 0, last, 0.25)
    assert ops.pool_bytes() - held - out.nbytes < 8 << 20
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def test_q8_error_is_bounded(rng: np.random.Generator) -> None:
    # Keys and values of very different sizes, some groups all zero.
    k = rng.standard_normal((64, 1, 96)).astype(np.float32)
    k *= np.exp(rng.uniform(-12, 8, (64, 1, 1))).astype(np.float32)
    k[5] = 0
    kept = reference._kept(k, "q8")
    groups = np.abs(k.reshape(64, -1, 32)).max(-1)
    bound = groups / 254 * (1 + 2**-10) + 2**-25
    assert (np.abs(kept - k).reshape(64, -1, 32).max(-1) <= bound).all()
    # One visible token: its softmax is 1, so attention returns the value as it was kept.
    pool = ops.KVPool(1, 64, 1, 96, 16, "q8")
    rows = Rows(
        np.zeros(64, np.int32),
        np.arange(64, dtype=np.int32),
        np.arange(64, dtype=np.int32)[:, None],
    )
    ops.kv_write(pool, 0, k, k, rows)
    np.testing.assert_array_equal(ops.paged_attention(k, pool, 0, rows, 0.0), kept.reshape(64, 96))
    # Scores move by at most |q|_1 * bound * scale, and so does the output, relative to the values.
    q, k, v = qkv(rng, 200, 8, 2, 64)
    outs = []
    for dtype in ("f32", "q8"):
        pool = ops.KVPool(1, 4, 2, 64, 64, dtype)
        rows = one_sequence(200, [0, 1, 2, 3])
        ops.kv_write(pool, 0, k, v, rows)
        outs.append(ops.paged_attention(q, pool, 0, rows, 64**-0.5))
    assert np.abs(outs[1] - outs[0]).max() < 0.02 * np.abs(v).max()


def test_q8_shows_what_is_not_a_number(rng: np.random.Generator) -> None:
    _, k, v = qkv(rng, 1, 1, 1, 64)
    for bad in (np.nan, np.inf):
        v[0, 0, 40] = bad
        pool = ops.KVPool(1, 1, 1, 64, 16, "q8")
        rows = one_sequence(1, [0])
        ops.kv_write(pool, 0, k, v, rows)
        out = ops.paged_attention(k, pool, 0, rows, 0.1)
        assert np.isnan(out[0, 32:]).all()
        assert np.isfinite(out[0, :32]).all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_pools_take_the_bytes_that_the_plan_counts(dtype: str, head_dim: int) -> None:
    pool = ops.KVPool(3, 2, 4, head_dim, 64, dtype)
    assert pool.page_bytes == 64 * 3 * 2 * 4 * kv_vector_bytes(head_dim, dtype)
    latents = ops.LatentPool(3, 2, head_dim, 16, 64, dtype)
    assert latents.page_bytes == 64 * 3 * kv_vector_bytes(head_dim + 16, dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8"])
@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim", "page_tokens"), [
    (4, 32, 16, 16),
    (20, 72, 8, 32),
    (40, 48, 0, 64),
])  # fmt: skip
def test_latents_equal_reference(
    everywhere: Everywhere,
    rng: np.random.Generator,
    dtype: str,
    heads: int,
    latent_dim: int,
    rope_dim: int,
    page_tokens: int,
) -> None:
    tokens = page_tokens + 13
    latents = rng.standard_normal((tokens, latent_dim + rope_dim)).astype(np.float32)
    q = rng.standard_normal((2, heads, latent_dim + rope_dim)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    rows = one_sequence(tokens, [2, 0])
    oracle = reference.LatentPool(2, 3, latent_dim, rope_dim, page_tokens, dtype)
    reference.latent_write(oracle, 1, latents, rows)
    last = rows.cut(tokens - 2, tokens)
    for more in ({}, {"window": 20, "sinks": sinks}):
        expected = reference.latent_attention(q, oracle, 1, last, 0.1, **more)

        def run(more: Any = more) -> Any:
            pool = ops.LatentPool(2, 3, latent_dim, rope_dim, page_tokens, dtype)
            ops.latent_write(pool, 1, latents, rows)
            return ops.latent_attention(q, pool, 1, last, 0.1, **more)

        for got in everywhere(run):
            assert_same_bits(got, expected)


def test_latents_are_attention_with_one_kv_head(
    everywhere: Everywhere, rng: np.random.Generator
) -> None:
    tokens, heads, latent_dim, rope_dim = 150, 12, 48, 16
    latents = rng.standard_normal((tokens, latent_dim + rope_dim)).astype(np.float32)
    q = rng.standard_normal((tokens, heads, latent_dim + rope_dim)).astype(np.float32)
    rows = one_sequence(tokens, [2, 0, 1])
    keys = ops.KVPool(1, 3, 1, latent_dim + rope_dim, 64, "f16")
    ops.kv_write(keys, 0, latents[:, None], latents[:, None], rows)
    whole = ops.paged_attention(q, keys, 0, rows, 0.1).reshape(q.shape)
    pool = ops.LatentPool(1, 3, latent_dim, rope_dim, 64, "f16")
    ops.latent_write(pool, 0, latents, rows)
    for got in everywhere(lambda: ops.latent_attention(q, pool, 0, rows, 0.1)):
        assert_same_bits(got, np.ascontiguousarray(whole[:, :, :latent_dim]))


def test_refused_latents(rng: np.random.Generator) -> None:
    pool = ops.LatentPool(1, 2, 32, 16)
    rows = one_sequence(1, [1])
    with pytest.raises(ShapeError, match="layer 1 of 1"):
        ops.latent_write(pool, 1, np.ones((1, 48), np.float32), rows)
    with pytest.raises(ShapeError, match="shape"):
        ops.latent_attention(np.ones((1, 2, 32), np.float32), pool, 0, rows, 1.0)
    with pytest.raises(ShapeError, match="out of range"):
        ops.LatentPool(1, 1, 1020, 8)
    with pytest.raises(ShapeError, match="dtype must be"):
        ops.LatentPool(1, 1, 32, 16, 64, "q4")
