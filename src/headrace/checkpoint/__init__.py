"""Checkpoints: what a model's files hold and where, checked at the door. Loads no model."""

from pathlib import Path

from headrace.checkpoint.base import (
    Checkpoint,
    EmbeddingTable,
    Matrix,
    TensorInfo,
    read_config,
    read_generation_config,
)
from headrace.checkpoint.container import ContainerCheckpoint, is_container
from headrace.checkpoint.huggingface import HuggingFaceCheckpoint
from headrace.checkpoint.records import ExpertNames, MatrixLayout, RecordLayout, RecordTable
from headrace.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "ContainerCheckpoint",
    "EmbeddingTable",
    "ExpertNames",
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


def open_checkpoint(path: Path, expert_names: ExpertNames | None) -> Checkpoint:
    """Open a checkpoint and check all of its headers; reads no weights.

    Args:
        path: a container, or the directory of a Hugging Face checkpoint.
        expert_names: how the architecture names its experts; None for a dense model. A container
            does not need it.

    Raises:
        CheckpointError: a file is missing, damaged or inconsistent.
        UnsupportedModelError: the files hold a format that nothing here reads.
    """
    if not path.exists():
        raise CheckpointError(f"no such file or directory: {path}")
    if not path.is_dir():
        raise CheckpointError(
            f"not a checkpoint directory: {path}\n"
            "expected a container or the directory of a Hugging Face checkpoint"
        )
    if is_container(path):
        return ContainerCheckpoint(path)
    return HuggingFaceCheckpoint(path, expert_names)
