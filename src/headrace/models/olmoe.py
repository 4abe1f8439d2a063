"""OLMoE (`olmoe`): OLMoE-1B-7B.

The projected query and key vectors are normed over their whole width, before the split into
heads; q, k and v may then be clamped (`clip_qkv`; null in the releases). Every layer is a
mixture. The weights of the chosen experts are used as softmax gives them: their sum stays below
1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace import ops
from headrace.arrays import Float32
from headrace.models import names
from headrace.models.blocks import Attention, MoE, Norm
from headrace.models.decoder import Decoder, LayerBlocks
from headrace.models.fields import ConfigFields
from headrace.models.spec import ModelSpec, read_common
from headrace.models.weights import Parameter, Weights


class WideNormAttention(Attention):
    """Attention whose q and k are normed over all heads together, then clamped if asked."""

    @staticmethod
    def parameters(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """The four projections and the two norms."""
        yield from Attention.parameters(spec, layer)
        yield Parameter("q_norm", (spec.num_attention_heads * spec.head_dim,), layer)
        yield Parameter("k_norm", (spec.num_key_value_heads * spec.head_dim,), layer)

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        super().__init__(spec, weights, layer)
        self.q_norm = Norm(spec, weights, "q_norm", layer)
        self.k_norm = Norm(spec, weights, "k_norm", layer)
        self.clip = spec.clip_qkv

    def before_rope(self, q: Float32, k: Float32, v: Float32) -> tuple[Float32, Float32, Float32]:
        """Norm q [T, H·Dh] and k [T, K·Dh] whole; clamp all three to ±clip."""
        q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is None:
            return q, k, v
        return ops.clamp(q, self.clip), ops.clamp(k, self.clip), ops.clamp(v, self.clip)


class Olmoe(Decoder):
    """An OLMoE model."""

    names = names.OLMOE

    @classmethod
    def read_spec(cls, fields: ConfigFields) -> ModelSpec:
        """Read the mixture's fields; `intermediate_size` is the width of an expert."""
        spec = read_common(fields)
        return replace(
            spec,
            num_experts=fields.integer("num_experts", "num_local_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            moe_intermediate_size=fields.integer("intermediate_size"),
            norm_topk_prob=fields.boolean("norm_topk_prob"),
            moe_layers=tuple(range(spec.num_hidden_layers)),
            clip_qkv=fields.number("clip_qkv") if fields.is_set("clip_qkv") else None,
        )

    @classmethod
    def blocks(cls, spec: ModelSpec, layer: int) -> LayerBlocks:
        """Attention with norms over the whole width, a mixture in every layer."""
        return WideNormAttention, MoE
