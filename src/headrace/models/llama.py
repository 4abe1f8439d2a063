"""Llama (`llama`): a dense decoder. Llama 2 and 3, SmolLM2, TinyLlama and their kin.

Grouped-query attention without biases or query norms, a SwiGLU FFN in every layer. No experts: all
weights stay in memory.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.models import names
from headrace.models.blocks import Attention, DenseFFN
from headrace.models.decoder import Decoder, LayerBlocks
from headrace.models.fields import ConfigFields
from headrace.models.spec import ModelSpec, read_common


class Llama(Decoder):
    """A Llama model."""

    names = names.LLAMA

    @classmethod
    def read_spec(cls, fields: ConfigFields) -> ModelSpec:
        """Read the dense FFN's width beside the common fields."""
        spec = read_common(fields)
        return replace(spec, intermediate_size=fields.integer("intermediate_size"))

    @classmethod
    def blocks(cls, spec: ModelSpec, layer: int) -> LayerBlocks:
        """Plain attention, dense FFN."""
        return Attention, DenseFFN
