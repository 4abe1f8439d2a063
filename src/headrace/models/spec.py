"""`ModelSpec`: what a model is, in numbers, read once from a checkpoint's own config."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError, UnsupportedModelError
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
        windows: of each layer how many of the last tokens it sees, the query's own included, or
            None for all; empty where all layers see all.
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
    windows: tuple[int | None, ...] = ()

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

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees at most; None for all."""
        return self.windows[layer] if self.windows else None

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token's keys and values take over all layers."""
        vectors = 2 * self.num_key_value_heads * self.num_hidden_layers
        return vectors * kv_vector_bytes(self.head_dim, dtype)


def read_common(fields: ConfigFields, windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    """Take what the families share, and refuse what none of them supports here.

    The caller adds the FFN's fields with `dataclasses.replace`.

    Args:
        fields: the config.
        windows: from `read_windows`; None for a family without windows.

    Raises:
        ConfigError: a field is missing or out of range.
        UnsupportedModelError: a bias, another activation, a window where the family has none.
    """
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("qkv_bias", False)
    fields.require("mlp_bias", False)
    fields.require("rope_interleaved", False)
    if windows is None:
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
        windows=windows or (),
        eos_token_ids=fields.integers("eos_token_id", default=()),
    )


def read_windows(
    fields: ConfigFields, *, by_default: bool, first: int = 0, by_layer: bool = False
) -> tuple[int | None, ...]:
    """Which layers see a window of the last tokens only: `ModelSpec.windows`.

    Args:
        fields: the config.
        by_default: whether `sliding_window` counts where `use_sliding_window` is absent.
        first: the first layer with a window where `layer_types` does not say.
        by_layer: the family goes by `layer_types`; otherwise it may only repeat what `first` says.

    Raises:
        ConfigError: a field is out of range.
        UnsupportedModelError: `layer_types` asks for something else.
    """
    full, sliding = "full_attention", "sliding_attention"
    num_layers = fields.integer("num_hidden_layers")
    window = fields.value("sliding_window", default=None)
    if not fields.boolean("use_sliding_window", default=by_default):
        window = None
    if window is None:
        fields.require("layer_types", None, [full] * num_layers)
        return ()
    window = fields.integer("sliding_window")
    kinds = [full if layer < first else sliding for layer in range(num_layers)]
    if by_layer:
        kinds = fields.value("layer_types", default=kinds)
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or any(kind not in (full, sliding) for kind in kinds)
        ):
            raise UnsupportedModelError(
                f"config.json: `layer_types: {kinds!r}` is not supported\n"
                f"expected {full!r} or {sliding!r} for each of {num_layers} layers"
            )
    else:
        fields.require("layer_types", None, kinds)
    if sliding not in kinds or window >= fields.integer("max_position_embeddings"):
        return ()
    return tuple(window if kind == sliding else None for kind in kinds)


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
