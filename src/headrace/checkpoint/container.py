"""Reads a headrace container: headers, manifest and their agreement are checked when it is opened.

Nothing the manifest says is believed before it was compared with the files: every tensor it names
must lie in the file it names, with the length its shape and format imply. Owns no open file.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

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
    first_mtp_layer,
    is_mtp_name,
    read_config,
    read_generation_config,
)
from headrace.checkpoint.copies import add_copies, find_file
from headrace.checkpoint.gguf_blocks import is_held_type
from headrace.checkpoint.huggingface import TOKENIZER_FILES, open_rows
from headrace.checkpoint.jsonfile import parse_object, read_object
from headrace.checkpoint.layout import (
    DENSE_NAME,
    FORMAT_NAME,
    FORMAT_VERSION,
    KEEP,
    KEPT,
    KINDS,
    MANIFEST_NAME,
    DenseTensor,
    Recipe,
    describe_layout,
    expert_file_name,
    is_valid_format,
    record_name,
)
from headrace.checkpoint.records import (
    FLOAT_FORMATS,
    RECORD_ALIGNMENT,
    RecordLayout,
    RecordTable,
    align_up,
    make_record_layout,
)
from headrace.checkpoint.safetensors import Header, TensorEntry, read_header
from headrace.checkpoint.values import bytes_checksum, pack_range
from headrace.errors import CheckpointError, ConfigError

VECTOR_ALIGNMENT = 64
"""Of a vector in memory: what the kernels like; pages are for what direct reads fill."""
MAX_DIMENSION = (1 << 31) - 1
MAX_ELEMENTS = 1 << 44
"""Keeps every product of dimensions and value sizes within 64 bits."""


class ContainerCheckpoint(Checkpoint):
    """An opened container."""

    kind = "container"

    def __init__(self, path: Path, drives: Sequence[Path] = ()) -> None:
        """Read and check the manifest and every header.

        Args:
            path: the directory.
            drives: folders that hold files of experts moved there, or copies of records.

        Raises:
            CheckpointError: a file is missing, damaged, of another version, or disagrees with the
                manifest.
        """
        self.path = path
        self.config = read_config(path)
        self.generation_config = read_generation_config(path)
        data = _read_manifest_bytes(path)
        self.manifest = parse_object(data, str(path / MANIFEST_NAME))
        reader = _ManifestReader(path, self.manifest)
        reader.require_model_type(self.config.get("model_type"))
        self.recipe = reader.recipe()
        self.dense, self.dense_checksums = reader.dense()
        header = _open(path / DENSE_NAME)
        self.entries = _match_dense(header, self.dense)
        first_mtp = first_mtp_layer(self.config)
        infos = {
            t.name: TensorInfo(t.format, t.group, t.shape, t.nbytes) for t in self.dense.values()
        }
        self.tensors = {n: i for n, i in infos.items() if not is_mtp_name(n, first_mtp)}
        self.mtp_tensors = {n: i for n, i in infos.items() if is_mtp_name(n, first_mtp)}
        layers = reader.layers()
        main = {n: c for n, c in layers.items() if first_mtp is None or n < first_mtp}
        mtp = {n: c for n, c in layers.items() if n not in main}
        layouts = reader.layouts(layers)
        reader.require_recipe(self.recipe, self.dense, layouts)
        self.records = _record_table(path, main, layouts, drives) if main else None
        self.mtp_records = _record_table(path, mtp, layouts, drives) if mtp else None
        self.fingerprint = _fingerprint(path, data)
        if drives and self.records is not None:
            self.records = add_copies(self.records, path, drives, self.fingerprint)
        self._read: dict[str, Bytes] = {}  # read ahead, and not loaded yet

    def read_ahead(self, wanted: Mapping[str, str | None]) -> None:
        """Read tensors in the order of the file, straight to where they stay: one piece of memory,
        so that huge pages cover it whole. See `Checkpoint.read_ahead`.
        """
        names = [n for n, format in wanted.items() if format in (None, self.dense[n].format)]
        places, total = {}, 0
        for name in sorted(names, key=lambda n: self.entries[n].offset):
            is_vector = self.dense[name].kind == "vector"
            total = align_up(total, VECTOR_ALIGNMENT if is_vector else RECORD_ALIGNMENT)
            places[name] = total
            total += self.dense[name].stored_bytes
        memory: Bytes = _core.aligned_empty(total)
        requests, found = [], {}
        for name, at in places.items():
            entry, tensor = self.entries[name], self.dense[name]
            place = memory[at : at + tensor.stored_bytes]
            found[name] = place[: tensor.nbytes]
            checksum = self.dense_checksums[name]
            requests.append((name, str(entry.path), entry.offset, place, tensor.nbytes, checksum))
        _core.read_named(requests)
        self._read.update(found)  # not before all of it is known to be right

    def load_bytes(self, name: str) -> Bytes:
        """Return a dense tensor's bytes, read now if they were not read ahead."""
        self.info(name)
        if name not in self._read:
            self.read_ahead({name: None})
        return self._read.pop(name)

    def load_matrix(self, name: str, format: str | None = None) -> Matrix:
        """Load a packed matrix as stored; see `Checkpoint.load_matrix`."""
        self.info(name)
        tensor = self.dense[name]
        if tensor.kind == "vector":
            raise CheckpointError(f"tensor is not a matrix: {name}, checkpoint {self.path}")
        rows, cols = tensor.shape
        if tensor.kind == "rows":
            target = format or tensor.format
            data = _core.aligned_empty(_core.packed_bytes(target, rows, cols, 1))
            entry = self.entries[name]
            pack_range(entry.path, entry.offset, (rows, cols), tensor.format, target, 1, data, name)
            return Matrix(data, target, rows, cols, 1)
        matrix = Matrix(self.load_bytes(name), tensor.format, rows, cols, tensor.group)
        if format is None or format == tensor.format:
            return matrix
        return Matrix(_core.pack(_core.unpack(matrix), format, 1), format, rows, cols, 1)

    def load_vector(self, name: str) -> Float32:
        """Load a vector; see `Checkpoint.load_vector`."""
        self.info(name)
        if self.dense[name].kind != "vector":
            raise CheckpointError(f"tensor is not a vector: {name}, checkpoint {self.path}")
        return self.load_bytes(name).view(np.float32)

    def has_rows(self, name: str) -> bool:
        """See `Checkpoint.has_rows`."""
        self.info(name)
        return self.dense[name].kind == "rows"

    def embedding(self, name: str, resident: bool) -> EmbeddingTable:
        """Open the embedding table; see `Checkpoint.embedding`."""
        self.info(name)
        tensor = self.dense[name]
        if tensor.kind == "vector":
            raise CheckpointError(f"tensor is not a matrix: {name}, checkpoint {self.path}")
        rows, cols = tensor.shape
        if tensor.kind == "matrix":
            return EmbeddingTable(self.load_matrix(name), rows, cols, tensor.format)
        if not resident:
            return open_rows(self.entries[name], tensor.format, resident=False)
        data = self.load_bytes(name).reshape(rows, -1)
        return EmbeddingTable(data, rows, cols, tensor.format)


def check_bytes(data: Bytes, expected: int, what: str, path: Path, offset: int) -> None:
    """Raise CheckpointError unless the bytes have the checksum that was stored for them."""
    got = bytes_checksum(data)
    if got != expected:
        raise CheckpointError(
            f"checksum differs: {what}, file {path}\n"
            f"expected {expected:016x} for {data.nbytes} bytes at offset {offset}, got {got:016x}\n"
            "hint: the file is damaged; convert the model again"
        )


def is_container(path: Path) -> bool:
    """Whether a directory claims to be a container."""
    return (path / MANIFEST_NAME).is_file()


def _read_manifest_bytes(path: Path) -> bytes:
    read_object(path / MANIFEST_NAME)  # checks the length before anything is kept
    return (path / MANIFEST_NAME).read_bytes()


def _fingerprint(path: Path, manifest: bytes) -> str:
    """Identify the model: the manifest holds a checksum of every weight."""
    digest = hashlib.sha256(b"headrace container 1\0" + manifest)
    for name in (CONFIG_NAME, *TOKENIZER_FILES):
        file = path / name
        digest.update(f"\0{name}\0{file.is_file()}\0".encode())
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _open(path: Path) -> Header:
    header = read_header(path)
    if header.data_start % RECORD_ALIGNMENT:
        raise CheckpointError(
            f"data are not aligned: {path}\n"
            f"expected their start at a multiple of {RECORD_ALIGNMENT}, got {header.data_start}"
        )
    return header


def _match_dense(header: Header, dense: Mapping[str, DenseTensor]) -> Mapping[str, TensorEntry]:
    if header.tensors.keys() != dense.keys():
        strange = sorted(header.tensors.keys() ^ dense.keys())
        raise CheckpointError(
            f"{MANIFEST_NAME} and {header.path.name} name different tensors: {header.path}\n"
            f"first: {strange[0]}"
        )
    for name, entry in header.tensors.items():
        tensor = dense[name]
        if entry.nbytes != tensor.stored_bytes:
            raise CheckpointError(
                f"tensor has the wrong length: {name}, file {header.path}\n"
                f"expected {tensor.stored_bytes} bytes by {MANIFEST_NAME}, got {entry.nbytes}"
            )
        _require_header(entry, tensor.stored_dtype, tensor.stored_shape)
    return header.tensors


def _require_header(entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> None:
    if entry.dtype != dtype or entry.shape != shape:
        raise CheckpointError(
            f"tensor has the wrong dtype or shape: {entry.name}, file {entry.path}\n"
            f"expected {dtype} {list(shape)} by {MANIFEST_NAME}, "
            f"got {entry.dtype} {list(entry.shape)}"
        )


def _record_table(
    path: Path,
    layers: Mapping[int, list[int]],
    layouts: Mapping[int, RecordLayout],
    drives: Sequence[Path],
) -> RecordTable:
    """Find every record of `layers` (layer -> checksums) in its file."""
    num_experts = len(next(iter(layers.values())))
    shape = (len(layers), num_experts, 1)
    offset = np.empty(shape, np.int64)
    files: list[Path] = []
    for i, layer in enumerate(layers):
        record_bytes = layouts[layer].record_bytes
        header = _open(find_file(path, expert_file_name(layer), drives))
        files.append(header.path)
        names = [record_name(layer, e) for e in range(num_experts)]
        if header.tensors.keys() != set(names):
            strange = sorted(header.tensors.keys() ^ set(names))
            raise CheckpointError(
                f"records do not form a full set: {header.path}\n"
                f"expected {num_experts} of layer {layer}, got {len(header.tensors)}; "
                f"first missing or unexpected: {strange[0]}"
            )
        for expert, name in enumerate(names):
            entry = header.tensors[name]
            if entry.nbytes != record_bytes or entry.offset % RECORD_ALIGNMENT:
                raise CheckpointError(
                    f"record is misplaced: {name}, file {header.path}\n"
                    f"expected {record_bytes} bytes at a multiple of {RECORD_ALIGNMENT}, "
                    f"got {entry.nbytes} at {entry.offset}"
                )
            _require_header(entry, "U8", (record_bytes,))
            offset[i, expert, 0] = entry.offset
    sizes = np.array([layouts[layer].record_bytes for layer in layers], np.int64)
    file = np.broadcast_to(np.arange(len(layers), dtype=np.int32)[:, None, None], shape)
    return RecordTable(
        files=tuple(files),
        layers=tuple(layers),
        num_experts=num_experts,
        layouts=tuple(layouts[layer] for layer in layers),
        repack=None,
        file=np.ascontiguousarray(file),
        offset=offset,
        length=np.broadcast_to(sizes[:, None, None], shape).copy(),
        checksum=np.array(list(layers.values()), np.uint64),
    )


class _ManifestReader:
    """Takes the manifest apart, trusting no type and no number."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.file = path / MANIFEST_NAME
        self.manifest = manifest
        if manifest.get("format") != FORMAT_NAME:
            raise self.error("format", repr(FORMAT_NAME), manifest.get("format"))
        version = manifest.get("version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise CheckpointError(
                f"container has another format version: {self.file}\n"
                f"expected {FORMAT_VERSION}, got {str(version)[:40]}\n"
                "hint: update headrace, or convert the model again with this version"
            )

    def error(self, key: str, expected: str, got: Any) -> CheckpointError:
        """Make the message for one bad field."""
        return CheckpointError(
            f"malformed {MANIFEST_NAME}: {key}, file {self.file}\n"
            f"expected {expected}, got {repr(got)[:100]}"
        )

    def object(self, parent: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any]:
        """Return the object `parent[key]`."""
        value = parent.get(key)
        if not isinstance(value, dict):
            raise self.error(where + key, "an object", value)
        return value

    def require_model_type(self, expected: Any) -> None:
        """Raise CheckpointError unless the manifest names the architecture that the config does."""
        got = self.manifest.get("model_type")
        if got != expected:
            raise self.error("model_type", f"{str(expected)[:100]!r} as in {CONFIG_NAME}", got)

    def require_recipe(
        self,
        recipe: Recipe,
        dense: Mapping[str, DenseTensor],
        layouts: Mapping[int, RecordLayout],
    ) -> None:
        """Raise CheckpointError unless every matrix is stored as the recipe says.

        Routers keep the source's floating format whatever the recipe; so may any dense matrix. What
        a source had quantised may be kept as it was, and is in a recipe that says `keep`; GGUF has
        embedding tables in any format, which no recipe changes.
        """
        if KEEP in recipe.formats or self.object(self.manifest, "source").get("kind") == "gguf":
            return
        ruled = {(rule.format, rule.group) for rule in recipe.rules}
        for matrix in (m for layout in set(layouts.values()) for m in layout.matrices):
            expected = (recipe.experts, recipe.group_of(recipe.experts))
            got = (matrix.format, matrix.group)
            if matrix.format not in KEPT and got != expected and got not in ruled:
                raise self.error("experts.layout", f"{expected} by the recipe", got)
        exact = {(format, 1) for format in FLOAT_FORMATS.values()}
        allowed = exact | ruled | {(recipe.dense, recipe.group_of(recipe.dense))}
        if recipe.head is not None:
            allowed.add((recipe.head, recipe.group_of(recipe.head)))
        for tensor in dense.values():
            if tensor.kind != "matrix" or tensor.format in KEPT:
                continue
            if (tensor.format, tensor.group) not in allowed:
                expected = (recipe.dense, recipe.group_of(recipe.dense))
                where = f"dense.tensors.{tensor.name}"
                raise self.error(where, f"{expected} by the recipe", (tensor.format, tensor.group))

    def recipe(self) -> Recipe:
        """Return how the weights were stored."""
        content = self.object(self.manifest, "recipe")
        if not content.keys() >= {"experts", "dense", "group"}:
            raise self.error("recipe", "experts, dense and group", sorted(content))
        try:
            return Recipe.read(content)
        except ConfigError as error:
            raise self.error("recipe", "a recipe", str(error)) from None

    def dense(self) -> tuple[dict[str, DenseTensor], dict[str, int]]:
        """Return the dense tensors and their checksums, by name."""
        part = self.object(self.manifest, "dense")
        if part.get("file") != DENSE_NAME:
            raise self.error("dense.file", DENSE_NAME, part.get("file"))
        tensors, checksums = {}, {}
        content = self.object(part, "tensors", "dense.")
        for name in content:
            where = f"dense.tensors.{name}"
            value = self.object(content, name, "dense.tensors.")
            kind, shape = value.get("kind"), value.get("shape")
            if kind not in KINDS:
                raise self.error(f"{where}.kind", " or ".join(KINDS), kind)
            dimensions = 1 if kind == "vector" else 2
            if (
                not isinstance(shape, list)
                or len(shape) != dimensions
                or not all(self.is_dimension(n) for n in shape)
                or prod(shape) > MAX_ELEMENTS
            ):
                raise self.error(f"{where}.shape", f"{dimensions} positive counts", shape)
            tensors[name] = self.tensor(name, where, value, kind, tuple(shape))
            checksums[name] = self.checksum(f"{where}.checksum", value.get("checksum"))
        return tensors, checksums

    def tensor(
        self, name: str, where: str, value: Mapping[str, Any], kind: str, shape: tuple[int, ...]
    ) -> DenseTensor:
        """Return one dense tensor, its length compared with what shape and format imply."""
        format, group = value.get("format"), value.get("group")
        floating = kind != "matrix"
        if not is_valid_format(format, group) or (floating and format not in NUMPY_TYPES):
            raise self.error(f"{where}.format", "a format and its group", (format, group))
        if kind == "vector" and format != "f32":
            raise self.error(f"{where}.format", "f32 for a vector", format)
        type = self.type(where, value)
        tensor = DenseTensor(name, kind, str(format), int(value["group"]), shape, type)
        if value.get("nbytes") != tensor.nbytes:
            raise self.error(f"{where}.nbytes", str(tensor.nbytes), value.get("nbytes"))
        return tensor

    def type(self, where: str, matrix: Mapping[str, Any]) -> str | None:
        """Return the GGUF type that a matrix says its codes came from."""
        if "type" not in matrix:
            return None
        type, format, group = matrix["type"], matrix["format"], matrix["group"]
        if not is_held_type(type, format, group):
            raise self.error(f"{where}.type", f"a GGUF type that {format} of {group} holds", type)
        return str(type)

    @staticmethod
    def is_dimension(value: Any) -> bool:
        """Whether a value is a positive 31-bit integer."""
        return type(value) is int and 0 < value <= MAX_DIMENSION

    def checksum(self, where: str, value: Any) -> int:
        """Return a checksum written as 16 hexadecimal digits."""
        if not isinstance(value, str) or len(value) != 16 or set(value) - set("0123456789abcdef"):
            raise self.error(where, "16 lower-case hexadecimal digits", value)
        return int(value, 16)

    def layers(self) -> dict[int, list[int]]:
        """Return the checksums of every layer's records, by ascending layer; empty if dense."""
        if self.manifest.get("experts") is None:
            return {}
        experts = self.object(self.manifest, "experts")
        num_experts = experts.get("num_experts")
        if not self.is_dimension(num_experts):
            raise self.error("experts.num_experts", "a positive count", num_experts)
        content = self.object(experts, "layers", "experts.")
        if not content:
            raise self.error("experts.layers", "at least one layer", content)
        result = {}
        for key in content:
            where = f"experts.layers.{key}"
            if not key.isascii() or not key.isdecimal() or len(key) > 6 or str(int(key)) != key:
                raise self.error("experts.layers", "layer numbers as keys", key)
            value = self.object(content, key, "experts.layers.")
            if value.get("file") != expert_file_name(int(key)):
                raise self.error(f"{where}.file", expert_file_name(int(key)), value.get("file"))
            checksums = value.get("checksums")
            if not isinstance(checksums, list) or len(checksums) != num_experts:
                raise self.error(f"{where}.checksums", f"{num_experts} checksums", checksums)
            result[int(key)] = [self.checksum(f"{where}.checksums", c) for c in checksums]
        return dict(sorted(result.items()))

    def layouts(self, layers: Collection[int]) -> dict[int, RecordLayout]:
        """Return how the records of each layer lie: as the model's, or as its own entry says, with
        matrices of the same shapes.
        """
        if not layers:
            return {}
        experts = self.object(self.manifest, "experts")
        common = self._layout(experts, "experts.")
        found = dict.fromkeys(layers, common)
        for layer in layers:
            entry, where = experts["layers"][str(layer)], f"experts.layers.{layer}."
            if "layout" in entry:
                found[layer] = own = self._layout(entry, where)
                shapes = [[(m.rows, m.cols) for m in one.matrices] for one in (common, own)]
                if shapes[0] != shapes[1]:
                    raise self.error(f"{where}layout", f"matrices of {shapes[0]}", shapes[1])
        return found

    def _layout(self, parent: Mapping[str, Any], where: str) -> RecordLayout:
        """Return `parent["layout"]`, which must be the one its dimensions imply."""
        content = self.object(parent, "layout", where)
        where += "layout"
        parts = {r: self.object(content, r, f"{where}.") for r in ("gate", "up", "down")}
        gate = parts["gate"]
        inner, hidden = gate.get("rows"), gate.get("cols")
        if (
            not self.is_dimension(inner)
            or not self.is_dimension(hidden)
            or prod((int(gate["rows"]), int(gate["cols"]))) > MAX_ELEMENTS
        ):
            raise self.error(f"{where}.gate", "positive rows and cols", gate)
        stored, types = {}, {}
        for role, part in parts.items():
            format, group = part.get("format"), part.get("group")
            if not is_valid_format(format, group):
                raise self.error(f"{where}.{role}", "a format and its group", (format, group))
            stored[role] = (str(format), int(part["group"]))
            types[role] = self.type(f"{where}.{role}", part)
        layout = make_record_layout(
            int(gate["cols"]), int(gate["rows"]), *stored["gate"], stored, types
        )
        if content != describe_layout(layout):
            raise self.error(where, str(describe_layout(layout)), content)
        return layout
