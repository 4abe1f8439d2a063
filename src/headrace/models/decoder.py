"""One step through a decoder: ids in, scores of the vocabulary out.

    ids [T] -> embedding -> L layers (attention, then FFN or mixture) -> norm -> head -> [R, V]

An architecture that has this structure says in its own file only which blocks its layers use and
how its config is read. One that differs in structure writes its own `__call__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, TypeAlias

import numpy as np

from headrace.arrays import Float32, Int32
from headrace.checkpoint import Checkpoint
from headrace.experts import ExpertStore
from headrace.models.blocks import (
    Attention,
    DenseFFN,
    Embedding,
    Head,
    MoE,
    PreNormLayer,
    Rotary,
)
from headrace.models.fields import ConfigFields
from headrace.models.names import NameTable
from headrace.models.spec import ModelSpec
from headrace.models.weights import Parameter, Weights
from headrace.state import KVPool, StepRows, make_kv_pool

LayerBlocks: TypeAlias = tuple[type[Attention], type[DenseFFN] | type[MoE]]


class Decoder(ABC):
    """A pre-norm decoder with its dense weights in memory."""

    names: ClassVar[NameTable]

    @classmethod
    @abstractmethod
    def read_spec(cls, fields: ConfigFields) -> ModelSpec:
        """Take this architecture's fields from a config."""

    @classmethod
    @abstractmethod
    def blocks(cls, spec: ModelSpec, layer: int) -> LayerBlocks:
        """The attention and the FFN of `layer`."""

    @classmethod
    def parameters(cls, spec: ModelSpec) -> Iterator[Parameter]:
        """Every dense tensor of the model, in the order of use."""
        yield from Embedding.parameters(spec)
        for layer in range(spec.num_hidden_layers):
            attention, ffn = cls.blocks(spec, layer)
            yield Parameter("input_norm", (spec.hidden_size,), layer)
            yield from attention.parameters(spec, layer)
            yield Parameter("post_attention_norm", (spec.hidden_size,), layer)
            yield from ffn.parameters(spec, layer)
        yield from Head.parameters(spec)

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        embedding_resident: bool = True,
        lock: bool = False,
    ) -> None:
        """Check the checkpoint's tensors, then load the dense ones; see `registry.build_model`."""
        weights = Weights(checkpoint, self.names, lock)
        weights.check(self.parameters(spec), spec)
        weights.read_ahead(self.parameters(spec), embedding_resident or spec.tie_word_embeddings)
        self.spec = spec
        self.embed = Embedding(spec, weights, embedding_resident)
        self.rotary = Rotary(spec)
        self.layers = [
            PreNormLayer(spec, weights, layer, *self.blocks(spec, layer))
            for layer in range(spec.num_hidden_layers)
        ]
        self.head = Head(spec, weights, self.embed)

    def __call__(
        self,
        ids: Int32,
        rows: StepRows,
        kv: KVPool,
        experts: ExpertStore | None,
        logits_rows: Int32,
    ) -> Float32:
        """Run one step: write the rows' keys and values, and score the rows asked for.

        Rows do not influence one another beyond attention within a sequence, so any batching and
        any chunking of a prompt gives the same bits.

        Args:
            ids: [T] int32, the token of each row.
            rows: where each row stands.
            kv: the pool that `rows` points into; this step's rows are written.
            experts: the store of routed experts; None in a dense model.
            logits_rows: [R] int32, rows whose scores are wanted; may be empty.

        Returns:
            [R, V] float32, scores before softmax.
        """
        x = self.embed(ids)  # [T, D]
        angles = self.rotary(rows.positions)  # cos and sin, [T, Dh / 2] each
        last = self.layers[-1]
        for layer, after in pairwise(self.layers):
            # The last layer computes the rows that are scored: what others would ask is no guide.
            is_like = after is not last or len(logits_rows) == len(ids)
            x = layer(x, angles, rows, kv, experts, after=after if is_like else None)  # [T, D]
        x = last(x, angles, rows, kv, experts, kept=logits_rows)  # [R, D]
        if not len(x):  # a chunk in the middle of a prompt
            return np.empty((0, self.spec.vocab_size), np.float32)
        return self.head(x)

    def make_state(self, num_pages: int, dtype: str) -> KVPool:
        """Reserve keys and values for `num_pages` pages; they can be rewound to any position."""
        spec = self.spec
        return make_kv_pool(
            spec.num_hidden_layers, num_pages, spec.num_key_value_heads, spec.head_dim, dtype
        )
