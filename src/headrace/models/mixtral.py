"""Mixtral (`mixtral`): 8x7B and 8x22B.

Plain grouped-query attention; every layer is a mixture of 8 wide experts, 2 for each token, whose
weights are always divided by their sum. Few, large records.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.models import names
from headrace.models.blocks import Attention, MoE
from headrace.models.decoder import Decoder, LayerBlocks
from headrace.models.fields import ConfigFields
from headrace.models.spec import ModelSpec, read_common, read_windows


class Mixtral(Decoder):
    """A Mixtral model."""

    names = names.MIXTRAL

    @classmethod
    def read_spec(cls, fields: ConfigFields) -> ModelSpec:
        """Read the mixture's fields; `intermediate_size` is the width of an expert."""
        spec = read_common(fields, read_windows(fields, by_default=True))
        return replace(
            spec,
            num_experts=fields.integer("num_local_experts", "num_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            moe_intermediate_size=fields.integer("intermediate_size"),
            norm_topk_prob=True,
            moe_layers=tuple(range(spec.num_hidden_layers)),
        )

    @classmethod
    def blocks(cls, spec: ModelSpec, layer: int) -> LayerBlocks:
        """Plain attention, a mixture in every layer."""
        return Attention, MoE
