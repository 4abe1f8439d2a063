"""Writes small GGUF files: a fixture's weights under GGUF names, or whatever a test wants
broken."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import FIXTURES, read_case_config

from headrace.checkpoint import HuggingFaceCheckpoint
from headrace.checkpoint.base import to_float32
from headrace.checkpoint.gguf_header import BLOCK_TYPES
from headrace.checkpoint.values import read_range

ALIGNMENT = 32
TYPE_IDS = {type.name: id for id, type in BLOCK_TYPES.items()}


def pack_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def pack_value(value: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_string(value)
    items = [pack_value(item) for item in value]
    kind = items[0][:4]
    return (
        struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    )


def pack_file(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int], bytes]]
) -> bytes:
    """A GGUF file of tensors given as (type, shape outermost first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += pack_string(key) + pack_value(value)
    data = b""
    for name, (type, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % ALIGNMENT)
        head += pack_string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", TYPE_IDS[type], len(data))
        data += raw
    return head + b"\0" * (-len(head) % ALIGNMENT) + data


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }[name]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Half-split rope rows to neighbouring pairs, head by head, as the converter does."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def fixture_metadata(vocab_size: int = 120) -> dict[str, Any]:
    """Metadata of the llama fixture with linear rope, and a vocabulary of 120 tokens."""
    config = read_case_config("llama", "linear")
    letters = [chr(c) for c in range(0x21, 0x7F)]
    control = ["<unk>", "<s>", "</s>"]
    tokens = control + letters + ["ab", "abc"]
    tokens += [f"<extra{i}>" for i in range(vocab_size - len(tokens))]
    types = [3 if t.startswith("<") and len(t) > 1 else 1 for t in tokens]
    return {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": config["rope_scaling"]["factor"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def fixture_tensors(type: str) -> dict[str, tuple[str, Sequence[int], bytes]]:
    """The llama fixture's weights: matrices as `type` (F32 or BF16), vectors as F32."""
    config = read_case_config("llama", "linear")
    source = HuggingFaceCheckpoint(FIXTURES / "llama", None)
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = {}
    for name in source.tensors:
        entry = source.entry(name)
        raw = np.empty(entry.nbytes, np.uint8)
        read_range(entry.path, entry.offset, raw)
        bits = raw.view("<u2").reshape(entry.shape)
        if "q_proj" in name:
            bits = permute(bits, config["num_attention_heads"])
        if "k_proj" in name:
            bits = permute(bits, config["num_key_value_heads"])
        if type == "BF16" and len(entry.shape) == 2:
            tensors[gguf_name(name)] = ("BF16", entry.shape, bits.tobytes())
        else:
            values = to_float32(np.ascontiguousarray(bits).reshape(-1).view(np.uint8), "bf16")
            tensors[gguf_name(name)] = ("F32", entry.shape, values.tobytes())
    return tensors


def write_fixture(path: Path, type: str = "F32", **changes: Any) -> Path:
    """Write the llama fixture as a GGUF file; `changes` set metadata, None removes a key."""
    metadata = {**fixture_metadata(), **{k.replace("__", "."): v for k, v in changes.items()}}
    kept = {key: value for key, value in metadata.items() if value is not None}
    path.write_bytes(pack_file(kept, fixture_tensors(type)))
    return path
