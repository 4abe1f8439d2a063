"""Qwen3-MoE (`qwen3_moe`): Qwen3-30B-A3B, 235B-A22B, their 2507 versions, Qwen3-Coder.

Attention as in `qwen3`: a norm per query and key head before rope. Layers are mixtures except those
that the config lists as dense. The weights of the chosen experts are divided by their sum where
`norm_topk_prob` says so, which it does in every release. No shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.models import names
from headrace.models.blocks import DenseFFN, HeadNormAttention, MoE
from headrace.models.decoder import Decoder, LayerBlocks
from headrace.models.fields import ConfigFields
from headrace.models.spec import ModelSpec, read_common, read_windows


class Qwen3Moe(Decoder):
    """A Qwen3 model with experts."""

    names = names.QWEN3_MOE

    @classmethod
    def read_spec(cls, fields: ConfigFields) -> ModelSpec:
        """Read the mixture's fields and which layers are mixtures."""
        windows = read_windows(fields, by_default=False)
        spec = read_common(fields, windows)
        if windows:  # releases of transformers differ: all layers, or those from this one on
            fields.require("max_window_layers", 0)
        fields.value("max_window_layers", default=None)
        # Stated by the Coder releases only.
        fields.require("use_qk_norm", True)
        fields.require("shared_expert_intermediate_size", 0)
        step = fields.integer("decoder_sparse_step", default=1)
        dense = fields.integers("mlp_only_layers", default=())
        moe_layers = tuple(
            layer
            for layer in range(spec.num_hidden_layers)
            if layer not in dense and (layer + 1) % step == 0
        )
        return replace(
            spec,
            intermediate_size=fields.integer("intermediate_size"),
            num_experts=fields.integer("num_experts", "num_local_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            norm_topk_prob=fields.boolean("norm_topk_prob"),
            moe_layers=moe_layers,
        )

    @classmethod
    def blocks(cls, spec: ModelSpec, layer: int) -> LayerBlocks:
        """Attention with a norm per head; a mixture, or a dense FFN where the config says so."""
        return HeadNormAttention, MoE if layer in spec.moe_layers else DenseFFN
