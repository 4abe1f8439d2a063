"""Paged attention: the reference's bits, whatever the batch, chunk, pages and machine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ops
from headrace.errors import ShapeError
from headrace.ops import reference

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


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_tokens"), [
    (4, 4, 16, 64),
    (6, 2, 24, 16),
    (2, 1, 136, 80),
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
        ops.KVPool(1, 1, 1, 16, 64, "q8")
