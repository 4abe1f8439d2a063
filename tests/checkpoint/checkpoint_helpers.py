"""Tiny Hugging Face checkpoints, written by hand so that every byte is the test's own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUMPY_TO_NAME = {"<u2": "BF16", "<f2": "F16", "<f4": "F32", "|u1": "U8"}
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Names:
    pattern: str = "model.layers.{layer}.mlp.experts.{expert}.{proj}.weight"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


NAMES = Names()
TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def header_of(tensors: Tensors) -> dict[str, Any]:
    header: dict[str, Any] = {}
    at = 0
    for name, array in tensors.items():
        dtype = NUMPY_TO_NAME[array.dtype.str]
        end = at + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    return header


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    write_raw(path, header_of(tensors), b"".join(a.tobytes() for a in tensors.values()))


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    experts: int = 4
    hidden: int = 64
    inner: int = 48
    vocab: int = 40
    mtp: int = 0
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": self.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 128,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
        }
        if self.mtp:
            config["num_nextn_predict_layers"] = self.mtp
        return config


def random_tensors(shape: Shape, seed: int = 0, dtype: str = "bf16") -> Tensors:
    rng = np.random.default_rng(seed)

    def draw(*size: int) -> np.ndarray:
        values = rng.standard_normal(size).astype(np.float32) * 0.1
        return (
            to_bf16(values)
            if dtype == "bf16"
            else values.astype({"f16": "<f2", "f32": "<f4"}[dtype])
        )

    d, f = shape.hidden, shape.inner
    tensors = {"model.embed_tokens.weight": draw(shape.vocab, d), "model.norm.weight": draw(d)}
    if not shape.tied:
        tensors["lm_head.weight"] = draw(shape.vocab, d)
    for layer in range(shape.layers + shape.mtp):
        p = f"model.layers.{layer}."
        tensors[p + "self_attn.q_proj.weight"] = draw(64, d)
        tensors[p + "self_attn.k_proj.weight"] = draw(32, d)
        tensors[p + "self_attn.v_proj.weight"] = draw(32, d)
        tensors[p + "self_attn.o_proj.weight"] = draw(d, 64)
        tensors[p + "self_attn.q_norm.weight"] = draw(16)
        tensors[p + "self_attn.k_norm.weight"] = draw(16)
        tensors[p + "input_layernorm.weight"] = draw(d)
        tensors[p + "post_attention_layernorm.weight"] = draw(d)
        tensors[p + "mlp.gate.weight"] = draw(shape.experts, d)
        for expert in range(shape.experts):
            e = f"{p}mlp.experts.{expert}."
            tensors[e + "gate_proj.weight"] = draw(f, d)
            tensors[e + "up_proj.weight"] = draw(f, d)
            tensors[e + "down_proj.weight"] = draw(d, f)
        if layer >= shape.layers:
            tensors[p + "eh_proj.weight"] = draw(d, 2 * d)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                tensors[p + name + ".weight"] = draw(d)
    return tensors


def write_checkpoint(
    path: Path, shape: Shape = Shape(), seed: int = 0, dtype: str = "bf16", shards: int = 1
) -> Tensors:
    """Write a checkpoint directory; several shards get an index."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(shape, seed, dtype)
    (path / "config.json").write_text(json.dumps(shape.config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    # Sorted by name as text, so that experts do not lie in the order of their ids.
    names = sorted(tensors)
    if shards == 1:
        write_safetensors(path / "model.safetensors", {n: tensors[n] for n in names})
        return tensors
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(path / file, {n: tensors[n] for n in part})
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors
