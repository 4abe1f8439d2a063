"""Which class computes which `model_type`. Adding an architecture adds one line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint import Checkpoint
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.models.decoder import Decoder
from headrace.models.fields import ConfigFields
from headrace.models.llama import Llama
from headrace.models.mixtral import Mixtral
from headrace.models.names import ExpertNames
from headrace.models.olmoe import Olmoe
from headrace.models.qwen3 import Qwen3
from headrace.models.qwen3_moe import Qwen3Moe
from headrace.models.spec import ModelSpec
from headrace.models.weights import Weights, names_of

REGISTRY: Mapping[str, type[Decoder]] = {
    "llama": Llama,
    "mixtral": Mixtral,
    "olmoe": Olmoe,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}


def load_spec(config: Mapping[str, Any], path: Path | None = None) -> ModelSpec:
    """Turn a checkpoint's `config.json` into a spec, accounting for every field.

    Args:
        config: as Hugging Face states it, or as it is made of a GGUF file's metadata.
        path: of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: no model here computes it, or not with these options; says which.
        ConfigError: a field is missing, out of range, or not understood.
    """
    try:
        return _read_spec(config)
    except (ConfigError, UnsupportedModelError) as error:
        if path is None:
            raise
        whose = "the metadata, in the words of config.json, of" if path.is_file() else "that of"
        raise type(error)(f"{error}\n{whose} {path}") from None


def _read_spec(config: Mapping[str, Any]) -> ModelSpec:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json: field `model_type` is missing")
    if model_type not in REGISTRY:
        raise UnsupportedModelError(
            f"config.json: unknown `model_type` {model_type!r}\n"
            f"expected one of {', '.join(REGISTRY)}"
        )
    fields = ConfigFields(config)
    spec = REGISTRY[model_type].read_spec(fields)
    fields.finish()
    return spec


def expert_names(spec: ModelSpec) -> ExpertNames | None:
    """How the checkpoint names the matrices of routed experts; None in a dense model."""
    return REGISTRY[spec.model_type].names.experts if spec.moe_layers else None


def dense_names(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the dense tensors that the model loads, without loading it."""
    model = REGISTRY[spec.model_type]
    return tuple(names_of(model.parameters(spec), model.names))


def embedding_name(spec: ModelSpec) -> str:
    """Name of the embedding table, which may stay on the drive unless the head is tied to it."""
    return REGISTRY[spec.model_type].names.name("embed_tokens")


def check_weights(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's headers with `spec`; reads no weights.

    Raises:
        CheckpointError: a tensor is missing, misshapen or belongs to no role.
        UnsupportedModelError: a tensor is of a dtype that is not read.
    """
    model = REGISTRY[spec.model_type]
    Weights(checkpoint, model.names).check(model.parameters(spec), spec)


def build_model(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    embedding_resident: bool = True,
    lock: bool = False,
) -> Decoder:
    """Check a checkpoint's tensors against `spec` and load the dense ones.

    Args:
        spec: from `load_spec`.
        checkpoint: opened with `expert_names(spec)`.
        embedding_resident: keep the embedding table in memory; False reads its rows from the drive.
        lock: keep the weights from being swapped out.

    Raises:
        CheckpointError: a tensor is missing, misshapen, damaged or belongs to no role.
        MemoryBudgetError: the system refused the memory, or to lock it.
    """
    return REGISTRY[spec.model_type](spec, checkpoint, embedding_resident, lock)
