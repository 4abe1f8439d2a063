"""The dense tensors a model asks for: checked as a whole first, then loaded by role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from headrace import ops
from headrace.arrays import Float32
from headrace.checkpoint import Checkpoint, EmbeddingTable, Matrix
from headrace.errors import CheckpointError
from headrace.models.names import NameTable
from headrace.models.spec import ModelSpec


@dataclass(frozen=True)
class Parameter:
    """One dense tensor of a model: the role it plays, its shape, and the layer it belongs to."""

    role: str
    shape: tuple[int, ...]
    layer: int | None = None


class Weights:
    """A checkpoint's dense tensors by role.

    With `lock` what is loaded is kept from being swapped out.
    """

    def __init__(self, checkpoint: Checkpoint, names: NameTable, lock: bool = False) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._lock = lock

    def check(self, parameters: Iterable[Parameter], spec: ModelSpec) -> None:
        """Compare the checkpoint's headers with what the model needs, before anything is read.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or belongs to no role; or the
                expert records are not the ones `spec` describes.
            UnsupportedModelError: a tensor is of a dtype that is not read.
        """
        unused = dict(self._checkpoint.tensors)
        if spec.tie_word_embeddings:
            unused.pop(self._names.name("lm_head"), None)  # a copy that some files carry
        for parameter in parameters:
            name = self._names.name(parameter.role, parameter.layer)
            info = unused.pop(name, None)
            if info is None:
                raise CheckpointError(
                    f"tensor `{name}` is missing: {self._checkpoint.path}\n"
                    f"expected shape {list(parameter.shape)}{_closest(name, unused)}"
                )
            if tuple(info.shape) != parameter.shape:
                raise CheckpointError(
                    f"tensor `{name}` has the wrong shape: {self._checkpoint.path}\n"
                    f"expected {list(parameter.shape)} from config.json, got {list(info.shape)}"
                )
            self._checkpoint.require_readable(name)
        left = [
            n for n in sorted(unused) if not any(fnmatchcase(n, p) for p in self._names.ignored)
        ]
        if left:
            raise CheckpointError(
                f"{len(left)} tensor{'s' if len(left) > 1 else ''} that this architecture does not "
                f"have: {self._checkpoint.path}\ngot {', '.join(f'`{n}`' for n in left[:4])}"
                f"{', ...' if len(left) > 4 else ''}\n"
                "hint: config.json may belong to another model"
            )

        if spec.moe_layers:
            self._check_records(spec)

    def _check_records(self, spec: ModelSpec) -> None:
        records = self._checkpoint.records
        missing = set(spec.moe_layers) - set(records.layers if records else ())
        if records is None or missing:
            raise CheckpointError(
                f"experts are missing: {self._checkpoint.path}\n"
                f"expected {spec.num_experts} in each of {len(spec.moe_layers)} layers, "
                f"got none in layer{'s' if len(missing) > 1 else ''} "
                f"{', '.join(map(str, sorted(missing)))}"
            )
        if records.num_experts != spec.num_experts:
            raise CheckpointError(
                f"wrong number of experts: {self._checkpoint.path}\n"
                f"expected {spec.num_experts} from config.json, got {records.num_experts}"
            )
        inner, hidden = spec.moe_intermediate_size, spec.hidden_size
        for role, rows, cols in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            layout = getattr(records.shape, role)
            if (layout.rows, layout.cols) != (rows, cols):
                raise CheckpointError(
                    f"the experts' {role} matrix has the wrong shape: {self._checkpoint.path}\n"
                    f"expected [{rows}, {cols}] from config.json, "
                    f"got [{layout.rows}, {layout.cols}]"
                )

    def read_ahead(self, parameters: Iterable[Parameter], embedding_resident: bool) -> None:
        """Read what the methods below will load, as fast as the drive gives it."""
        self._checkpoint.read_ahead(
            {
                self._names.name(parameter.role, parameter.layer): "f32"
                if parameter.role == "router"
                else None
                for parameter in parameters
                if parameter.role != "embed_tokens" or embedding_resident
            }
        )

    def matrix(self, role: str, layer: int | None = None) -> Matrix:
        """A matrix [N, K], packed as the checkpoint holds it."""
        return self._kept(self._checkpoint.load_matrix(self._names.name(role, layer)))

    def router(self, role: str, layer: int) -> Matrix:
        """A router's matrix [E, D], in float32 whatever the file holds."""
        return self._kept(self._checkpoint.load_matrix(self._names.name(role, layer), format="f32"))

    def vector(self, role: str, layer: int | None = None) -> Float32:
        """A vector, in float32."""
        return self._checkpoint.load_vector(self._names.name(role, layer))

    def embedding(self, role: str, resident: bool) -> EmbeddingTable:
        """An embedding table, in memory or read by row from the drive."""
        table = self._checkpoint.embedding(self._names.name(role), resident)
        if self._lock and table.data is not None:
            ops.lock_memory(table.data)
        return table

    def _kept(self, matrix: Matrix) -> Matrix:
        if self._lock:
            ops.lock_memory(matrix.data)
        return matrix


def _closest(name: str, present: Iterable[str]) -> str:
    """Name a tensor that differs from the missing one in its prefix only, as a hint."""
    tail = name.removeprefix("model.")
    near = next((other for other in sorted(present) if other.endswith(tail)), None)
    return f"\nhint: there is a tensor `{near}`" if near else ""


def names_of(parameters: Iterable[Parameter], names: NameTable) -> Iterator[str]:
    """The tensor names of `parameters`, in their order."""
    return (names.name(parameter.role, parameter.layer) for parameter in parameters)
