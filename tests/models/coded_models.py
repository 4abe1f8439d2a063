"""Tiny random models of safetensors of which some matrices are in codes and the others plain."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors_files import Tensors, write_safetensors
from stored_codes import Make
from tiny_models import read_case_config

from headrace.checkpoint.records import EXPERT_ROLES
from headrace.models.registry import REGISTRY

HIDDEN, INNER, EXPERTS, LAYERS, VOCAB = 128, 192, 4, 2, 104
MIXTURES = ("qwen3_moe", "olmoe", "mixtral")
EXPERT_FORMATS = (
    "fp8", "fp8-e8m0", "nvfp4", "modelopt", "mxfp4", "packed-sym-32", "packed-sym-64",
    "packed-asym-32", "packed-asym-64", "awq-32", "awq-64", "gptq-32", "gptq-64", "gptq_v2",
)  # fmt: skip
Change = Callable[[Tensors, dict[str, str]], None]
"""Alters tensors and their dtypes before they are written."""


def tiny_config(model: str) -> dict[str, Any]:
    """The config of a tiny model of any architecture of the fixtures."""
    config = read_case_config(model, "default")
    config |= {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB, "eos_token_id": 1,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if model in MIXTURES:
        config["num_local_experts" if model == "mixtral" else "num_experts"] = EXPERTS
        config["num_experts_per_tok"] = 2
    if model == "qwen3":
        config["head_dim"] = 32
    if model == "llama":
        config["rope_scaling"] = None
    if model == "qwen3_moe":
        config |= {
            "moe_intermediate_size": INNER, "head_dim": 32, "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }  # fmt: skip
    return config


def expert_module(model: str, layer: int, expert: int, role: str) -> str:
    """The name of an expert's matrix, without its last part."""
    names = REGISTRY[model].names.experts
    assert names is not None
    proj = getattr(names, role)
    return names.pattern.format(layer=layer, expert=expert, proj=proj).removesuffix(".weight")


def write_coded_model(
    folder: Path,
    config: dict[str, Any],
    make: Make,
    is_coded: Callable[[str], bool],
    change: Change = lambda *_: None,
    shards: int = 1,
) -> dict[str, np.ndarray]:
    """Write a model with a tokenizer of one word.

    Args:
        folder: to write to.
        config: of the model, with its `quantization_config`.
        make: codes of a matrix.
        is_coded: whether a matrix is in codes, by its name without `.weight`; others are float32.
        change: what a test wants otherwise.
        shards: files to spread the tensors over, those of one matrix too.

    Returns:
        The real numbers of every matrix but embedding, head and routers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": tokenizer}))
    rng = np.random.default_rng(7)
    tensors: Tensors = {}
    dtypes: dict[str, str] = {}
    values: dict[str, np.ndarray] = {}
    for name, shape in _vectors_and_tables(config).items():
        tensors[name] = (0.1 * rng.standard_normal(shape)).astype(np.float32)
    for name, shape in _matrices(config).items():
        if not is_coded(name):
            tensors[name + ".weight"] = (0.1 * rng.standard_normal(shape)).astype(np.float32)
            values[name] = tensors[name + ".weight"]
            continue
        stored, types, values[name] = make(rng, *shape)
        tensors |= {f"{name}.{suffix}": array for suffix, array in stored.items()}
        dtypes |= {f"{name}.{suffix}": dtype for suffix, dtype in types.items()}
    change(tensors, dtypes)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtypes)
        return values
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in list(tensors)[i::shards]}
        write_safetensors(folder / file, part, dtypes)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return values


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _vectors_and_tables(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what is never in codes here."""
    model, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if model in ("qwen3_moe", "qwen3", "olmoe"):
            size = hidden if model == "olmoe" else _head_dim(config)
            for proj in "qk":
                shapes[f"{prefix}self_attn.{proj}_norm.weight"] = (size,)
        if model in MIXTURES:
            block = "block_sparse_moe" if model == "mixtral" else "mlp"
            experts = config.get("num_experts") or config["num_local_experts"]
            shapes[f"{prefix}{block}.gate.weight"] = (experts, hidden)
    return shapes


def _matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of attention and feed-forward, experts among them."""
    model, hidden = config["model_type"], config["hidden_size"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    q = config["num_attention_heads"] * _head_dim(config)
    kv = config["num_key_value_heads"] * _head_dim(config)
    shapes = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for proj, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}.items():
            shapes[f"{prefix}self_attn.{proj}_proj"] = shape
        shapes[f"{prefix}self_attn.o_proj"] = (hidden, q)
        mixture = model in MIXTURES
        experts = (config.get("num_experts") or config["num_local_experts"]) if mixture else 1
        for expert in range(experts):
            for role in EXPERT_ROLES:
                name = f"{prefix}mlp.{role}_proj"
                if mixture:
                    name = expert_module(model, layer, expert, role)
                shapes[name] = (hidden, inner) if role == "down" else (inner, hidden)
    return shapes
