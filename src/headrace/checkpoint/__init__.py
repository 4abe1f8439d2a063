"""Checkpoints: what a model's files hold and where, checked at the door. Loads no model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint import base
from headrace.checkpoint.base import (
    Checkpoint,
    EmbeddingTable,
    Matrix,
    TensorInfo,
    read_generation_config,
)
from headrace.checkpoint.container import ContainerCheckpoint, is_container
from headrace.checkpoint.gguf import GgufCheckpoint, config_from_metadata
from headrace.checkpoint.gguf_split import read_model
from headrace.checkpoint.huggingface import HuggingFaceCheckpoint
from headrace.checkpoint.records import ExpertNames, MatrixLayout, RecordLayout, RecordTable
from headrace.errors import CheckpointError, ConfigError

__all__ = [
    "Checkpoint",
    "ContainerCheckpoint",
    "EmbeddingTable",
    "ExpertNames",
    "GgufCheckpoint",
    "HuggingFaceCheckpoint",
    "Matrix",
    "MatrixLayout",
    "RecordLayout",
    "RecordTable",
    "TensorInfo",
    "open_checkpoint",
    "read_config",
    "read_generation_config",
]


def read_config(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of its model, as a Hugging Face `config.json` states it.

    Raises:
        CheckpointError: there is none, or it is malformed.
        UnsupportedModelError: a GGUF file of a model that has no such config here.
    """
    return config_from_metadata(read_model(path)) if path.is_file() else base.read_config(path)


def open_checkpoint(
    path: Path, expert_names: ExpertNames | None, drives: Sequence[Path] = ()
) -> Checkpoint:
    """Open a checkpoint and check all of its headers; reads no weights.

    Args:
        path: a container, the directory of a Hugging Face checkpoint, or a GGUF file.
        expert_names: how the architecture names its experts; None for a dense model. A container
            does not need it.
        drives: folders with moved files or copies of records; of a container only.

    Raises:
        ConfigError: drives are named for a checkpoint that is read in place.
        CheckpointError: a file is missing, damaged or inconsistent.
        UnsupportedModelError: the files hold a format that nothing here reads.
    """
    if not path.exists():
        raise CheckpointError(f"no such file or directory: {path}")
    if path.is_dir() and is_container(path):
        return ContainerCheckpoint(path, drives)
    if drives:
        raise ConfigError(
            f"option `drive` needs a container: {path} is read in place\n"
            "hint: `headrace convert SOURCE DEST` packs its experts into records that can be copied"
        )
    if path.is_file():
        return GgufCheckpoint(path)
    return HuggingFaceCheckpoint(path, expert_names)
