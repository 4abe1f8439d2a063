"""The fields that published models state in `config.json`: all read, with the right totals."""

import json
import math

import pytest

from headrace.models.registry import REGISTRY, load_spec
from headrace.models.spec import ModelSpec

QWEN3_MOE = """
  "attention_dropout": 0.0, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "initializer_range": 0.02, "mlp_only_layers": [], "model_type": "qwen3_moe",
  "norm_topk_prob": true, "num_experts_per_tok": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936, "architectures": ["Qwen3MoeForCausalLM"]
"""
LLAMA = """
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama", "rms_norm_eps": 1e-05,
  "torch_dtype": "bfloat16", "use_cache": true
"""

# Text of the config, then billions of parameters as published.
RELEASES = {
    "Qwen3-30B-A3B": (
        f"""{{{QWEN3_MOE}, "attention_bias": false, "bos_token_id": 151643, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001}}""",
        30.5,
    ),
    "Qwen3-Coder-480B-A35B-Instruct": (
        f"""{{{QWEN3_MOE}, "hidden_size": 6144, "intermediate_size": 8192,
        "max_position_embeddings": 262144, "max_window_layers": 62, "moe_intermediate_size": 2560,
        "num_attention_heads": 96, "num_experts": 160, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "qkv_bias": false, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "use_qk_norm": true}}""",
        480.2,
    ),
    "OLMoE-1B-7B-0924": (
        """{"architectures": ["OlmoeForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "clip_qkv": null, "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": false, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 50304}""",
        6.9,
    ),
    "Mixtral-8x7B-v0.1": (
        """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}""",
        46.7,
    ),
    "Qwen3-14B": (
        """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 17408,
        "max_position_embeddings": 40960, "max_window_layers": 40, "model_type": "qwen3",
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
        14.8,
    ),
    "Meta-Llama-3-8B": (
        f"""{{{LLAMA}, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rope_scaling": null,
        "rope_theta": 500000.0, "tie_word_embeddings": false, "vocab_size": 128256}}""",
        8.03,
    ),
    "SmolLM2-135M-Instruct": (
        f"""{{{LLAMA}, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "hidden_size": 576,
        "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192,
        "mlp_bias": false, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pretraining_tp": 1, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
        "transformers.js_config": {{"kv_cache_dtype": {{"fp16": "float16"}}}},
        "vocab_size": 49152}}""",
        0.135,
    ),
}


def count_parameters(spec: ModelSpec) -> int:
    dense = sum(math.prod(p.shape) for p in REGISTRY[spec.model_type].parameters(spec))
    expert = 3 * spec.hidden_size * spec.moe_intermediate_size
    return dense + len(spec.moe_layers) * spec.num_experts * expert


@pytest.mark.parametrize("name", sorted(RELEASES))
def test_a_release_is_read_and_has_its_published_size(name: str) -> None:
    text, billions = RELEASES[name]
    total = count_parameters(load_spec(json.loads(text)))
    assert total / 1e9 == pytest.approx(billions, rel=5e-3)
