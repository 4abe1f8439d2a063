"""What a step knows about its rows, and the tensors that outlive a step: the KV pages.

Owns: `StepRows`, and how a KV pool is made. The books of the pages (who owns which, sharing,
reference counts) are the engine's; the arithmetic over them is `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace._core import KVPool
from headrace.arrays import Int32
from headrace.config import KV_DTYPES
from headrace.errors import ConfigError, ShapeError

__all__ = ["PAGE_TOKENS", "KVPool", "StepRows", "kv_vector_bytes", "make_kv_pool"]

PAGE_TOKENS = 64
KV_GROUP = 32  # items that share an f16 scale in q8
_ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "q8": 1}


@dataclass(frozen=True)
class StepRows:
    """Where each row of a step stands: its position, its sequence, that sequence's pages.

    Row t is token `positions[t]` of its sequence. Its key and value live in page
    `page_table[sequences[t], positions[t] // page_tokens]`, and it attends to positions
    0..positions[t] of the same sequence. Entries of the table past a sequence's last page are not
    read; fill them with 0.

    Attributes:
        positions: [T] int32.
        sequences: [T] int32, rows of `page_table`.
        page_table: [B, P] int32, page numbers in ascending position.
        is_decoding: every row is a generated token's; none belongs to a prompt.
    """

    positions: Int32
    sequences: Int32
    page_table: Int32
    is_decoding: bool = False

    def __post_init__(self) -> None:
        for name, rank in (("positions", 1), ("sequences", 1), ("page_table", 2)):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != rank or not array.flags.c_contiguous:
                raise ShapeError(
                    f"step rows: `{name}` must be a contiguous int32 array of rank {rank}\n"
                    f"got dtype {array.dtype}, shape {array.shape}"
                )
        if self.positions.shape != self.sequences.shape:
            raise ShapeError(
                "step rows: `positions` and `sequences` differ in length\n"
                f"got {self.positions.shape[0]} and {self.sequences.shape[0]}"
            )

    @classmethod
    def for_sequence(cls, start: int, num_tokens: int, pages: Sequence[int]) -> StepRows:
        """Rows start..start + num_tokens - 1 of one sequence that owns `pages`, in order."""
        return cls(
            positions=np.arange(start, start + num_tokens, dtype=np.int32),
            sequences=np.zeros(num_tokens, dtype=np.int32),
            page_table=np.array([list(pages)], dtype=np.int32),
        )


def kv_vector_bytes(num_items: int, dtype: str) -> int:
    """Bytes that a pool of `dtype` takes for one vector: a token's key, value or latent.

    Args:
        num_items: Dh of a kv head, or the latent's and the rope key's dims together.
        dtype: one of `KV_DTYPES`.
    """
    scales = -(-num_items // KV_GROUP) * 2 if dtype == "q8" else 0
    return num_items * _ITEM_BYTES[dtype] + scales


def make_kv_pool(
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "f16",
    page_tokens: int = PAGE_TOKENS,
) -> KVPool:
    """Reserve the keys and values of `num_pages` pages in every layer.

    The memory is touched only when a page is first written.

    Args:
        num_layers: L, layers that keep keys and values.
        num_pages: pages shared by all sequences; one page holds `page_tokens` tokens of all layers.
        num_kv_heads: K.
        head_dim: Dh.
        dtype: how keys and values are stored: `f16`, `bf16`, `f32`, or `q8`, int8 codes with an
            f16 scale per 32 dims.
        page_tokens: tokens in a page.

    Raises:
        ConfigError: the dtype is unknown, or a count is below 1.
    """
    if dtype not in KV_DTYPES:
        raise ConfigError(f"unknown KV dtype {dtype!r}\nexpected one of {', '.join(KV_DTYPES)}")
    counts = {
        "num_layers": num_layers,
        "num_pages": num_pages,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_tokens": page_tokens,
    }
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"KV pool: `{name}` must be at least 1, got {count}")
    return KVPool(num_layers, num_pages, num_kv_heads, head_dim, page_tokens, dtype)
