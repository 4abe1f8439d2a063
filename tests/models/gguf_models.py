"""Tiny random models as GGUF files: each architecture in each tensor type, blocks of any codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_gguf import fixture_metadata, pack_file

from headrace.checkpoint.gguf_blocks import QUANTISED
from headrace.checkpoint.gguf_header import BLOCK_TYPES
from headrace.checkpoint.gguf_names import ARCHITECTURES, EXPERT_ROLES

HIDDEN, INNER, VOCAB, LAYERS, EXPERTS = 256, 256, 120, 2, 4
"""The least of which a row is a whole block of every type."""
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
# Where the float16 factors of a block lie, and what makes values of a sensible size.
FACTORS: Mapping[str, Mapping[int, float]] = {
    "Q4_0": {0: 0.02},
    "Q4_1": {0: 0.02, 2: -0.15},
    "Q5_0": {0: 0.01},
    "Q5_1": {0: 0.01, 2: -0.15},
    "Q8_0": {0: 0.001},
    "Q2_K": {80: 0.008, 82: 0.01},
    "Q3_K": {108: 0.002},
    "Q4_K": {0: 0.0005, 2: 0.004},
    "Q5_K": {0: 0.00025, 2: 0.004},
    "Q6_K": {208: 0.00006},
    "IQ4_NL": {0: 0.0012},
    "IQ4_XS": {0: 0.00006},
    "MXFP4": {},
}
Tensor = tuple[str, Sequence[int], bytes]


def random_blocks(random: np.random.Generator, type: str, shape: Sequence[int]) -> Tensor:
    """A tensor of random codes, scaled so that its values are about 0.1."""
    count = int(np.prod(shape))
    if type not in QUANTISED:
        values = random.normal(size=count).astype(np.float32) * np.float32(0.1)
        if type == "BF16":
            return type, shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        return type, shape, values.astype("<f2" if type == "F16" else "<f4").tobytes()
    block = {t.name: t for t in BLOCK_TYPES.values()}[type]
    raw = random.integers(0, 256, (count // block.block, block.nbytes), np.uint8)
    for at, size in FACTORS[type].items():
        factors = size * random.uniform(0.5, 1.5, len(raw))
        raw[:, at : at + 2] = factors.astype("<f2").view(np.uint8).reshape(-1, 2)
    if type == "IQ4_XS":  # some scale has the largest multiple, -32, as encoders have it
        raw[:, 2] &= 0b11111100
        raw[:, 4] &= 0b11110000
    if type == "MXFP4":
        raw[:, 0] = random.integers(121, 124, len(raw))
    return type, shape, raw.tobytes()


def model_metadata(model_type: str) -> dict[str, Any]:
    """What a file says of the tiny model of an architecture."""
    architecture = ARCHITECTURES[model_type]
    kv_heads = HEADS if model_type == "olmoe" else KV_HEADS
    own: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture.has_experts:
        own |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if model_type == "qwen3_moe":
        own["expert_feed_forward_length"] = INNER
    text = {k: v for k, v in fixture_metadata(VOCAB).items() if k.startswith("tokenizer.")}
    return {
        "general.architecture": architecture.name,
        **{f"{architecture.name}.{key}": value for key, value in own.items()},
        **text,
    }


def model_tensors(
    model_type: str, dense: str, experts: Mapping[tuple[int, str], str] | str, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of a tiny model.

    Args:
        model_type: a key of `ARCHITECTURES`.
        dense: type of dense matrices.
        experts: type of the experts, or one for each layer and role.
        seed: of the weights.
    """
    random = np.random.default_rng(seed)
    kv = (HEADS if model_type == "olmoe" else KV_HEADS) * HEAD_DIM
    norm_width = {"olmoe": (HEADS * HEAD_DIM, kv)}.get(model_type, (HEAD_DIM, HEAD_DIM))
    shapes: dict[str, Sequence[int]] = {
        "attn_norm.weight": [HIDDEN],
        "ffn_norm.weight": [HIDDEN],
        "attn_q.weight": [HEADS * HEAD_DIM, HIDDEN],
        "attn_k.weight": [kv, HIDDEN],
        "attn_v.weight": [kv, HIDDEN],
        "attn_output.weight": [HIDDEN, HEADS * HEAD_DIM],
        "attn_q_norm.weight": [norm_width[0]],
        "attn_k_norm.weight": [norm_width[1]],
        "ffn_gate_inp.weight": [EXPERTS, HIDDEN],
        "ffn_gate.weight": [INNER, HIDDEN],
        "ffn_up.weight": [INNER, HIDDEN],
        "ffn_down.weight": [HIDDEN, INNER],
    }
    tensors = {
        "token_embd.weight": random_blocks(random, dense, [VOCAB, HIDDEN]),
        "output_norm.weight": _norm(random, [HIDDEN]),
        "output.weight": random_blocks(random, dense, [VOCAB, HIDDEN]),
    }
    architecture = ARCHITECTURES[model_type]
    for layer in range(LAYERS):
        for name in architecture.layer.values():
            shape = shapes[name]
            if name == "ffn_gate_inp.weight":
                tensor = random_blocks(random, "F32", shape)
            elif len(shape) == 1:
                tensor = _norm(random, shape)
            else:
                tensor = random_blocks(random, dense, shape)
            tensors[f"blk.{layer}.{name}"] = tensor
        for role, name in EXPERT_ROLES.items() if architecture.has_experts else ():
            type = experts if isinstance(experts, str) else experts[layer, role]
            shape = [EXPERTS, *(shapes["ffn_down.weight" if role == "down" else "ffn_up.weight"])]
            tensors[f"blk.{layer}.{name}"] = random_blocks(random, type, shape)
    return tensors


def _norm(random: np.random.Generator, shape: Sequence[int]) -> Tensor:
    return "F32", shape, random.uniform(0.5, 1.5, shape).astype("<f4").tobytes()


def write_model(
    path: Path,
    model_type: str,
    dense: str = "F32",
    experts: Mapping[tuple[int, str], str] | str = "F32",
) -> Path:
    """Write a tiny model as one file."""
    path.write_bytes(
        pack_file(model_metadata(model_type), model_tensors(model_type, dense, experts))
    )
    return path


def write_split_model(folder: Path, model_type: str, type: str, count: int = 3) -> Path:
    """Write a tiny model as several files; return the first."""
    tensors = list(model_tensors(model_type, type, type).items())
    for number in range(count):
        metadata = model_metadata(model_type) if number == 0 else {}
        metadata |= {
            "split.no": number,
            "split.count": count,
            "split.tensors.count": len(tensors),
        }
        part = dict(tensors[number::count])
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(pack_file(metadata, part))
    return folder / f"tiny-00001-of-{count:05}.gguf"


MIXTURES = {
    "what Q4_K_M is": ("Q4_K Q4_K Q6_K", "Q4_K Q4_K Q4_K"),
    "super-blocks": ("Q2_K Q3_K Q5_K", "Q6_K Q4_K Q2_K"),
    "blocks": ("Q4_0 Q8_0 MXFP4", "Q8_0 MXFP4 Q4_0"),
    "types of one format": ("Q5_0 IQ4_NL IQ4_XS", "Q5_0 Q5_0 IQ4_NL"),
    "values and codes": ("F16 Q8_0 BF16", "Q6_K F32 Q4_0"),
}
"""Types of gate, up and down of the first and of the second layer."""


def mixed_types(case: str) -> dict[tuple[int, str], str]:
    """Types by layer and role, as `model_tensors` takes them."""
    layers = [line.split() for line in MIXTURES[case]]
    return {(n, role): layers[n][i] for n in (0, 1) for i, role in enumerate(EXPERT_ROLES)}
