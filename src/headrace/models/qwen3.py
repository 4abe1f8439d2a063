"""Qwen3 (`qwen3`): a dense decoder whose query and key heads are normed before rope.

The sizes 0.6B to 32B. `head_dim` is stated apart: heads times head dim need not be the hidden
size. No experts: all weights stay in memory.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.models import names
from headrace.models.blocks import DenseFFN, HeadNormAttention
from headrace.models.decoder import Decoder, LayerBlocks
from headrace.models.fields import ConfigFields
from headrace.models.spec import ModelSpec, read_common, read_windows


class Qwen3(Decoder):
    """A Qwen3 model without experts."""

    names = names.QWEN3

    @classmethod
    def read_spec(cls, fields: ConfigFields) -> ModelSpec:
        """Read the dense FFN's width beside the common fields."""
        # The number is the one that transformers takes where the config is silent.
        first = fields.integer("max_window_layers", default=28, least=0)
        windows = read_windows(fields, by_default=False, first=first, by_layer=True)
        spec = read_common(fields, windows)
        return replace(spec, intermediate_size=fields.integer("intermediate_size"))

    @classmethod
    def blocks(cls, spec: ModelSpec, layer: int) -> LayerBlocks:
        """Attention with a norm per head, dense FFN."""
        return HeadNormAttention, DenseFFN
