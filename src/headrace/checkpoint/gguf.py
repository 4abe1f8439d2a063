"""A GGUF file behind the checkpoint interface: config, names, values and tokenizer as Hugging
Face has them.

Reads the architectures of `gguf_names`, from one file or from the parts of a split one. Weights
keep their codes and scales: each tensor type has a packed format that holds it without loss
(`gguf_blocks`). Experts stay where they are; the reader takes their blocks apart.
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
from headrace.checkpoint.gguf_blocks import (
    QUANTISED,
    dequantize,
    packed_format,
    require_readable,
)
from headrace.checkpoint.gguf_experts import expert_table, is_expert
from headrace.checkpoint.gguf_header import BLOCK_TYPES, GgufHeader, GgufTensor
from headrace.checkpoint.gguf_names import ARCHITECTURES, ROPE_FACTORS, paired_rows
from headrace.checkpoint.gguf_rope import llama3_scaling
from headrace.checkpoint.gguf_split import GgufModel, read_model
from headrace.checkpoint.gguf_tokenizer import END_TOKENS, tokenizer_config, tokenizer_json
from headrace.checkpoint.huggingface import open_rows, sample_offsets
from headrace.checkpoint.records import FLOAT_FORMATS
from headrace.checkpoint.safetensors import TensorEntry
from headrace.checkpoint.values import check_finite, read_range
from headrace.errors import CheckpointError, UnsupportedModelError

MODELS = {(a.name, a.has_experts): name for name, a in ARCHITECTURES.items()}
"""`general.architecture`, and whether there are experts -> `model_type`."""
TYPE_IDS = {type.name: id for id, type in BLOCK_TYPES.items()}

# Every key of the model itself that is understood; another may change the result and is refused.
_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_weights_norm",
        "expert_weights_scale",
        "expert_gating_func",
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
    """An opened GGUF file, or all parts of a split one."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: the file is damaged or inconsistent.
            UnsupportedModelError: another architecture, an unknown key or type.
        """
        self.path = path
        self.header = read_model(path)
        arrays = (v for v in self.header.metadata.values() if isinstance(v, list))
        self.num_header_items = sum(map(len, arrays))
        self.config = config_from_metadata(self.header)
        self.generation_config = {"eos_token_id": self.config["eos_token_id"]}
        self.architecture = ARCHITECTURES[self.config["model_type"]]
        name_of = self.architecture.hugging_face_name
        has_rope_factors = (self.config["rope_scaling"] or {}).get("rope_type") == "llama3"
        used = {ROPE_FACTORS} if has_rope_factors else set()  # the config says the same
        self._sources = {
            name_of(n): t
            for n, t in self.header.tensors.items()
            if n not in used and not (self.architecture.has_experts and is_expert(n))
        }
        self.tensors = {name: _describe(tensor) for name, tensor in self._sources.items()}
        self.records = expert_table(self.header, self.config) if self.has_experts else None
        self.mtp_tensors: Mapping[str, TensorInfo] = {}
        self.mtp_records = None
        self.fingerprint = _fingerprint(self.header)

    @property
    def has_experts(self) -> bool:
        """Whether the model has routed experts."""
        return self.architecture.has_experts

    @property
    def num_merges(self) -> int:
        """Merges of the tokenizer; one that has scores makes about as many as it has tokens."""
        metadata = self.header.metadata
        return len(metadata.get("tokenizer.ggml.merges") or metadata["tokenizer.ggml.tokens"])

    def tokenizer_json(self) -> str:
        """The vocabulary and merges as the text of a `tokenizer.json`."""
        return tokenizer_json(self.header)

    def tokenizer_config(self) -> dict[str, Any]:
        """Special tokens and chat template, as in `tokenizer_config.json`."""
        return tokenizer_config(self.header)

    def load_matrix(self, name: str, format: str | None = None) -> Matrix:
        """Load a matrix; see `Checkpoint.load_matrix`. Quantised types keep their codes."""
        tensor = self._tensor(name, 2)
        rows, cols = tensor.shape
        if format is None and tensor.type.name in QUANTISED:
            return self._load_codes(name, tensor)
        target = format or FLOAT_FORMATS[tensor.type.name]
        data = _core.aligned_empty(_core.packed_bytes(target, rows, cols, 1))
        order = self._row_order(name, rows)
        step = _rows_per_chunk(cols)
        for first in range(0, rows, step):
            values = self._values(name, tensor, order[first : first + step])
            packed = _core.pack(values if target == "f32" else _narrow(values, target), target, 1)
            start = _core.packed_bytes(target, first, cols, 1)
            data[start : start + packed.size] = packed
        return Matrix(data, target, rows, cols, 1)

    def _load_codes(self, name: str, tensor: GgufTensor) -> Matrix:
        rows, cols = tensor.shape
        format, group = packed_format(tensor.type.name)
        data = _core.aligned_empty(_core.packed_bytes(format, rows, cols, group))
        order = self._row_order(name, rows)
        step = max(16, CHUNK_BYTES // tensor.row_bytes // 16 * 16)
        for first in range(0, rows, step):
            blocks = self._blocks(tensor, order[first : first + step])
            where = f"{name}, file {tensor.path}, rows from {first}"
            type_id = TYPE_IDS[tensor.type.name]
            start = _core.packed_bytes(format, first, cols, group)
            end = start + _core.packed_bytes(format, len(blocks), cols, group)
            _core.repack_gguf(blocks, type_id, cols, format, group, data[start:end], where)
        return Matrix(data, format, rows, cols, group)

    def load_vector(self, name: str) -> Float32:
        """Load a vector; see `Checkpoint.load_vector`."""
        tensor = self._tensor(name, 1)
        return self._values(name, tensor, np.zeros(1, np.int64)).reshape(-1)

    def has_rows(self, name: str) -> bool:
        """See `Checkpoint.has_rows`."""
        self.info(name)
        return not self.is_quantised(name) and not self.has_own_row_order(name)

    def embedding(self, name: str, resident: bool) -> EmbeddingTable:
        """Open the embedding table; see `Checkpoint.embedding`."""
        tensor = self._tensor(name, 2)
        if self.has_rows(name):
            return open_rows(self.rows_entry(name), FLOAT_FORMATS[tensor.type.name], resident)
        matrix = self.load_matrix(name)
        return EmbeddingTable(matrix, matrix.rows, matrix.cols, matrix.format)

    def rows_entry(self, name: str) -> TensorEntry:
        """Return where a dense tensor lies, row after row."""
        tensor = self._sources[name]
        return TensorEntry(
            name, tensor.type.name, tensor.shape, tensor.path, tensor.offset, tensor.nbytes
        )

    def _tensor(self, name: str, num_dims: int) -> GgufTensor:
        self.info(name)
        tensor = self._sources[name]
        require_readable(tensor.type.name, f"{name}, file {tensor.path}")
        if len(tensor.shape) != num_dims:
            raise CheckpointError(
                f"tensor has the wrong shape: {name}, file {self.path}\n"
                f"expected {num_dims} dimensions, got {list(tensor.shape)}"
            )
        return tensor

    def _values(self, name: str, tensor: GgufTensor, rows: np.ndarray) -> Float32:
        """The values of some rows, [R, K] float32, in the order asked for."""
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is reported below
            values = dequantize(self._blocks(tensor, rows), tensor.type.name)
        first = int(rows.min()) * tensor.shape[-1]
        check_finite(values.view(np.uint8), "f32", name, tensor.path, first)
        return values

    def _blocks(self, tensor: GgufTensor, rows: np.ndarray) -> Bytes:
        """Some rows as they are in the file, [R, row bytes], in the order asked for."""
        first, last = int(rows.min()), int(rows.max()) + 1
        data: Bytes = np.empty((last - first, tensor.row_bytes), np.uint8)
        read_range(tensor.path, tensor.offset + first * tensor.row_bytes, data.reshape(-1))
        return np.ascontiguousarray(data[rows - first])

    def require_readable(self, name: str) -> None:
        """See `Checkpoint.require_readable`."""
        self.info(name)
        tensor = self._sources[name]
        require_readable(tensor.type.name, f"{name}, file {tensor.path}")

    def _row_order(self, name: str, rows: int) -> np.ndarray:
        """For each row as Hugging Face orders them, its place in the file."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for role, key in heads.items():
            if self.has_own_row_order(name) and name.endswith(f"{role}.weight"):
                return paired_rows(rows, self.config[key])
        return np.arange(rows)

    def has_own_row_order(self, name: str) -> bool:
        """Whether the file orders a matrix's rows otherwise than Hugging Face."""
        return self.architecture.has_paired_rope and name.endswith(
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
        )

    def expert_tensors(self) -> dict[str, GgufTensor]:
        """Tensors that hold experts of a layer, by their name in the file; none if dense."""
        found = self.header.tensors.items()
        return {n: t for n, t in found if self.has_experts and is_expert(n)}

    def check_experts(self, name: str) -> None:
        """Read a tensor of experts; raise CheckpointError if a value of it is not finite."""
        tensor = self.expert_tensors()[name]
        cols = tensor.shape[-1]
        num_rows = tensor.nbytes // tensor.row_bytes
        step = max(16, CHUNK_BYTES // tensor.row_bytes)
        for first in range(0, num_rows, step):
            rows = np.arange(first, min(first + step, num_rows))
            blocks = self._blocks(tensor, rows)
            if tensor.type.name in FLOAT_FORMATS:
                format = FLOAT_FORMATS[tensor.type.name]
                check_finite(blocks.reshape(-1), format, name, tensor.path, first * cols)
                continue
            where = f"{name}, file {tensor.path}, rows from {first}"
            format, group = packed_format(tensor.type.name)
            packed = _core.aligned_empty(_core.packed_bytes(format, len(blocks), cols, group))
            type_id = TYPE_IDS[tensor.type.name]
            _core.repack_gguf(blocks, type_id, cols, format, group, packed, where)

    def source(self, name: str) -> GgufTensor:
        """Where a dense tensor lies, under its Hugging Face name."""
        self.info(name)
        return self._sources[name]

    def is_quantised(self, name: str) -> bool:
        """Whether the file holds a dense tensor in a quantised type."""
        self.info(name)
        return self._sources[name].type.name in QUANTISED


def config_from_metadata(header: GgufHeader) -> dict[str, Any]:
    """State a GGUF file's model as a Hugging Face `config.json` would.

    Raises:
        CheckpointError: a key is missing or of another type.
        UnsupportedModelError: another architecture, or a key that is not understood.
    """
    metadata = _Metadata(header)
    architecture = metadata.architecture
    num_experts = metadata.own("expert_count", int, 0)
    if (architecture, num_experts > 0) not in MODELS:
        known = [f"{name!r} {'with' if e else 'without'} experts" for name, e in MODELS]
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} {'with' if num_experts else 'without'} experts "
            f"is not supported: {header.path}\n"
            f"expected {', '.join(known)}"
        )
    model_type = MODELS[architecture, num_experts > 0]
    metadata.refuse_unknown(_KEYS)
    heads, width = metadata.own("attention.head_count", int), metadata.own("embedding_length", int)
    head_dim = metadata.own("attention.key_length", int, width // max(heads, 1))
    metadata.require("attention.value_length", head_dim)
    metadata.require("rope.dimension_count", head_dim)
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id", int, None) for key in END_TOKENS]
    return {
        "model_type": model_type,
        "_name_or_path": metadata.get("general.name", str, None),
        **_mixture(metadata, model_type, num_experts),
        "hidden_size": width,
        "intermediate_size": _inner_size(metadata, model_type),
        "num_hidden_layers": metadata.own("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.own("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", list)),
        "rms_norm_eps": metadata.own("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": metadata.own("context_length", int),
        "rope_theta": metadata.own("rope.freq_base", float),
        "rope_scaling": _rope_scaling(metadata, header, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": [token for token in ids if token is not None],
    }


def _inner_size(metadata: _Metadata, model_type: str) -> int:
    """Width of a dense layer, or of an expert where all layers are mixtures of that width."""
    width: int = metadata.own("feed_forward_length", int)
    if model_type in ("mixtral", "olmoe"):
        width = metadata.own("expert_feed_forward_length", int, width)
    return width


def _mixture(metadata: _Metadata, model_type: str, num_experts: int) -> dict[str, Any]:
    """What a config says of routed experts; nothing for a dense model."""
    if not num_experts:
        return {}
    is_divided = model_type != "olmoe"
    for key, expected in (("expert_gating_func", 1), ("expert_weights_norm", is_divided)):
        metadata.require(key, expected, "as llama.cpp computes this architecture")
    scale = metadata.own("expert_weights_scale", float, 1.0)
    if scale not in (0.0, 1.0):
        raise UnsupportedModelError(
            f"`expert_weights_scale: {scale}` of {metadata.architecture} is not supported"
        )
    num_used = metadata.own("expert_used_count", int)
    if model_type == "mixtral":
        return {"num_local_experts": num_experts, "num_experts_per_tok": num_used}
    mixture = {
        "num_experts": num_experts,
        "num_experts_per_tok": num_used,
        "norm_topk_prob": is_divided,
    }
    if model_type == "qwen3_moe":
        mixture["moe_intermediate_size"] = metadata.own("expert_feed_forward_length", int)
    return mixture


def _rope_scaling(metadata: _Metadata, header: GgufHeader, head_dim: int) -> dict[str, Any] | None:
    kind = metadata.own("rope.scaling.type", str, "none")
    if ROPE_FACTORS in header.tensors and kind == "none":
        theta = metadata.own("rope.freq_base", float)
        return llama3_scaling(header.tensors[ROPE_FACTORS], theta, head_dim)
    if kind == "none":
        return None
    factor = metadata.own("rope.scaling.factor", float)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.own("rope.scaling.original_context_length", int)
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


_EXPECTED = {int: "an integer from 0 to 2147483647", str: "text", float: "a number", list: "a list"}


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
                f"expected {_EXPECTED.get(kind, kind.__name__)}, got {str(value)[:80]!r}"
            )
        return value

    def own(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A value under the architecture's own prefix."""
        return self.get(f"{self.architecture}.{key}", kind, default)

    def require(self, key: str, expected: int, why: str = "the width of a head") -> None:
        """Refuse a model whose `key` is not `expected`, where it is stated."""
        value = self.own(key, type(expected), expected)
        if value != expected:
            raise UnsupportedModelError(
                f"`{self.architecture}.{key}: {value}` is not supported: {self._header.path}\n"
                f"expected {expected}, {why}"
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
    name = tensor.type.name
    is_read = name in QUANTISED or name in FLOAT_FORMATS
    format, group = packed_format(name) if is_read else (name, 1)
    nbytes = 4 * tensor.shape[-1]
    if len(tensor.shape) == 2 and is_read:
        nbytes = _core.packed_bytes(format, *tensor.shape, group)
    return TensorInfo(format, group, tensor.shape, nbytes)


def _rows_per_chunk(cols: int) -> int:
    """Rows expanded at a time: whole blocks of 16 outputs, about CHUNK_BYTES of float32."""
    return max(16, CHUNK_BYTES // (4 * cols) // 16 * 16)


def _narrow(values: Float32, format: str) -> np.ndarray:
    """Back to the type they were read from, exactly; bf16 as its bits."""
    if format == "f16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _fingerprint(model: GgufModel) -> str:
    """Identify the files by their headers, their sizes and pages spread over their data."""
    digest = hashlib.sha256(b"headrace gguf 2")
    for part in model.parts:
        digest.update(f"\0{part.file_bytes}\0".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.header_bytes))
            for offset, length in sample_offsets(part.header_bytes, part.file_bytes):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()
