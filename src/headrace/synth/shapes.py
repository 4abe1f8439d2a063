"""The shapes of named models, as their own config files state them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class SynthShape:
    """A model's dimensions, in the words of its config."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    norm_topk_prob: bool

    def with_layers(self, num_layers: int | None) -> "SynthShape":
        """Return the shape with fewer layers; None keeps them all.

        Raises:
            ConfigError: more layers than the model has, or none.
        """
        if num_layers is None:
            return self
        if not 1 <= num_layers <= self.num_hidden_layers:
            raise ConfigError(
                f"number of layers is out of range\n"
                f"expected 1..{self.num_hidden_layers} for this shape, got {num_layers}"
            )
        return replace(self, num_hidden_layers=num_layers)

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of a model of this shape."""
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_attention_heads,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "bos_token_id": None,
            "eos_token_id": self.vocab_size - 1,
        }
        if self.model_type == "qwen3_moe":
            config |= {
                "attention_bias": False,
                "decoder_sparse_step": 1,
                "head_dim": self.head_dim,
                "intermediate_size": 8 * self.moe_intermediate_size,
                "mlp_only_layers": [],
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "num_experts": self.num_experts,
            }
        elif self.model_type == "olmoe":
            config |= {
                "attention_bias": False,
                "clip_qkv": None,
                "intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "num_experts": self.num_experts,
            }
        else:
            config |= {
                "intermediate_size": self.moe_intermediate_size,
                "num_local_experts": self.num_experts,
                "sliding_window": None,
            }
        return config


_ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}

SHAPES: Mapping[str, SynthShape] = {
    "qwen3-30b-a3b": SynthShape(
        model_type="qwen3_moe",
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        norm_topk_prob=True,
    ),
    "olmoe-7b": SynthShape(
        model_type="olmoe",
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        vocab_size=50304,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        norm_topk_prob=False,
    ),
    "mixtral-8x7b": SynthShape(
        model_type="mixtral",
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=14336,
        vocab_size=32000,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        norm_topk_prob=True,
    ),
}
_PLANNED = {"gpt-oss-120b": "gpt_oss", "glm-5.2": "glm_moe_dsa"}


def find_shape(name: str) -> SynthShape:
    """Return the shape of a named model.

    Raises:
        UnsupportedModelError: the model is known, but nothing here computes its architecture.
        ConfigError: the name is unknown.
    """
    if name in SHAPES:
        return SHAPES[name]
    known = ", ".join(SHAPES)
    if name in _PLANNED:
        raise UnsupportedModelError(
            f"no model here computes `{_PLANNED[name]}`, the architecture of {name}\n"
            f"hint: shapes that work today are {known}"
        )
    raise ConfigError(f"unknown shape: {name!r}\nexpected one of {known}")
