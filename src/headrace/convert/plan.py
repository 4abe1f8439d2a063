"""What a conversion will write, worked out from headers before a byte of weights is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from headrace.checkpoint import Checkpoint, GgufCheckpoint, TensorInfo
from headrace.checkpoint.gguf_blocks import remembered_type
from headrace.checkpoint.layout import (
    KEEP,
    DenseTensor,
    Recipe,
    dense_order,
    weight_file_bytes,
)
from headrace.checkpoint.records import EXPERT_ROLES, RecordLayout, RecordTable, make_record_layout
from headrace.convert.recipe import Assignment, tensor_class
from headrace.convert.source import FLOATING, OpenedSource, open_source, small_files, table_of
from headrace.errors import UnsupportedModelError
from headrace.models.names import NameTable
from headrace.models.registry import REGISTRY
from headrace.models.spec import ModelSpec

MANIFEST_BYTES_PER_RECORD = 24
MANIFEST_BYTES_PER_TENSOR = 512


@dataclass(frozen=True)
class ConvertPlan:
    """The source, the recipe and every file that follows from them."""

    source: Checkpoint
    model_type: str
    recipe: Recipe
    tensors: tuple[DenseTensor, ...]
    """In the order of the file."""
    num_experts: int
    layouts: Mapping[int, RecordLayout]
    """How records lie, by layer with experts, those of MTP included; empty in a dense model."""
    files: Mapping[str, bytes]
    """Contents of configs, tokenizer and chat template files, by name."""
    head: str
    """Name of the matrix that scores the vocabulary."""
    exact: frozenset[str] = frozenset()
    """Matrices that keep their format whatever the recipe: routers."""
    requantised: Mapping[str, str] = field(default_factory=dict)
    """By class, what its matrices are in the source, if they are codes and get other ones."""

    def file_bytes(self) -> dict[str, int]:
        """Return the length of each weight file, in the order of writing."""
        return weight_file_bytes(self.tensors, self.num_experts, self.layouts)

    def class_of(self, tensor: DenseTensor) -> str:
        """Return the class of a dense matrix; `other` for what is stored as it is."""
        return tensor_class(tensor.name, self.head)

    def class_bytes(self) -> dict[str, int]:
        """Return the bytes of each class of tensors; `exact` is what no recipe changes."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            is_exact = tensor.kind != "matrix" or tensor.name in self.exact
            kind = "exact" if is_exact else self.class_of(tensor)
            sizes[kind] = sizes.get(kind, 0) + tensor.stored_bytes
        for layout in self.layouts.values():
            for role, matrix in zip(EXPERT_ROLES, layout.matrices, strict=True):
                kind = f"experts.{role}"
                sizes[kind] = sizes.get(kind, 0) + self.num_experts * matrix.nbytes
        return sizes

    def other_bytes(self) -> int:
        """Return the most that manifest, journal and copied files take."""
        records = len(self.layouts) * self.num_experts
        manifest = MANIFEST_BYTES_PER_RECORD * records + MANIFEST_BYTES_PER_TENSOR * len(
            self.tensors
        )
        return 2 * manifest + sum(map(len, self.files.values())) + (1 << 16)


def make_plan(source: Path | OpenedSource, recipe: Recipe) -> ConvertPlan:
    """Open the source unless it is open, check it as a model, and lay the container out.

    Raises:
        CheckpointError, UnsupportedModelError, ConfigError: as `open_source`; or a recipe whose
            rules do not fit.
    """
    opened = open_source(source)
    path, spec, checkpoint = opened.path, opened.spec, opened.checkpoint
    names = REGISTRY[spec.model_type].names
    head = names.name("embed_tokens" if spec.tie_word_embeddings else "lm_head")
    formats = Assignment(recipe)
    tables = [t for t in (checkpoint.records, checkpoint.mtp_records) if t is not None]
    if any(_shapes(t) != _shapes(tables[0]) for t in tables):
        raise UnsupportedModelError(
            f"experts of the MTP layers have another shape than the model's: {path}"
        )
    layouts = {
        layer: _plan_records(kept, formats)
        for table in tables
        for layer, kept in zip(table.layers, table.layouts, strict=True)
    }
    tensors = tuple(_plan_dense(checkpoint, names, spec, formats, head))
    formats.require_used(path)
    plan = ConvertPlan(
        source=checkpoint,
        model_type=spec.model_type,
        recipe=recipe,
        tensors=tensors,
        num_experts=tables[0].num_experts if tables else 0,
        layouts=layouts,
        files=small_files(checkpoint),
        head=head,
        exact=frozenset(t.name for t in tensors if _is_router(t.name, names)),
    )
    return replace(plan, requantised=_find_requantised(plan))


def _shapes(table: RecordTable) -> tuple[int, ...]:
    return table.num_experts, *(n for m in table.shape.matrices for n in (m.rows, m.cols))


def _plan_records(kept: RecordLayout, formats: Assignment) -> RecordLayout:
    """Lay out a record: each matrix as the recipe says, or as the source's reader packs it."""
    stored, types = {}, {}
    for role, matrix in zip(EXPERT_ROLES, kept.matrices, strict=True):
        asked = formats.of_expert(role)
        is_kept = asked[0] == KEEP
        stored[role] = (matrix.format, matrix.group) if is_kept else asked
        types[role] = matrix.type if is_kept else None
    return make_record_layout(kept.down.rows, kept.down.cols, *stored["gate"], stored, types)


def _find_requantised(plan: ConvertPlan) -> dict[str, str]:
    """Name the classes whose codes the recipe rounds a second time."""
    found: dict[str, set[str]] = {}

    def compare(kind: str, held: tuple[str, int], stored: tuple[str, int]) -> None:
        if held != stored and held[0] not in FLOATING and stored[0] != "f32":
            found.setdefault(kind, set()).add(f"{held[0]} in groups of {held[1]}")

    for tensor in plan.tensors:
        if tensor.kind == "matrix":
            info = plan.source.info(tensor.name)
            stored = (tensor.format, tensor.group)
            compare(plan.class_of(tensor), (info.format, info.group), stored)
    for layer, layout in plan.layouts.items():
        kept = table_of(plan.source, layer).layout_of(layer)
        for role, old, new in zip(EXPERT_ROLES, kept.matrices, layout.matrices, strict=True):
            compare(f"experts.{role}", (old.format, old.group), (new.format, new.group))
    return {kind: ", ".join(sorted(held)) for kind, held in sorted(found.items())}


def _plan_dense(
    source: Checkpoint,
    names: NameTable,
    spec: ModelSpec,
    formats: Assignment,
    head: str,
) -> list[DenseTensor]:
    # A tied checkpoint may carry a copy of the table as its head; the packed table serves as both.
    unused = {names.name("lm_head")} if spec.tie_word_embeddings else set()
    tensors = []
    for name, info in {**source.tensors, **source.mtp_tensors}.items():
        if name in unused:
            continue
        if name in source.tensors and any(fnmatchcase(name, p) for p in names.ignored):
            continue
        tensors.append(_plan_tensor(source, name, info, names, spec, formats, head))
    return dense_order(tensors)


def _plan_tensor(
    source: Checkpoint,
    name: str,
    info: TensorInfo,
    names: NameTable,
    spec: ModelSpec,
    formats: Assignment,
    head: str,
) -> DenseTensor:
    if len(info.shape) == 1 and info.shape[0]:
        return DenseTensor(name, "vector", "f32", 1, info.shape)
    if len(info.shape) != 2 or 0 in info.shape:
        raise UnsupportedModelError(
            f"tensor has {len(info.shape)} dimensions: {name}, checkpoint {source.path}\n"
            f"expected a vector or a matrix, got {list(info.shape)}"
        )
    held = (info.format, info.group)
    if _is_router(name, names):  # exact; widened when loaded
        held = held if info.format in FLOATING else ("f32", 1)
        return DenseTensor(name, "matrix", *held, info.shape)
    if name == names.name("embed_tokens") and not spec.tie_word_embeddings:
        kind = "rows" if info.format in FLOATING else "matrix"
        return DenseTensor(name, kind, *held, info.shape, _type_of(source, name))
    asked = formats.of_dense(name, tensor_class(name, head))
    if asked[0] == KEEP:
        return DenseTensor(name, "matrix", *held, info.shape, _type_of(source, name))
    return DenseTensor(name, "matrix", *asked, info.shape)


def _type_of(source: Checkpoint, name: str) -> str | None:
    """The GGUF type of a kept matrix, where its format does not tell."""
    if not isinstance(source, GgufCheckpoint):
        return None
    return remembered_type(source.source(name).type.name)


def _is_router(name: str, names: NameTable) -> bool:
    router = names.layer.get("router")
    return router is not None and name.endswith("." + router)
