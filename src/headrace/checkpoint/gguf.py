"""A GGUF file behind the checkpoint interface: config, names, values and tokenizer as Hugging
Face has them.

Reads dense models of the `llama` and `qwen3` architectures. Every weight is expanded to the real
number it stands for and stays in memory: floating types as they are, quantised ones as float32.
Nothing is rounded, and nothing is saved by the file's quantisation once it is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core
from headrace.arrays import Bytes, Float32
from headrace.checkpoint.base import CHUNK_BYTES, Checkpoint, EmbeddingTable, Matrix, TensorInfo
from headrace.checkpoint.gguf_blocks import dequantize
from headrace.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from headrace.checkpoint.gguf_names import ARCHITECTURES, paired_rows
from headrace.checkpoint.gguf_tokenizer import tokenizer_config, tokenizer_json
from headrace.checkpoint.values import check_finite, read_range
from headrace.errors import CheckpointError, UnsupportedModelError

DENSE_MODELS = {ARCHITECTURES[name].name: name for name in ("llama", "qwen3")}
"""`general.architecture` of what is read -> `model_type`."""
FLOATING = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
SAMPLES = 16
SAMPLE_BYTES = 4096

# Every key of the model itself that is understood; another may change the result and is refused.
_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
    }
)


class GgufCheckpoint(Checkpoint):
    """An opened GGUF file of a dense model."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: the file is damaged or inconsistent.
            UnsupportedModelError: another architecture, a split file, an unknown key or type.
        """
        self.path = path
        self.header = read_header(path)
        self.config = config_from_metadata(self.header)
        self.generation_config = {"eos_token_id": self.config["eos_token_id"]}
        self.architecture = ARCHITECTURES[self.config["model_type"]]
        name_of = self.architecture.hugging_face_name
        self._sources = {name_of(n): t for n, t in self.header.tensors.items()}
        self.tensors = {name: _describe(tensor) for name, tensor in self._sources.items()}
        self.records = None
        self.mtp_tensors: Mapping[str, TensorInfo] = {}
        self.mtp_records = None
        self.fingerprint = _fingerprint(self.header)

    def tokenizer_json(self) -> str:
        """The vocabulary and merges as the text of a `tokenizer.json`."""
        return tokenizer_json(self.header)

    def tokenizer_config(self) -> dict[str, Any]:
        """Special tokens and chat template, as in `tokenizer_config.json`."""
        return tokenizer_config(self.header)

    def load_matrix(self, name: str, format: str | None = None) -> Matrix:
        """Load a matrix; see `Checkpoint.load_matrix`. Quantised types become f32."""
        tensor = self._tensor(name, 2)
        rows, cols = tensor.shape
        target = format or FLOATING.get(tensor.type.name, "f32")
        data = _core.aligned_empty(_core.packed_bytes(target, rows, cols, 1))
        order = self._row_order(name, rows)
        step = _rows_per_chunk(cols)
        for first in range(0, rows, step):
            values = self._values(name, tensor, order[first : first + step])
            packed = _core.pack(values if target == "f32" else _narrow(values, target), target, 1)
            start = _core.packed_bytes(target, first, cols, 1)
            data[start : start + packed.size] = packed
        return Matrix(data, target, rows, cols, 1)

    def load_vector(self, name: str) -> Float32:
        """Load a vector; see `Checkpoint.load_vector`."""
        tensor = self._tensor(name, 1)
        return self._values(name, tensor, np.zeros(1, np.int64)).reshape(-1)

    def embedding(self, name: str, resident: bool) -> EmbeddingTable:
        """Open the embedding table, always resident; see `Checkpoint.embedding`."""
        rows, cols = self._tensor(name, 2).shape
        matrix = self.load_matrix(name)
        return EmbeddingTable(matrix, rows, cols, matrix.format)

    def _tensor(self, name: str, num_dims: int) -> GgufTensor:
        self.info(name)
        tensor = self._sources[name]
        if len(tensor.shape) != num_dims:
            raise CheckpointError(
                f"tensor has the wrong shape: {name}, file {self.path}\n"
                f"expected {num_dims} dimensions, got {list(tensor.shape)}"
            )
        return tensor

    def _values(self, name: str, tensor: GgufTensor, rows: np.ndarray) -> Float32:
        """The values of some rows, [R, K] float32, in the order asked for."""
        first, last = int(rows.min()), int(rows.max()) + 1
        data: Bytes = np.empty((last - first, tensor.row_bytes), np.uint8)
        read_range(self.path, tensor.offset + first * tensor.row_bytes, data.reshape(-1))
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is reported below
            values = np.ascontiguousarray(dequantize(data, tensor.type.name)[rows - first])
        check_finite(values.view(np.uint8), "f32", name, self.path, first * tensor.shape[-1])
        return values

    def _row_order(self, name: str, rows: int) -> np.ndarray:
        """For each row as Hugging Face orders them, its place in the file."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for role, key in heads.items():
            if self.architecture.has_paired_rope and name.endswith(f"self_attn.{role}.weight"):
                return paired_rows(rows, self.config[key])
        return np.arange(rows)

    def is_quantised(self, name: str) -> bool:
        """Whether the file holds a dense tensor in a quantised type."""
        self.info(name)
        return self._sources[name].type.name not in FLOATING


def config_from_metadata(header: GgufHeader) -> dict[str, Any]:
    """State a GGUF file's model as a Hugging Face `config.json` would.

    Raises:
        CheckpointError: a key is missing or of another type.
        UnsupportedModelError: another architecture, or a key that is not understood.
    """
    metadata = _Metadata(header)
    architecture = metadata.architecture
    num_experts = metadata.own("expert_count", int, 0)
    if architecture not in DENSE_MODELS or num_experts:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} with {num_experts} experts is not supported: "
            f"{header.path}\n"
            f"expected {' or '.join(map(repr, DENSE_MODELS))} without experts\n"
            "hint: use the model's Hugging Face checkpoint"
        )
    num_files = metadata.get("split.count", int, 1)
    if num_files > 1:
        raise UnsupportedModelError(
            f"the model is split over {num_files} GGUF files: {header.path}\nexpected a single file"
        )
    metadata.refuse_unknown(_KEYS)
    heads, width = metadata.own("attention.head_count", int), metadata.own("embedding_length", int)
    head_dim = metadata.own("attention.key_length", int, width // max(heads, 1))
    metadata.require("attention.value_length", head_dim)
    metadata.require("rope.dimension_count", head_dim)
    eos = [
        metadata.get(f"tokenizer.ggml.{key}_token_id", int)
        for key in ("eos", "eot")
        if f"tokenizer.ggml.{key}_token_id" in header.metadata
    ]
    return {
        "model_type": DENSE_MODELS[architecture],
        "hidden_size": width,
        "intermediate_size": metadata.own("feed_forward_length", int),
        "num_hidden_layers": metadata.own("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.own("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", list)),
        "rms_norm_eps": metadata.own("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": metadata.own("context_length", int),
        "rope_theta": metadata.own("rope.freq_base", float),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int, 0),
        "eos_token_id": eos,
    }


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.own("rope.scaling.type", str, "none")
    if kind == "none":
        return None
    factor = metadata.own("rope.scaling.factor", float)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.own("rope.scaling.original_context_length", int)
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


class _Metadata:
    """The metadata of a header, read with the type expected."""

    _REQUIRED: Any = object()

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.architecture: str = self.get("general.architecture", str)

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A value of metadata, or the default where the key is absent."""
        if key not in self._header.metadata:
            if default is not self._REQUIRED:
                return default
            raise CheckpointError(f"GGUF metadata key `{key}` is missing: {self._header.path}")
        value = self._header.metadata[key]
        good = isinstance(value, kind)
        if good and isinstance(value, int):
            good = kind is bool or (not isinstance(value, bool) and 0 <= value < 1 << 31)
        if not good:
            raise CheckpointError(
                f"GGUF metadata key `{key}` has an unexpected value: {self._header.path}\n"
                f"expected {kind.__name__}, got {str(value)[:80]!r}"
            )
        return value

    def own(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A value under the architecture's own prefix."""
        return self.get(f"{self.architecture}.{key}", kind, default)

    def require(self, key: str, expected: int) -> None:
        """Refuse a model whose `key` is not `expected`, where it is stated."""
        value = self.own(key, int, expected)
        if value != expected:
            raise UnsupportedModelError(
                f"`{self.architecture}.{key}: {value}` is not supported: {self._header.path}\n"
                f"expected {expected}, the width of a head"
            )

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuse keys of the architecture that nobody here understands."""
        prefix = self.architecture
        found = {k for k in self._header.metadata if k.startswith(prefix + ".")}
        unknown = sorted(found - {f"{prefix}.{key}" for key in known})
        if unknown:
            raise UnsupportedModelError(
                f"GGUF metadata that is not understood: {self._header.path}\n"
                f"got {', '.join(f'`{key}`' for key in unknown)}; it may change the result"
            )


def _describe(tensor: GgufTensor) -> TensorInfo:
    format = FLOATING.get(tensor.type.name, "f32")
    nbytes = 4 * tensor.shape[-1]
    if len(tensor.shape) == 2:
        nbytes = _core.packed_bytes(format, *tensor.shape, 1)
    return TensorInfo(format, 1, tensor.shape, nbytes)


def _rows_per_chunk(cols: int) -> int:
    """Rows expanded at a time: whole blocks of 16 outputs, about CHUNK_BYTES of float32."""
    return max(16, CHUNK_BYTES // (4 * cols) // 16 * 16)


def _narrow(values: Float32, format: str) -> np.ndarray:
    """Back to the type they were read from, exactly; bf16 as its bits."""
    if format == "f16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _fingerprint(header: GgufHeader) -> str:
    """Identify the file by its header, its size and pages spread over its data."""
    digest = hashlib.sha256(f"headrace gguf 1 {header.file_bytes}".encode())
    data_bytes = header.file_bytes - header.header_bytes
    with header.path.open("rb") as file:
        digest.update(file.read(header.header_bytes))
        for i in range(SAMPLES):
            file.seek(header.header_bytes + max(0, data_bytes - SAMPLE_BYTES) * i // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
