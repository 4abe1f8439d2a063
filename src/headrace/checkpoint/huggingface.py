"""A Hugging Face directory of safetensors, run in place: nothing is converted, values stay exact.

Dense matrices are interleaved while they are loaded; experts stay where they are and are described
as row-major ranges. Files are only read.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headrace import _core
from headrace.arrays import Bytes, Float32
from headrace.checkpoint.base import (
    CONFIG_NAME,
    NUMPY_TYPES,
    Checkpoint,
    EmbeddingTable,
    Matrix,
    TensorInfo,
    config_num_experts,
    first_mtp_layer,
    is_mtp_name,
    read_config,
    read_generation_config,
    require_dimensions,
    to_float32,
)
from headrace.checkpoint.hf_coded import CodedExperts, make_coded_table, split_coded
from headrace.checkpoint.hf_fused import split_fused
from headrace.checkpoint.hf_fused_ranges import FusedLayers, make_fused_table, split_ranges
from headrace.checkpoint.hf_quantised import find_quantised
from headrace.checkpoint.jsonfile import is_there
from headrace.checkpoint.records import (
    FLOAT_FORMATS,
    ExpertNames,
    ExpertTensors,
    RecordTable,
    expert_regex,
    group_experts,
    make_in_place_table,
)
from headrace.checkpoint.safetensors import Header, TensorEntry, read_directory
from headrace.checkpoint.values import check_finite, pack_range, read_range
from headrace.errors import CheckpointError, UnsupportedModelError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 4096


class HuggingFaceCheckpoint(Checkpoint):
    """An opened directory with config.json and safetensors shards."""

    kind = "huggingface"

    def __init__(self, path: Path, expert_names: ExpertNames | None) -> None:
        """Read and check every header.

        Args:
            path: the directory.
            expert_names: how the architecture names its experts; None for a dense model.

        Raises:
            CheckpointError: what `read_directory` raises, or experts that form no full set.
            UnsupportedModelError: experts in a dtype that is not read, or stored in several ways.
        """
        self.path = path
        self.config = read_config(path)
        self.generation_config = read_generation_config(path)
        headers = read_directory(path)
        self.entries: dict[str, TensorEntry] = {}
        for header in headers:
            self.entries.update(header.tensors)
        self.experts: ExpertTensors = {}
        self.coded_experts: CodedExperts = {}
        self.fused_ranges: FusedLayers = {}
        regex = None if expert_names is None else expert_regex(expert_names)
        self.quantised, plain = find_quantised(self.config, self.entries, regex)
        self._dense: Mapping[str, TensorEntry] = plain
        if expert_names is not None:
            self.coded_experts, self.quantised = split_coded(self.quantised, expert_names)
            self.fused_ranges, plain = split_ranges(plain)
            fused, rest = split_fused(plain, expert_names)
            single, self._dense = group_experts(rest, expert_names)
            self.experts = _join(fused, single, path)
        first_mtp = first_mtp_layer(self.config)
        num_experts = config_num_experts(self.config)
        layers = {*self.experts, *self.coded_experts, *self.fused_ranges}
        main = sorted(n for n in layers if first_mtp is None or n < first_mtp)
        mtp = sorted(layers - set(main))
        if expert_names is not None and not main:
            raise CheckpointError(
                f"no experts: {path}\nexpected tensors named like {expert_names.pattern}"
            )
        self.records = self._make_table(main, num_experts) if main else None
        self.mtp_records = self._make_table(mtp, num_experts) if mtp else None
        infos = {name: _describe(entry) for name, entry in self._dense.items()}
        infos |= {name: matrix.info() for name, matrix in self.quantised.items()}
        self.tensors = {n: i for n, i in infos.items() if not is_mtp_name(n, first_mtp)}
        self.mtp_tensors = {n: i for n, i in infos.items() if is_mtp_name(n, first_mtp)}
        self.fingerprint = _fingerprint(path, headers)

    def _make_table(self, layers: list[int], num_experts: int | None) -> RecordTable:
        """Describe experts that are all stored as values, or all in codes."""
        ways: Mapping[str, Mapping[int, object]] = {
            "values": self.experts, "codes": self.coded_experts, "fused": self.fused_ranges
        }  # fmt: skip
        found = {way: [n for n in layers if n in experts] for way, experts in ways.items()}
        first = [f"{way} in layer {own[0]}" for way, own in found.items() if own]
        if len(first) > 1 or sum(map(len, found.values())) > len(layers):
            raise UnsupportedModelError(
                f"experts are stored in several ways: {self.path}\n"
                f"expected one way in all layers, got {' and '.join(first)}"
            )
        if found["fused"]:
            alternate = self.config.get("model_type") == "gpt_oss"
            return make_fused_table(self.fused_ranges, layers, num_experts, alternate)
        if found["codes"]:
            return make_coded_table(self.coded_experts, layers, num_experts)
        return make_in_place_table(self.experts, layers, num_experts)

    def layer_table(self, layer: int) -> RecordTable:
        """Describe one layer's experts again: its factors are read now, not when it was opened."""
        return self._make_table([layer], config_num_experts(self.config))

    def factor_entries(self, layer: int) -> list[TensorEntry]:
        """Return where the numbers lie that all scales of an expert's matrix share."""
        matrices = [m for by_role in self.coded_experts[layer].values() for m in by_role.values()]
        return [entry for m in matrices if (entry := m.factor_entry) is not None]

    def entry(self, name: str) -> TensorEntry:
        """Return where a dense tensor of a floating dtype lies.

        Raises:
            CheckpointError: there is none of that name.
            UnsupportedModelError: its dtype is not bf16, f16 or f32.
        """
        self.info(name)
        if name in self.quantised:
            raise UnsupportedModelError(
                f"tensor is quantised ({self.quantised[name].method}): {name}, checkpoint "
                f"{self.path}\nexpected BF16, F16 or F32 here; matrices run in place as they are"
            )
        entry = self._dense[name]
        if entry.dtype not in FLOAT_FORMATS:
            raise UnsupportedModelError(
                f"tensor has dtype {entry.dtype}: {name}, file {entry.path}\n"
                "expected BF16, F16 or F32"
            )
        return entry

    def entries_of(self, name: str) -> list[TensorEntry]:
        """Return where the stored tensors lie that make up a dense tensor; as `entry`."""
        if name in self.quantised:
            return list(self.quantised[name].parts.values())
        return [self.entry(name)]

    def require_readable(self, name: str) -> None:
        """See `Checkpoint.require_readable`; an unused tensor may be of any dtype."""
        if name not in self.quantised:
            self.entry(name)

    def load_matrix(self, name: str, format: str | None = None) -> Matrix:
        """Load and interleave a matrix; see `Checkpoint.load_matrix`."""
        if name in self.quantised and format is None:
            return self.quantised[name].load()
        entry = self.entry(name)
        require_dimensions(name, entry.shape, 2, self.path)
        rows, cols = entry.shape
        source = FLOAT_FORMATS[entry.dtype]
        target = format or source
        data = _core.aligned_empty(_core.packed_bytes(target, rows, cols, 1))
        pack_range(entry.path, entry.offset, (rows, cols), source, target, 1, data, name)
        return Matrix(data, target, rows, cols, 1)

    def load_vector(self, name: str) -> Float32:
        """Load a vector; see `Checkpoint.load_vector`."""
        entry = self.entry(name)
        require_dimensions(name, entry.shape, 1, self.path)
        data = np.empty(entry.nbytes, np.uint8)
        read_range(entry.path, entry.offset, data)
        check_finite(data, FLOAT_FORMATS[entry.dtype], name, entry.path)
        return to_float32(data, FLOAT_FORMATS[entry.dtype])

    def has_rows(self, name: str) -> bool:
        """See `Checkpoint.has_rows`."""
        self.info(name)
        return name not in self.quantised

    def embedding(self, name: str, resident: bool) -> EmbeddingTable:
        """Open the embedding table; see `Checkpoint.embedding`."""
        if not self.has_rows(name):
            matrix = self.load_matrix(name)
            return EmbeddingTable(matrix, matrix.rows, matrix.cols, matrix.format)
        entry = self.entry(name)
        require_dimensions(name, entry.shape, 2, self.path)
        return open_rows(entry, FLOAT_FORMATS[entry.dtype], resident)


def open_rows(entry: TensorEntry, format: str, resident: bool) -> EmbeddingTable:
    """Open a row-major table of [V, D] values, in memory or by row from the drive."""
    rows, cols = entry.shape
    row_bytes = cols * NUMPY_TYPES[format].itemsize
    if not resident:
        reader = _core.RowReader(str(entry.path), entry.offset, row_bytes, rows)
        return EmbeddingTable(reader, rows, cols, format)
    data: Bytes = _core.aligned_empty(entry.nbytes)
    read_range(entry.path, entry.offset, data)
    check_finite(data, format, entry.name, entry.path)
    return EmbeddingTable(data.reshape(rows, row_bytes), rows, cols, format)


def _join(fused: ExpertTensors, single: ExpertTensors, path: Path) -> ExpertTensors:
    both = sorted(set(fused) & set(single))
    if both:
        raise CheckpointError(
            f"experts of layer {both[0]} are there twice: {path}\n"
            "expected them fused in one tensor or one by one, got both"
        )
    return {**fused, **single}


def _describe(entry: TensorEntry) -> TensorInfo:
    format = FLOAT_FORMATS.get(entry.dtype, entry.dtype)
    nbytes = entry.nbytes
    if entry.dtype in FLOAT_FORMATS:
        if len(entry.shape) == 2 and nbytes:
            nbytes = _core.packed_bytes(format, *entry.shape, 1)
        elif len(entry.shape) == 1:
            nbytes = 4 * entry.shape[0]
    return TensorInfo(format, 1, entry.shape, nbytes)


def _fingerprint(path: Path, headers: list[Header]) -> str:
    """Identify a checkpoint without reading all of it.

    Covers config, tokenizer files, every header and, of each shard, its size and SAMPLES_PER_FILE
    pages spread over its data. Times and places do not enter, so that a copy is the same model.
    """
    digest = hashlib.sha256(b"headrace huggingface 1")
    for name in (CONFIG_NAME, *TOKENIZER_FILES):
        file = path / name
        digest.update(f"\0{name}\0{file.is_file()}\0".encode())
        if file.is_file():
            digest.update(file.read_bytes())
    for header in headers:
        _update_with_shard(digest, header)
    return digest.hexdigest()


def _update_with_shard(digest: "hashlib._Hash", header: Header) -> None:
    digest.update(f"\0{header.path.name}\0{header.file_bytes}\0".encode())
    with header.path.open("rb") as file:
        digest.update(file.read(header.data_start))
        for offset, length in sample_offsets(header.data_start, header.file_bytes):
            file.seek(offset)
            digest.update(file.read(length))


def sample_offsets(data_start: int, file_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the pages of a shard that its fingerprint covers."""
    data_bytes = file_bytes - data_start
    spread = max(0, data_bytes - SAMPLE_BYTES)
    return [
        (data_start + spread * i // SAMPLES_PER_FILE, min(SAMPLE_BYTES, data_bytes))
        for i in range(SAMPLES_PER_FILE)
    ]


def tokenizer_files(path: Path) -> Mapping[str, Path]:
    """Return the tokenizer and template files that a checkpoint directory has, by name."""
    return {name: path / name for name in TOKENIZER_FILES if is_there(path / name)}
