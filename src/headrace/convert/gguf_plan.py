"""What a GGUF file of a model will hold, worked out from headers before a byte of weights is read.

Formats are kept as the source holds them unless the caller asks for others. Floating weights may be
quantised or narrowed when asked; a quantised weight is copied code for code or widened to f32, and
never quantised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.arrays import Float32
from headrace.checkpoint import (
    Checkpoint,
    ContainerCheckpoint,
    GgufCheckpoint,
    open_checkpoint,
    read_config,
)
from headrace.checkpoint.gguf_blocks import TYPE_OF_FORMAT, block_values
from headrace.checkpoint.gguf_header import GgufTensor
from headrace.checkpoint.gguf_names import (
    ARCHITECTURES,
    EXPERT_ROLES,
    ROPE_FACTORS,
    GgufArchitecture,
)
from headrace.checkpoint.gguf_tokenizer import END_TOKENS, SPECIAL_TOKENS
from headrace.checkpoint.gguf_vocabulary import vocabulary_metadata
from headrace.checkpoint.gguf_writer import GgufLayout, GgufTensorPlan
from headrace.checkpoint.layout import FORMATS
from headrace.checkpoint.records import FLOAT_FORMATS
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.models.names import NameTable
from headrace.models.registry import REGISTRY, check_weights, dense_names, expert_names, load_spec
from headrace.models.rope import Rope
from headrace.models.spec import ModelSpec
from headrace.tokenizer import Tokenizer

_FLOATING = frozenset(FLOAT_FORMATS.values())
_QUANTIZATION_VERSION = 2
# `general.file_type`: what most of a file is, by the format of its largest part.
_UNSTATED = 1024
_FILE_TYPES = {"f32": 0, "f16": 1, "q4": 2, "q8": 7, "bf16": 32, "mxfp4": 38}


@dataclass(frozen=True)
class GgufRecipe:
    """How weights are stored in a GGUF file; None keeps the source's format."""

    experts: str | None = None
    dense: str | None = None

    def __post_init__(self) -> None:
        for field, value in (("experts", self.experts), ("dense", self.dense)):
            if value is not None and value not in FORMATS:
                raise ConfigError(
                    f"unknown value for {field}: {value!r}\nexpected one of {', '.join(FORMATS)}"
                )


@dataclass(frozen=True)
class DensePart:
    """A dense tensor on its way."""

    source_name: str
    tensor: GgufTensorPlan
    format: str
    """Of the values that are written."""
    num_heads: int = 0
    """Above 0: rows are reordered for paired rope, head by head."""


@dataclass(frozen=True)
class GgufPlan:
    """The source and the file that follows from it."""

    source: Checkpoint
    layout: GgufLayout
    dense: tuple[DensePart, ...]
    layers: tuple[int, ...]
    """Layers with experts; empty in a dense model."""
    expert_formats: Mapping[int, tuple[tuple[str, str], ...]]
    """By layer, format and tensor type of gate, up and down as they are written; of a GGUF source's
    experts, which are kept, empty."""
    copied: Mapping[str, GgufTensor]
    """Tensors of a GGUF source that are taken over block by block, by their name there."""
    rope_factors: Float32 | None
    num_tensors: int
    notes: tuple[str, ...]
    """What the file does not carry over."""


def make_gguf_plan(path: Path, recipe: GgufRecipe) -> GgufPlan:
    """Open the source, check it as a model, and lay the file out.

    Raises:
        CheckpointError: the source is damaged or incomplete; its tokenizer is part of it.
        UnsupportedModelError: llama.cpp does not compute such a model, its tokenizer has no name
            there, or a format cannot be had without quantising twice.
        ConfigError: the source's config holds a field that is not understood.
    """
    spec = load_spec(read_config(path), path)
    source = open_checkpoint(path, expert_names(spec))
    check_weights(spec, source)
    tokenizer = Tokenizer.of(source)
    _require_computable(spec, path)
    factors = _rope_factors(spec.rope, spec.head_dim)
    dense = tuple(_plan_dense(source, spec, recipe))
    expert_formats, experts = _plan_experts(source, recipe)
    tensors = _order([p.tensor for p in dense] + experts)
    if factors is not None:
        tensors.append(GgufTensorPlan(ROPE_FACTORS, "F32", factors.shape))
    largest = max(dense, key=lambda part: part.tensor.nbytes).format
    copied = {t.name: _original(source, t) for t in tensors}
    main_type = largest
    if source.records is not None:
        asked = None if isinstance(source, GgufCheckpoint) else recipe.experts
        main_type = asked or source.records.shape.gate.format
    notes: list[str] = []
    metadata = _metadata(spec, main_type, source.config.get("_name_or_path"))
    if isinstance(source, GgufCheckpoint) and "general.file_type" in source.header.metadata:
        metadata["general.file_type"] = source.header.metadata["general.file_type"]
    metadata |= _tokenizer_metadata(source, spec, tokenizer, notes)
    left_out = len(source.mtp_tensors)
    if left_out:
        notes.append(
            f"layers that predict further tokens are left out ({left_out} dense tensors and their "
            "experts): the format has no place for them in this architecture"
        )
    return GgufPlan(
        source=source,
        layout=GgufLayout(metadata, tensors),
        dense=dense,
        layers=source.records.layers if source.records is not None else (),
        expert_formats=expert_formats,
        copied={name: tensor for name, tensor in copied.items() if tensor is not None},
        rope_factors=factors,
        num_tensors=len(tensors),
        notes=tuple(notes),
    )


# Tensors


def _plan_dense(source: Checkpoint, spec: ModelSpec, recipe: GgufRecipe) -> Iterator[DensePart]:
    names, architecture = REGISTRY[spec.model_type].names, ARCHITECTURES[spec.model_type]
    for name in dense_names(spec):
        shape = source.info(name).shape
        if len(shape) == 1 or _is_router(name, names):
            format = "f32"
        elif name == names.name("embed_tokens") and not spec.tie_word_embeddings:
            # Rows are looked up, not multiplied: it stays floating, as in a container.
            asked = recipe.dense if recipe.dense in _FLOATING else None
            format = _choose(source, name, asked)
        else:
            format = _choose(source, name, recipe.dense)
        type_name = TYPE_OF_FORMAT.get(format, "F32")
        if format == source.info(name).format:
            type_name = _remembered(source, name) or type_name
        if isinstance(source, GgufCheckpoint) and format == source.info(name).format:
            type_name = source.source(name).type.name
        tensor = GgufTensorPlan(_gguf_name(architecture, name), type_name, shape)
        yield DensePart(name, tensor, format, _num_heads(name, spec, architecture))


def _remembered(source: Checkpoint, name: str) -> str | None:
    """The type that a container's dense matrix was made of, where its format does not tell."""
    return source.dense[name].type if isinstance(source, ContainerCheckpoint) else None


def _original(source: Checkpoint, tensor: GgufTensorPlan) -> GgufTensor | None:
    """The tensor of a GGUF source that holds the very blocks to write."""
    if not isinstance(source, GgufCheckpoint):
        return None
    found = source.header.tensors.get(tensor.name)
    same = found is not None and (found.type.name, found.shape) == (tensor.type, tensor.shape)
    return found if same else None


def _gguf_name(architecture: GgufArchitecture, name: str) -> str:
    found = architecture.gguf_name(name)
    assert found is not None, f"no GGUF name for {name}"
    return found


def _is_router(name: str, names: NameTable) -> bool:
    router = names.layer.get("router")
    return router is not None and name.endswith("." + router)


def _num_heads(name: str, spec: ModelSpec, architecture: GgufArchitecture) -> int:
    if not architecture.has_paired_rope:
        return 0
    if name.endswith("self_attn.q_proj.weight"):
        return spec.num_attention_heads
    return spec.num_key_value_heads if name.endswith("self_attn.k_proj.weight") else 0


def _choose(source: Checkpoint, name: str, asked: str | None) -> str:
    """The format of a dense matrix in the file."""
    info = source.info(name)
    is_fixed = isinstance(source, GgufCheckpoint) and source.is_quantised(name)
    type = _remembered(source, name)
    _require_possible(source, name, info.format, asked, info.shape[-1], is_fixed, type)
    return asked or info.format


def _plan_experts(
    source: Checkpoint, recipe: GgufRecipe
) -> tuple[dict[int, tuple[tuple[str, str], ...]], list[GgufTensorPlan]]:
    """The experts' formats in the file and their merged tensors; nothing in a dense model."""
    if source.records is None:
        if recipe.experts is not None:
            raise ConfigError(
                f"a format for experts does nothing: {source.path} is a dense model\n"
                "hint: give the format of everything else"
            )
        return {}, []
    if isinstance(source, GgufCheckpoint):
        if recipe.experts is not None:
            raise UnsupportedModelError(
                f"experts of a GGUF file keep their type: {source.path}\n"
                f"expected no format for experts, got {recipe.experts}\n"
                "hint: start from the original weights, or make a container of this file "
                "(`headrace convert FILE DEST --experts FORMAT`) and a GGUF file of that"
            )
        kept = source.header.tensors
        names = [f"blk.{n}.{name}" for n in source.records.layers for name in EXPERT_ROLES.values()]
        return {}, [GgufTensorPlan(n, kept[n].type.name, kept[n].shape) for n in names]
    formats, tensors = {}, []
    for layer, layout in zip(source.records.layers, source.records.layouts, strict=True):
        chosen = []
        for role, matrix in zip(EXPERT_ROLES, layout.matrices, strict=True):
            what, asked = f"{role} of the experts of layer {layer}", recipe.experts
            type = matrix.type if asked in (None, matrix.format) else None
            _require_possible(source, what, matrix.format, asked, matrix.cols, False, type)
            format = asked or matrix.format
            chosen.append((format, type or TYPE_OF_FORMAT[format]))
            shape = (source.records.num_experts, matrix.rows, matrix.cols)
            name = f"blk.{layer}.{EXPERT_ROLES[role]}"
            tensors.append(GgufTensorPlan(name, chosen[-1][1], shape))
        formats[layer] = tuple(chosen)
    return formats, tensors


def _require_possible(
    source: Checkpoint,
    name: str,
    stored: str,
    asked: str | None,
    cols: int,
    is_fixed: bool,
    type_name: str | None,
) -> None:
    """Refuse a format that these weights cannot have.

    Args:
        source: for messages.
        name: of the tensor, for messages.
        stored: format in the source.
        asked: format wanted, or None for the source's.
        cols: values of a row.
        is_fixed: the source's values come from codes that are not kept, so only f32 is exact.
        type_name: the tensor type that the codes came from, where `stored` does not tell.
    """
    is_kept = asked in (None, "f32", stored) and not (is_fixed and asked not in (None, "f32"))
    if not is_kept and (stored not in _FLOATING or is_fixed):
        held = "quantised" if is_fixed else stored
        raise UnsupportedModelError(
            f"{name} would have to be quantised a second time: {source.path}\n"
            f"expected {'f32' if is_fixed else f'{stored} or f32'} from a source that is {held}, "
            f"got {asked}\n"
            "hint: leave the option out to keep the codes, or start from the original weights"
        )
    format = asked or stored
    if is_fixed:  # the file's own blocks
        return
    type_name = type_name if format == stored else None
    if type_name is None and format not in TYPE_OF_FORMAT:
        raise UnsupportedModelError(
            f"no GGUF type holds {name} as it is stored, {format}: {source.path}\n"
            f"expected one of {', '.join(TYPE_OF_FORMAT)}\n"
            "hint: ask for f32, which is exact, or export from the source of this container"
        )
    least = block_values(format, type_name)
    if cols % least:
        raise UnsupportedModelError(
            f"{name} has rows of {cols} values: {source.path}\n"
            f"expected a multiple of {least} for {type_name or TYPE_OF_FORMAT[format]}\n"
            "hint: ask for f32, or for bf16 from floating weights"
        )


def _order(tensors: list[GgufTensorPlan]) -> list[GgufTensorPlan]:
    """By layer, each layer's tensors as they came; the embedding first, norm and head last."""

    def place(tensor: GgufTensorPlan) -> int:
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            return int(parts[1])
        return -1 if parts[0] == "token_embd" else 1 << 30

    return sorted(tensors, key=place)


# The model


def _require_computable(spec: ModelSpec, path: Path) -> None:
    """Refuse what llama.cpp computes otherwise in these architectures, whatever the file says."""
    all_layers = tuple(range(spec.num_hidden_layers))
    width = spec.num_attention_heads * spec.head_dim
    is_olmoe = spec.model_type == "olmoe"
    problems = {
        "dense layers between the mixtures": spec.num_experts and spec.moe_layers != all_layers,
        "experts' weights that are not divided by their sum": (
            spec.num_experts and not is_olmoe and not spec.norm_topk_prob
        ),
        "experts' weights divided by their sum": is_olmoe and spec.norm_topk_prob,
        "`clip_qkv`": spec.clip_qkv is not None,
        "sliding windows": bool(spec.windows),
        "an embedding tied to the head": is_olmoe and spec.tie_word_embeddings,
        "grouped keys and values": (
            is_olmoe and spec.num_key_value_heads != spec.num_attention_heads
        ),
        "heads wider than the hidden state": is_olmoe and width != spec.hidden_size,
        "llama3 rope": (
            spec.rope.kind == "llama3" and not ARCHITECTURES[spec.model_type].has_paired_rope
        ),
        "yarn rope with its own factors": spec.rope.kind == "yarn" and not _is_plain(spec.rope),
    }
    for what, is_so in problems.items():
        if is_so:
            raise UnsupportedModelError(
                f"llama.cpp computes no {spec.model_type} with {what}: {path}\n"
                "a GGUF file of it would give other tokens"
            )


def _is_plain(rope: Rope) -> bool:
    """Whether a yarn rule is what GGUF's keys can state."""
    expected = 0.1 * float(np.log(rope.factor)) + 1 if rope.factor > 1 else 1.0
    ramp = rope.fast == 32 and rope.slow == 1 and rope.truncate
    return ramp and abs(rope.attention_factor - expected) < 1e-6


def _rope_factors(rope: Rope, head_dim: int) -> Float32 | None:
    """What each rope frequency is divided by under the llama3 rule, [Dh / 2]; else None."""
    if rope.kind != "llama3":
        return None
    plain = replace(rope, kind="default")
    return plain.inv_freq(head_dim) / rope.inv_freq(head_dim)


def _metadata(spec: ModelSpec, main_format: str, name: Any) -> dict[str, Any]:
    """What the file says of the model, without its tokenizer.

    Args:
        spec: of the model.
        main_format: what most of the file is stored in.
        name: as the source's config has it; a path on somebody's machine is none.
    """
    architecture = ARCHITECTURES[spec.model_type].name
    own: dict[str, Any] = {
        "block_count": spec.num_hidden_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size or spec.moe_intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.num_attention_heads,
        "attention.head_count_kv": spec.num_key_value_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope.theta,
        "rope.dimension_count": spec.head_dim,
    }
    if spec.num_experts:
        own |= {"expert_count": spec.num_experts, "expert_used_count": spec.num_experts_per_tok}
    if spec.model_type == "qwen3_moe":
        own["expert_feed_forward_length"] = spec.moe_intermediate_size
    if spec.rope.kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": spec.rope.kind, "rope.scaling.factor": spec.rope.factor}
    if spec.rope.kind == "yarn":
        own["rope.scaling.original_context_length"] = spec.rope.original_context
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.file_type": _FILE_TYPES.get(main_format, _UNSTATED),
    }
    if isinstance(name, str) and name and name[0] not in "/.~":
        metadata["general.name"] = name
    if main_format not in _FLOATING:
        metadata["general.quantization_version"] = _QUANTIZATION_VERSION
    return metadata | {f"{architecture}.{key}": value for key, value in own.items()}


def _tokenizer_metadata(
    source: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer, notes: list[str]
) -> dict[str, Any]:
    """What the file says of text: vocabulary, special tokens, chat template."""
    metadata = vocabulary_metadata(tokenizer.definition, spec.vocab_size, source.path)
    named = {name: tokenizer.special_id(name) for name in SPECIAL_TOKENS}
    named["bos"] = source.config.get("bos_token_id") if named["bos"] is None else named["bos"]
    ends = _end_ids(source, spec, tokenizer)
    closing = metadata.get("tokenizer.ggml.eos_token_id")  # what the tokenizer puts after a text
    if closing is not None:
        named["eos"], ends = closing, [closing, *ends]
    unplaced = _place_ends(named, ends)
    for name, token in named.items():
        if token is not None:
            metadata.setdefault(f"tokenizer.ggml.{SPECIAL_TOKENS[name]}_token_id", token)
    if unplaced:
        notes.append(f"end tokens {unplaced} are not stated: the format has three places for them")
    if (tokenizer.definition.get("normalizer") or {}).get("type") == "NFC":
        notes.append("llama.cpp does not bring text to NFC before it is cut; the tokenizer does")
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _place_ends(named: dict[str, int | None], ends: Sequence[int]) -> list[int]:
    """Give the tokens that end a text the format's places for them, in `named`.

    One that has the name of a place gets it, if it ends a text; the others get what is free.

    Returns:
        Those that found no place.
    """
    for name in END_TOKENS:
        named[name] = named[name] if named[name] in ends else None
    left = [token for token in ends if token not in [named[name] for name in END_TOKENS]]
    free = [name for name in END_TOKENS if named[name] is None]
    named.update(zip(free, left, strict=False))
    return left[len(free) :]


def _end_ids(source: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text."""
    stated = source.generation_config.get("eos_token_id")
    if stated is None:
        own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        return list(dict.fromkeys([*own, *spec.eos_token_ids]))
    return list(dict.fromkeys(stated if isinstance(stated, list) else [stated]))
