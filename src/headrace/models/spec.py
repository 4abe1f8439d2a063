"""`ModelSpec`: what a model is, in numbers, read once from a checkpoint's own config."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.models.fields import ConfigFields
from headrace.models.rope import Rope, read_rope
from headrace.state import kv_vector_bytes


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and switches of one model, named as in `config.json`.

    Attributes:
        intermediate_size: width of the dense FFN; 0 where every layer is a mixture.
        num_experts, num_experts_per_tok, moe_intermediate_size: E, A, F; 0 in a dense model.
        norm_topk_prob: divide the weights of the chosen experts by their sum.
        moe_layers: layers with routed experts, ascending.
        clip_qkv: bound on the values of q, k and v, or None.
        eos_token_ids: ids that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[int, ...] = ()
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`\n"
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"config.json: `head_dim` must be even, got {self.head_dim}")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                "config.json: `num_experts_per_tok` exceeds the number of experts\n"
                f"got {self.num_experts_per_tok} of {self.num_experts}"
            )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token's keys and values take over all layers."""
        vectors = 2 * self.num_key_value_heads * self.num_hidden_layers
        return vectors * kv_vector_bytes(self.head_dim, dtype)


def read_common(fields: ConfigFields) -> ModelSpec:
    """Take what the families share, and refuse what none of them supports here.

    The caller adds the FFN's fields with `dataclasses.replace`.

    Raises:
        ConfigError: a field is missing or out of range.
        UnsupportedModelError: a bias, another activation, a window.
    """
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("qkv_bias", False)
    fields.require("mlp_bias", False)
    fields.require("rope_interleaved", False)
    _require_full_attention(fields)
    hidden_size = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    if not fields.is_set("head_dim") and hidden_size % heads:
        raise ConfigError(
            "config.json: without `head_dim`, `hidden_size` must be a multiple of "
            f"`num_attention_heads`\ngot {hidden_size} and {heads}"
        )
    return ModelSpec(
        model_type=fields.value("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", default=hidden_size // heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        eos_token_ids=fields.integers("eos_token_id", default=()),
    )


def _require_full_attention(fields: ConfigFields) -> None:
    """Every layer sees every earlier token: a window counts only where it is switched on."""
    num_layers = fields.integer("num_hidden_layers")
    fields.require("layer_types", None, ["full_attention"] * num_layers)
    fields.value("max_window_layers", default=None)  # says where a window applies, if one does
    has_window = fields.is_set("sliding_window")
    switched_on = fields.boolean("use_sliding_window", default=has_window)
    if not has_window or not switched_on:
        fields.value("sliding_window", default=None)
    elif fields.integer("sliding_window") < fields.integer("max_position_embeddings"):
        fields.require("sliding_window", None)
