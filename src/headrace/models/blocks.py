"""Blocks that several architectures share: the two ends, attention, the dense FFN, the mixture.

Each block states its parameters from the spec (so that they can be counted and checked before
loading) and computes on the rows of one step. Shapes use the letters of `ModelSpec`: T rows, D
hidden, H query heads, K key-value heads, Dh head dim, F expert width, E experts, A experts per
token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from headrace import ops
from headrace.arrays import Float32, Int32
from headrace.checkpoint import EmbeddingTable, Matrix
from headrace.experts import ExpertStore
from headrace.models.spec import ModelSpec
from headrace.models.weights import Parameter, Weights
from headrace.state import KVPool, StepRows

Following: TypeAlias = tuple[Float32, Float32, float, Matrix, int]
"""Hidden state, norm and router of the next layer: see `ops.routed_ffn`."""


class Embedding:
    """Token ids to vectors: ids [T] -> [T, D]."""

    @staticmethod
    def parameters(spec: ModelSpec) -> Iterator[Parameter]:
        """The embedding table."""
        yield Parameter("embed_tokens", (spec.vocab_size, spec.hidden_size))

    def __init__(self, spec: ModelSpec, weights: Weights, resident: bool = True) -> None:
        # A tied table is the head's matrix as well, and the head needs all of it for every token.
        self.tied: Matrix | None = None
        self.table: EmbeddingTable | None = None
        if spec.tie_word_embeddings:
            self.tied = weights.matrix("embed_tokens")
        else:
            self.table = weights.embedding("embed_tokens", resident)

    def __call__(self, ids: Int32) -> Float32:
        """Look up ids [T]."""
        if self.tied is not None:
            return ops.embedding(ids, self.tied)
        assert self.table is not None, "neither a tied nor an own table"
        return self.table(ids)


class Head:
    """The last norm and the vocabulary's scores: x [R, D] -> [R, V]."""

    @staticmethod
    def parameters(spec: ModelSpec) -> Iterator[Parameter]:
        """The norm, and the head's matrix unless it is the embedding table."""
        yield Parameter("norm", (spec.hidden_size,))
        if not spec.tie_word_embeddings:
            yield Parameter("lm_head", (spec.vocab_size, spec.hidden_size))

    def __init__(self, spec: ModelSpec, weights: Weights, embedding: Embedding) -> None:
        self.norm = Norm(spec, weights, "norm")
        self.matrix = weights.matrix("lm_head") if embedding.tied is None else embedding.tied

    def __call__(self, x: Float32) -> Float32:
        """Score x [R, D]."""
        (scores,) = ops.norm_linears(x, self.norm.weight, self.norm.eps, (self.matrix,))
        return scores


class Norm:
    """Root-mean-square norm over the last dimension, times a learned weight: x [T, D] -> [T, D]."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, role: str, layer: int | None = None
    ) -> None:
        self.weight = weights.vector(role, layer)
        self.eps = spec.rms_norm_eps

    def __call__(self, x: Float32) -> Float32:
        """Norm each row of x [T, D]."""
        return ops.rms_norm(x, self.weight, self.eps)


class Rotary:
    """The rotation of each position: positions [T] -> cos, sin [T, Dh / 2]."""

    def __init__(self, spec: ModelSpec) -> None:
        self.inv_freq = spec.rope.inv_freq(spec.head_dim)
        self.factor = spec.rope.attention_factor

    def __call__(self, positions: Int32) -> tuple[Float32, Float32]:
        """Angles of positions [T]."""
        return ops.rope_angles(positions, self.inv_freq, self.factor)


class Attention:
    """x + attention(norm(x)), causal and grouped-query, over paged keys and values: [T, D].

    Query head h reads key-value head h // (H / K). Rope turns the pair (i, i + Dh / 2) of each
    head.
    """

    @staticmethod
    def parameters(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """The four projections."""
        q_size = spec.num_attention_heads * spec.head_dim
        kv_size = spec.num_key_value_heads * spec.head_dim
        yield Parameter("q_proj", (q_size, spec.hidden_size), layer)
        yield Parameter("k_proj", (kv_size, spec.hidden_size), layer)
        yield Parameter("v_proj", (kv_size, spec.hidden_size), layer)
        yield Parameter("o_proj", (spec.hidden_size, q_size), layer)

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        self.layer = layer
        self.scale = spec.head_dim**-0.5
        self.window = spec.window(layer)
        self.qkv_proj = tuple(
            weights.matrix(role, layer) for role in ("q_proj", "k_proj", "v_proj")
        )
        self.o_proj = weights.matrix("o_proj", layer)

        self.input_norm = Norm(spec, weights, "input_norm", layer)
        # Weights [Dh] that norm each query and each key head by itself, where there are any.
        self.head_norms: tuple[Float32 | None, Float32 | None] = (None, None)

    def before_rope(self, q: Float32, k: Float32, v: Float32) -> tuple[Float32, Float32, Float32]:
        """What an architecture does to q [T, H·Dh], k and v [T, K·Dh] whole: here nothing."""
        return q, k, v

    def __call__(
        self, x: Float32, angles: tuple[Float32, Float32], rows: StepRows, kv: KVPool
    ) -> Float32:
        """Write the rows' keys and values, attend, and add the result to x [T, D]."""
        norm = self.input_norm
        q, k, v = self.before_rope(*ops.norm_linears(x, norm.weight, norm.eps, self.qkv_proj))
        q_norm, k_norm = self.head_norms
        out = ops.rotary_attention(
            q, k, v, angles, kv, self.layer, rows, self.scale,
            q_norm=q_norm, k_norm=k_norm, eps=norm.eps, window=self.window,
        )  # [T, H·Dh]  # fmt: skip
        return ops.linear_add(out, self.o_proj, x)


class HeadNormAttention(Attention):
    """Attention whose query and key heads are each normed with one weight of length Dh."""

    @staticmethod
    def parameters(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """The four projections and the two norms."""
        yield from Attention.parameters(spec, layer)
        yield Parameter("q_norm", (spec.head_dim,), layer)
        yield Parameter("k_norm", (spec.head_dim,), layer)

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        super().__init__(spec, weights, layer)
        self.head_norms = (weights.vector("q_norm", layer), weights.vector("k_norm", layer))


class DenseFFN:
    """down(silu(gate(x)) * up(x)), for every token: x [T, D] -> [T, D]."""

    @staticmethod
    def parameters(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """The three projections."""
        yield Parameter("gate_proj", (spec.intermediate_size, spec.hidden_size), layer)
        yield Parameter("up_proj", (spec.intermediate_size, spec.hidden_size), layer)
        yield Parameter("down_proj", (spec.hidden_size, spec.intermediate_size), layer)

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        self.gate_proj = weights.matrix("gate_proj", layer)
        self.up_proj = weights.matrix("up_proj", layer)
        self.down_proj = weights.matrix("down_proj", layer)

    def __call__(
        self, x: Float32, experts: ExpertStore | None, following: Following | None = None
    ) -> Float32:
        """Apply to x [T, D]; needs no experts."""
        return ops.swiglu_ffn(x, self.gate_proj, self.up_proj, self.down_proj)


class MoE:
    """A mixture of SwiGLU experts, A of E for each token: x [T, D] -> [T, D].

    Softmax over all experts, then the A largest; `norm_topk_prob` decides whether their weights are
    divided by their sum.
    """

    @staticmethod
    def parameters(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """The router; the experts are records, not dense tensors."""
        yield Parameter("router", (spec.num_experts, spec.hidden_size), layer)

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        self.layer = layer
        self.top_k = spec.num_experts_per_tok
        self.renormalize = spec.norm_topk_prob
        self.router = weights.router("router", layer)

    def __call__(
        self, x: Float32, experts: ExpertStore | None, following: Following | None = None
    ) -> Float32:
        """Route x [T, D] and add up the chosen experts, computed as their records arrive."""
        assert experts is not None, "a mixture was built without an expert store"
        return ops.routed_ffn(
            x, self.router, experts.source, self.layer,
            top_k=self.top_k, renormalize=self.renormalize, following=following,
        )  # fmt: skip


class PreNormLayer:
    """x += attention(norm(x)); x += ffn(norm(x)): x [T, D] -> [T, D]."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layer: int,
        attention: type[Attention],
        ffn: type[DenseFFN] | type[MoE],
    ) -> None:
        self.attention = attention(spec, weights, layer)
        self.post_attention_norm = Norm(spec, weights, "post_attention_norm", layer)
        self.ffn = ffn(spec, weights, layer)
        self.layer = layer
        self.router = self.ffn.router if isinstance(self.ffn, MoE) else None

    def __call__(
        self,
        x: Float32,
        angles: tuple[Float32, Float32],
        rows: StepRows,
        kv: KVPool,
        experts: ExpertStore | None,
        kept: Int32 | None = None,
        after: PreNormLayer | None = None,
    ) -> Float32:
        """Apply to x [T, D]. Where only some rows of the result are wanted, `kept` names them, and
        the FFN runs, and experts are read, for those alone. `after` is the layer whose experts may
        be guessed.
        """
        x = self.attention(x, angles, rows, kv)
        if kept is not None:
            x = x[kept]
        if not len(x):
            return x
        following = None if after is None else after.guessed_from(x)
        return ops.add(x, self.ffn(self.post_attention_norm(x), experts, following))

    def guessed_from(self, x: Float32) -> Following | None:
        """How to guess this layer's experts from an earlier hidden state x [T, D]."""
        if self.router is None:
            return None
        norm = self.post_attention_norm
        return x, norm.weight, norm.eps, self.router, self.layer
