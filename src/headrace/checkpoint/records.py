"""Where every expert's bytes lie: record layouts and the table of byte ranges.

A record is one expert of one layer. Packed, it is one aligned range of one file; in place it is
a range for each tensor that its three matrices are stored as, which the reader packs. The store and
the models read these tables and never ask where they came from. Owns no bytes.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace import _core
from headrace.arrays import Float32, Int32, Int64, UInt64
from headrace.checkpoint.safetensors import TensorEntry
from headrace.errors import CheckpointError, UnsupportedModelError

RECORD_ALIGNMENT = 4096
MATRIX_ALIGNMENT = 64
EXPERT_ROLES = ("gate", "up", "down")
"""The matrices of an expert, in the order of a record."""
PLAIN_ROWS = -1
"""In place of a GGUF tensor type: rows of values in the record's own floating format."""
GATE_UP_ROWS, GATE_UP_HALVES, GATE_UP_COLUMNS = 3, 4, 5
"""In place of a matrix: a tensor of gate and up, whose rows of outputs alternate, or whose rows of
inputs hold gate's outputs before up's, or both in turn; see `GateUp` in native/kernels/coded.h."""
FLOAT_FORMATS: Mapping[str, str] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
"""safetensors dtype -> format."""


def align_up(value: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class MatrixLayout:
    """One packed matrix inside a record."""

    format: str
    group: int
    """Inputs per scale; 1 for the floating formats."""
    rows: int
    cols: int
    offset: int
    """From the record's start, a multiple of 64."""
    nbytes: int
    type: str | None = None
    """The GGUF tensor type that its codes came from, where the format does not tell."""


@dataclass(frozen=True)
class RecordLayout:
    """The matrices of a record, down last: computing can begin before it is read."""

    gate: MatrixLayout
    up: MatrixLayout
    down: MatrixLayout
    record_bytes: int
    """A multiple of 4096."""

    @property
    def matrices(self) -> tuple[MatrixLayout, MatrixLayout, MatrixLayout]:
        """Gate, up and down, in the order of their bytes."""
        return self.gate, self.up, self.down


def make_record_layout(
    hidden_size: int,
    inner_size: int,
    format: str,
    group: int,
    by_role: Mapping[str, tuple[str, int]] | None = None,
    types: Mapping[str, str | None] | None = None,
) -> RecordLayout:
    """Lay out a SwiGLU expert.

    Args:
        hidden_size: D; gate and up are [F, D], down is [D, F].
        inner_size: F.
        format: packed format of all three matrices.
        group: inputs per scale; 1 for the floating formats.
        by_role: format and group of "gate", "up" or "down" where another one.
        types: the GGUF type of "gate", "up" or "down" where the format does not tell.
    """
    matrices, offset = [], 0
    wide, narrow = (inner_size, hidden_size), (hidden_size, inner_size)
    for role, (rows, cols) in (("gate", wide), ("up", wide), ("down", narrow)):
        own, own_group = (by_role or {}).get(role, (format, group))
        nbytes = _core.packed_bytes(own, rows, cols, own_group)
        type = (types or {}).get(role)
        matrices.append(MatrixLayout(own, own_group, rows, cols, offset, nbytes, type))
        offset = align_up(offset + nbytes, MATRIX_ALIGNMENT)
    gate, up, down = matrices
    return RecordLayout(gate, up, down, align_up(offset, RECORD_ALIGNMENT))


@dataclass(frozen=True)
class StoredTensor:
    """What one of the tensors of an expert's matrix holds; see `native/kernels/coded.h`."""

    matrix: int
    """0 gate, 1 up, 2 down, or one of the three that gate and up share."""
    kind: str
    scales: str
    """How scales are written: "f32", "f16", "bf16", "e8m0" or "e4m3"."""
    factor: str
    """Whether a number of the matrix "multiplies" or "divides" its scales, or "none"."""
    group: int
    """Inputs that share a scale in the file."""
    zero_offset: int
    """Added to stored zero points."""


@dataclass(frozen=True, eq=False)
class RecordTable:
    """Byte ranges of all records. P is 1 for packed records and 3 (gate, up, down) in place.

    In place it is more where a matrix is stored as several tensors: then it is len(coded).
    """

    files: tuple[Path, ...]
    layers: tuple[int, ...]
    """Layer numbers of the model that have experts, ascending; Lm of them."""
    num_experts: int
    layouts: tuple[RecordLayout, ...]
    """[Lm], of each layer's records: one shape, but formats, and so sizes, of the layer's own."""
    repack: str | None
    """None: packed records. "bf16", "f16", "f32": row-major ranges that the reader interleaves.
    "gguf": rows of blocks, which `encoding` names, that the reader repacks. Else the method of
    the tensors that `coded` describes."""
    file: Int32
    """[Lm, E, P], index into `files`."""
    offset: Int64
    """[Lm, E, P]"""
    length: Int64
    """[Lm, E, P]"""
    checksum: UInt64 | None
    """[Lm, E], of the record's range; None in place."""
    drives: tuple[Path, ...] = ()
    """Folders of the drives if there are several, the model's own first."""
    drive_of_file: tuple[int, ...] = ()
    """Index into `drives` of each file; empty: one drive."""
    copies: Int64 = dataclasses.field(default_factory=lambda: np.empty((0, 3), np.int64))
    """[C, 3]: record (row * E + expert), file and offset of each copy of a packed record."""
    encoding: Int32 | None = None
    """[Lm, 3], GGUF tensor type of each matrix, PLAIN_ROWS for values; None: all are values."""
    coded: tuple[StoredTensor, ...] = ()
    """What each range of a record in codes holds; empty: a matrix is one range."""
    factors: Float32 | None = None
    """[Lm, E, 3], the number that all scales of a matrix share; None: there are none."""

    @property
    def num_records(self) -> int:
        """Lm * E."""
        return len(self.layers) * self.num_experts

    @property
    def read_bytes(self) -> int:
        """Bytes one record takes from the drive, without the alignment of its ranges; the mean over
        layers where they differ.
        """
        return int(self.length[:, 0].sum()) // len(self.layers)

    @property
    def shape(self) -> RecordLayout:
        """A layout for what is the same in all layers: the rows and columns of its matrices."""
        return self.layouts[0]

    @property
    def record_bytes(self) -> int:
        """Bytes of the largest record, and so of a slot."""
        return max(layout.record_bytes for layout in self.layouts)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of its matrices, each once."""
        return tuple(dict.fromkeys(m.format for one in self.layouts for m in one.matrices))

    def layout_of(self, layer: int) -> RecordLayout:
        """Return how the records of one of `layers` lie."""
        return self.layouts[self.layers.index(layer)]


class ExpertNames(Protocol):
    """How an architecture names the matrices of its experts."""

    @property
    def pattern(self) -> str:
        """Name with the fields {layer}, {expert} and {proj}."""

    @property
    def gate(self) -> str:
        """{proj} of the gate matrix."""

    @property
    def up(self) -> str:
        """{proj} of the up matrix."""

    @property
    def down(self) -> str:
        """{proj} of the down matrix."""


def expert_regex(names: ExpertNames) -> re.Pattern[str]:
    """Compile a pattern that matches exactly the names of expert matrices.

    Layer and expert are plain decimal numbers without leading zeros, at most six digits.
    """
    text = re.escape(names.pattern)
    for field in ("layer", "expert"):
        text = text.replace(rf"\{{{field}\}}", rf"(?P<{field}>0|[1-9][0-9]{{0,5}})", 1)
    projections = "|".join(re.escape(p) for p in (names.gate, names.up, names.down))
    return re.compile(text.replace(r"\{proj\}", f"(?P<proj>{projections})", 1))


ExpertTensors = dict[int, dict[int, dict[str, TensorEntry]]]
"""layer -> expert -> "gate" | "up" | "down" -> tensor."""


def group_experts(
    tensors: Mapping[str, TensorEntry], names: ExpertNames
) -> tuple[ExpertTensors, dict[str, TensorEntry]]:
    """Split tensors into expert matrices, by layer, expert and role, and the dense rest."""
    regex = expert_regex(names)
    role_of = {names.gate: "gate", names.up: "up", names.down: "down"}
    experts: ExpertTensors = {}
    dense: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        match = regex.fullmatch(name)
        if match is None:
            dense[name] = entry
            continue
        layer = experts.setdefault(int(match["layer"]), {})
        layer.setdefault(int(match["expert"]), {})[role_of[match["proj"]]] = entry
    return experts, dense


def check_experts(experts: ExpertTensors, num_experts: int | None) -> tuple[int, str, int, int]:
    """Check that every layer has the same complete set of experts, all of one shape and dtype.

    Args:
        experts: at least one layer.
        num_experts: what the config says, or None to take the first layer's number.

    Returns:
        num_experts, format, hidden_size, inner_size.

    Raises:
        CheckpointError: an expert or a matrix is missing or too many, or its shape differs.
        UnsupportedModelError: the dtype is not bf16, f16 or f32.
    """
    first_layer = experts[min(experts)]
    first = first_layer[min(first_layer)]
    sample = first.get("gate") or next(iter(first.values()))
    if num_experts is None:
        num_experts = len(first_layer)
    if sample.dtype not in FLOAT_FORMATS:
        raise UnsupportedModelError(
            f"expert tensor has dtype {sample.dtype}: {sample.name}, file {sample.path}\n"
            "expected BF16, F16 or F32"
        )
    if "gate" not in first or len(sample.shape) != 2 or 0 in sample.shape:
        raise CheckpointError(
            f"expert has no usable gate matrix: {sample.name}, file {sample.path}\n"
            f"expected two dimensions, got {list(sample.shape)}"
        )
    inner, hidden = sample.shape
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer, by_expert in sorted(experts.items()):
        require_full_set(set(by_expert), num_experts, layer, sample.path.parent)
        for expert, by_role in by_expert.items():
            for role, shape in shapes.items():
                _check_matrix(by_role.get(role), layer, expert, role, shape, sample)
    return num_experts, FLOAT_FORMATS[sample.dtype], hidden, inner


def require_full_set(found: set[int], num_experts: int, layer: int, folder: Path) -> None:
    """Raise CheckpointError unless the experts of a layer are 0 .. num_experts - 1."""
    strange = found ^ set(range(num_experts))
    if strange:
        raise CheckpointError(
            f"experts do not form a full set: layer {layer}, file {folder}\n"
            f"expected {num_experts} experts, got {len(found)}; "
            f"first missing or unexpected: expert {min(strange)}"
        )


def _check_matrix(
    entry: TensorEntry | None,
    layer: int,
    expert: int,
    role: str,
    shape: tuple[int, int],
    sample: TensorEntry,
) -> None:
    if entry is None:
        raise CheckpointError(
            f"tensor is missing: {role} matrix of layer {layer}, expert {expert}\n"
            f"in {sample.path.parent}"
        )
    if entry.shape != shape or entry.dtype != sample.dtype:
        raise CheckpointError(
            f"tensor has the wrong shape or dtype: {entry.name}, file {entry.path}\n"
            f"expected {sample.dtype} {list(shape)}, got {entry.dtype} {list(entry.shape)}"
        )


def make_in_place_table(
    experts: ExpertTensors, layers: Sequence[int], num_experts: int | None
) -> RecordTable:
    """Describe the experts of `layers` as three row-major ranges each.

    Raises:
        CheckpointError, UnsupportedModelError: as `check_experts`.
    """
    chosen = {layer: experts[layer] for layer in layers}
    num_experts, format, hidden, inner = check_experts(chosen, num_experts)
    paths = sorted({e.path for x in chosen.values() for r in x.values() for e in r.values()})
    index = {path: i for i, path in enumerate(paths)}
    shape = (len(layers), num_experts, 3)
    file = np.empty(shape, np.int32)
    offset, length = np.empty(shape, np.int64), np.empty(shape, np.int64)
    for i, layer in enumerate(layers):
        for expert, by_role in chosen[layer].items():
            for part, role in enumerate(EXPERT_ROLES):
                entry = by_role[role]
                file[i, expert, part] = index[entry.path]
                offset[i, expert, part] = entry.offset
                length[i, expert, part] = entry.nbytes
    layout = make_record_layout(hidden, inner, format, 1)
    return RecordTable(
        files=tuple(paths),
        layers=tuple(layers),
        num_experts=num_experts,
        layouts=(layout,) * len(layers),
        repack=format,
        file=file,
        offset=offset,
        length=length,
        checksum=None,
    )
