"""What every kind of checkpoint offers: configs, dense tensors by Hugging Face name, record table.

A checkpoint is opened once, with all of its headers checked; loading then only moves bytes. Owns
what the kinds share: the embedding table, widening of values, what a config says of layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from headrace import _core
from headrace.arrays import Bytes, Float32, Int32
from headrace.checkpoint.jsonfile import is_there, read_object
from headrace.checkpoint.records import RecordTable
from headrace.errors import CheckpointError, NumericError, RequestError, ShapeError

Matrix: TypeAlias = _core.Matrix
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
CHUNK_BYTES = 16 << 20
"""Dense tensors are read and packed in such pieces, so that loading needs little beside them."""
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "bf16": np.dtype("<u2"),
    "f16": np.dtype("<f2"),
    "f32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class TensorInfo:
    """A dense tensor as a model sees it."""

    format: str
    group: int
    """Inputs per scale; 1 for the floating formats."""
    shape: tuple[int, ...]
    nbytes: int
    """In memory once loaded, as a matrix if it has two dimensions, as a float32 vector if one."""


def to_float32(values: Bytes, format: str) -> Float32:
    """Widen little-endian bf16, f16 or f32 values to float32, exactly.

    Args:
        values: [..., n * itemsize] uint8, C-contiguous.
        format: "bf16", "f16" or "f32".

    Returns:
        [..., n] float32.
    """
    typed: np.ndarray[Any, Any] = values.view(NUMPY_TYPES[format])
    wide: Float32
    if format == "bf16":
        wide = (typed.astype(np.uint32) << 16).view(np.float32)
    else:
        wide = typed.astype(np.float32, copy=False)
    return wide


class EmbeddingTable:
    """Rows of the embedding by token id: `table(ids [T] int32) -> [T, D] float32`.

    The rows lie in memory as a packed matrix, in memory as row-major values, or on the drive.
    """

    def __init__(
        self, source: "_core.Matrix | Bytes | _core.RowReader", rows: int, cols: int, format: str
    ) -> None:
        """Wrap one of the three sources.

        Args:
            source: packed matrix, row-major bytes [V, row bytes], or a reader of such rows.
            rows: V.
            cols: D.
            format: of the row-major values.
        """
        self._source: Any = source
        if isinstance(source, np.ndarray):
            self._source = source.view(NUMPY_TYPES[format])
        self.shape = (rows, cols)
        self.format = format

    @property
    def is_resident(self) -> bool:
        """Whether the table is in memory."""
        return not isinstance(self._source, _core.RowReader)

    @property
    def data(self) -> Bytes | None:
        """The bytes of a table in memory, [n] uint8; None if it is not."""
        if isinstance(self._source, _core.RowReader):
            return None
        is_packed = isinstance(self._source, _core.Matrix)
        data: Bytes = self._source.data if is_packed else self._source.reshape(-1).view(np.uint8)
        return data

    @property
    def nbytes(self) -> int:
        """Bytes of memory the table holds."""
        return 0 if self.data is None else int(self.data.nbytes)

    def __call__(self, ids: Int32) -> Float32:
        """Return the rows of `ids`, [T, D] float32.

        Raises:
            RequestError: an id is outside the vocabulary.
            NumericError: a row read from the drive holds a NaN or infinity; resident tables were
                searched when they were loaded.
        """
        rows = self._source
        if isinstance(rows, _core.RowReader):
            self._require_known(ids)
            return self._read(rows, ids)
        look_up = _core.embedding_packed if isinstance(rows, _core.Matrix) else _core.embedding_rows
        try:
            return look_up(ids, rows)
        except ShapeError:
            self._require_known(ids)
            raise

    def _read(self, reader: "_core.RowReader", ids: Int32) -> Float32:
        wide = to_float32(reader.read(np.ascontiguousarray(ids, np.int32)), self.format)
        bad = np.flatnonzero(~np.isfinite(wide).all(axis=1))
        if len(bad):
            raise NumericError(
                f"embedding of token {ids[bad[0]]} is not finite\n"
                "expected finite values only, got a NaN or infinity"
            )
        return wide

    def _require_known(self, ids: Int32) -> None:
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.shape[0]):
            raise RequestError(
                f"token id is outside the vocabulary\nexpected 0..{self.shape[0] - 1}, "
                f"got {int(ids.min())}..{int(ids.max())}"
            )


class Checkpoint(ABC):
    """An opened checkpoint. `tensors` and `mtp_tensors` are dense tensors by Hugging Face name."""

    kind: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    fingerprint: str
    """Hexadecimal; changes when weights, config or tokenizer change."""
    tensors: Mapping[str, TensorInfo]
    records: RecordTable | None
    mtp_tensors: Mapping[str, TensorInfo]
    """Dense tensors of layers beyond the main model, which predict further tokens."""
    mtp_records: RecordTable | None

    num_header_items: int = 0
    """Values in arrays of a parsed header, each a Python object."""

    @property
    def tokenizer_dir(self) -> Path:
        """The directory that holds tokenizer and chat template."""
        return self.path if self.path.is_dir() else self.path.parent

    def info(self, name: str) -> TensorInfo:
        """Describe a dense tensor of the main model or its MTP layers.

        Raises:
            CheckpointError: there is none of that name.
        """
        found = self.tensors.get(name) or self.mtp_tensors.get(name)
        if found is None:
            raise CheckpointError(f"tensor is missing: {name}, checkpoint {self.path}")
        return found

    def require_readable(self, name: str) -> None:
        """Raise UnsupportedModelError if a dense tensor is of a dtype that is not read."""
        self.info(name)  # most kinds refuse such a tensor when they are opened

    def read_ahead(self, wanted: Mapping[str, str | None]) -> None:  # noqa: B027 - most kinds cannot
        """Read dense tensors together that `load_matrix`, `load_vector` or `embedding` will take.

        Kinds whose tensors have to be packed as they are read do nothing here.

        Args:
            wanted: Hugging Face name -> format it will be asked for in, None for the stored one.

        Raises:
            CheckpointError: a tensor is missing or damaged.
        """

    @abstractmethod
    def load_matrix(self, name: str, format: str | None = None) -> Matrix:
        """Load a matrix, packed.

        Args:
            name: Hugging Face name of a tensor of two dimensions.
            format: None keeps the stored format; "f32" widens a floating one, exactly.

        Raises:
            CheckpointError: missing, damaged, not a matrix, or a NaN or infinity among its values.
        """

    @abstractmethod
    def load_vector(self, name: str) -> Float32:
        """Load a vector as float32, exactly.

        Raises:
            CheckpointError: missing, damaged, not a vector, or a NaN or infinity among its values.
        """

    @abstractmethod
    def has_rows(self, name: str) -> bool:
        """Whether single rows of a table can be read; one in codes is packed and always resident.

        Raises:
            CheckpointError: there is none of that name.
        """

    @abstractmethod
    def embedding(self, name: str, resident: bool) -> EmbeddingTable:
        """Open the embedding table; without rows of its own it is always resident.

        Args:
            name: Hugging Face name.
            resident: keep it in memory; else each row is read from the drive when asked for.
        """

    def dense_nbytes(self, names: Iterable[str]) -> int:
        """Bytes of memory that the named tensors take once loaded."""
        return sum(self.info(name).nbytes for name in names)


def require_dimensions(name: str, shape: tuple[int, ...], num: int, path: Path) -> None:
    """Raise CheckpointError unless `shape` has `num` dimensions, none of them zero."""
    if len(shape) != num or 0 in shape:
        raise CheckpointError(
            f"tensor has the wrong shape: {name}, checkpoint {path}\n"
            f"expected {num} non-zero dimensions, got {list(shape)}"
        )


def read_config(path: Path) -> dict[str, Any]:
    """Read `config.json` of a checkpoint directory.

    Raises:
        CheckpointError: missing or malformed.
    """
    if not path.exists():
        raise CheckpointError(f"no such file or directory: {path}")
    if not (path / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"no {CONFIG_NAME}: {path}\n"
            "expected the directory of a Hugging Face checkpoint or a headrace container"
        )
    return read_object(path / CONFIG_NAME)


def read_generation_config(path: Path) -> dict[str, Any]:
    """Read `generation_config.json` if there is one."""
    file = path / GENERATION_CONFIG_NAME
    return read_object(file) if is_there(file) else {}


_NUM_EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_NUM_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def _config_count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise CheckpointError(
                f"malformed {CONFIG_NAME}: {key}\nexpected a count, got {str(value)[:100]!r}"
            )
        return value
    return None


def config_num_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts a config states, under any of its names."""
    return _config_count(config, _NUM_EXPERTS_KEYS)


def first_mtp_layer(config: Mapping[str, Any]) -> int | None:
    """Return the number of the first layer beyond the main model, or None if there is none."""
    layers = _config_count(config, ("num_hidden_layers",))
    return layers if layers is not None and _config_count(config, _NUM_MTP_KEYS) else None


def is_mtp_name(name: str, first_layer: int | None) -> bool:
    """Whether a tensor belongs to an MTP layer: `mtp.*`, or a layer past the main model's last."""
    if name.startswith("mtp."):
        return True
    parts = name.split(".", 3)
    return (
        first_layer is not None
        and len(parts) > 3
        and parts[:2] == ["model", "layers"]
        and parts[2].isdecimal()
        and len(parts[2]) <= 6
        and int(parts[2]) >= first_layer
    )
