"""A GGUF file behind the checkpoint interface: config, names, values and tokenizer as Hugging
Face has them.

Reads dense models of the `llama` architecture. Every weight is expanded to the real number it
stands for and stays in memory: floating types as they are, quantised ones as float32. Nothing is
rounded, and nothing is saved by the file's quantisation once it is loaded.
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
from headrace.checkpoint.gguf_tokenizer import tokenizer_config, tokenizer_json
from headrace.checkpoint.values import check_finite, read_range
from headrace.errors import CheckpointError, UnsupportedModelError

ARCHITECTURE = "llama"
FLOATING = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
SAMPLES = 16
SAMPLE_BYTES = 4096

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Every `llama.*` key that is understood; another one may change the result and is refused.
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
    """An opened GGUF file of a dense llama model."""

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
        self._sources = {_name_of(n): t for n, t in self.header.tensors.items()}
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
        """For each row as Hugging Face orders them, its place in the file.

        The converter to GGUF rewrites q and k for rope over neighbouring dimensions: within a head,
        row i of the first half and row i of the second half become rows 2i and 2i + 1.
        """
        order = np.arange(rows)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for role, key in heads.items():
            if name.endswith(f"self_attn.{role}.weight"):
                return order.reshape(self.config[key], -1, 2).swapaxes(1, 2).reshape(-1)
        return order


def config_from_metadata(header: GgufHeader) -> dict[str, Any]:
    """State a GGUF file's model as a Hugging Face `config.json` would.

    Raises:
        CheckpointError: a key is missing or of another type.
        UnsupportedModelError: another architecture, or a key that is not understood.
    """
    metadata = _Metadata(header)
    architecture = metadata.get("general.architecture", str)
    num_experts = metadata.get(f"{architecture}.expert_count", int, 0)
    if architecture != ARCHITECTURE or num_experts:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} with {num_experts} experts is not supported: "
            f"{header.path}\n"
            f"expected {ARCHITECTURE!r} without experts\n"
            "hint: use the model's Hugging Face checkpoint"
        )
    num_files = metadata.get("split.count", int, 1)
    if num_files > 1:
        raise UnsupportedModelError(
            f"the model is split over {num_files} GGUF files: {header.path}\nexpected a single file"
        )
    metadata.refuse_unknown(ARCHITECTURE, _KEYS)
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
        "model_type": "llama",
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
        return self.get(f"{ARCHITECTURE}.{key}", kind, default)

    def require(self, key: str, expected: int) -> None:
        """Refuse a model whose `key` is not `expected`, where it is stated."""
        value = self.own(key, int, expected)
        if value != expected:
            raise UnsupportedModelError(
                f"`{ARCHITECTURE}.{key}: {value}` is not supported: {self._header.path}\n"
                f"expected {expected}, the width of a head"
            )

    def refuse_unknown(self, prefix: str, known: frozenset[str]) -> None:
        """Refuse keys of the architecture that nobody here understands."""
        found = {k for k in self._header.metadata if k.startswith(prefix + ".")}
        unknown = sorted(found - {f"{prefix}.{key}" for key in known})
        if unknown:
            raise UnsupportedModelError(
                f"GGUF metadata that is not understood: {self._header.path}\n"
                f"got {', '.join(f'`{key}`' for key in unknown)}; it may change the result"
            )


def _name_of(name: str) -> str:
    """The Hugging Face name of a tensor; unknown ones keep theirs, to be refused by that name."""
    if name.startswith("blk."):
        _, layer, rest = (*name.split(".", 2), "")[:3]
        if rest in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"
    return _WHOLE_NAMES.get(name, name)


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
