"""What a conversion will write, worked out from headers before a byte of weights is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from headrace.checkpoint import HuggingFaceCheckpoint, TensorInfo, open_checkpoint, read_config
from headrace.checkpoint.base import CONFIG_NAME, GENERATION_CONFIG_NAME
from headrace.checkpoint.huggingface import tokenizer_files
from headrace.checkpoint.layout import DenseTensor, Recipe, dense_order, weight_file_bytes
from headrace.checkpoint.records import FLOAT_FORMATS, RecordLayout, make_record_layout
from headrace.convert.recipe import EXPERT_ROLES, Assignment, tensor_class
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.models.names import NameTable
from headrace.models.registry import REGISTRY, check_weights, expert_names, load_spec
from headrace.models.spec import ModelSpec
from headrace.tokenizer import Tokenizer

MANIFEST_BYTES_PER_RECORD = 24
MANIFEST_BYTES_PER_TENSOR = 512


@dataclass(frozen=True)
class ConvertPlan:
    """The source, the recipe and every file that follows from them."""

    source: HuggingFaceCheckpoint
    model_type: str
    recipe: Recipe
    tensors: tuple[DenseTensor, ...]
    """In the order of the file."""
    layers: tuple[int, ...]
    """All layers with experts, those of MTP included; empty in a dense model."""
    num_experts: int
    layout: RecordLayout | None
    copied: Mapping[str, Path]
    """Files taken over unchanged, by name."""
    head: str
    """Name of the matrix that scores the vocabulary."""
    exact: frozenset[str] = frozenset()
    """Matrices that keep their format whatever the recipe: routers."""

    def file_bytes(self) -> dict[str, int]:
        """Return the length of each weight file, in the order of writing."""
        return weight_file_bytes(self.tensors, self.layers, self.num_experts, self.layout)

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
        if self.layout is not None:
            num = len(self.layers) * self.num_experts
            for role, matrix in zip(EXPERT_ROLES, self.layout.matrices, strict=True):
                sizes[f"experts.{role}"] = num * matrix.nbytes
        return sizes

    def other_bytes(self) -> int:
        """Return the most that manifest, journal and copied files take."""
        records = len(self.layers) * self.num_experts
        manifest = MANIFEST_BYTES_PER_RECORD * records + MANIFEST_BYTES_PER_TENSOR * len(
            self.tensors
        )
        return 2 * manifest + sum(p.stat().st_size for p in self.copied.values()) + (1 << 16)


def make_plan(path: Path, recipe: Recipe) -> ConvertPlan:
    """Open the source, check it as a model, and lay the container out.

    Raises:
        CheckpointError: the source is damaged or incomplete (its tokenizer is part of it), or is a
            container already.
        UnsupportedModelError: nothing here computes the model, or a tensor's dtype is foreign.
        ConfigError: its config holds a field that is not understood.
    """
    spec = load_spec(read_config(path))
    source = open_checkpoint(path, expert_names(spec))
    if not isinstance(source, HuggingFaceCheckpoint):
        raise CheckpointError(
            f"source is no Hugging Face checkpoint but a {source.kind}: {path}\n"
            "hint: it runs as it is; to store it otherwise, convert from the original weights"
        )
    source.require_plain_experts()
    check_weights(spec, source)
    Tokenizer.of(source)  # refused now as it would be by whoever runs the container
    names = REGISTRY[spec.model_type].names
    head = names.name("embed_tokens" if spec.tie_word_embeddings else "lm_head")
    formats = Assignment(recipe)
    tables = [t for t in (source.records, source.mtp_records) if t is not None]
    layout = None
    if tables:
        down = tables[0].layout.down
        stored = {role: formats.of_expert(role) for role in EXPERT_ROLES}
        layout = make_record_layout(down.rows, down.cols, *stored["gate"], stored)
        if any(t.layout != tables[0].layout for t in tables):
            raise UnsupportedModelError(
                f"experts of the MTP layers have another shape than the model's: {path}"
            )
    copied = dict(tokenizer_files(path))
    for name in (CONFIG_NAME, GENERATION_CONFIG_NAME):
        if (path / name).is_file():
            copied[name] = path / name
    tensors = tuple(_plan_dense(source, names, spec, formats, head))
    formats.require_used(path)
    return ConvertPlan(
        source=source,
        model_type=spec.model_type,
        recipe=recipe,
        tensors=tensors,
        layers=tuple(layer for t in tables for layer in t.layers),
        num_experts=tables[0].num_experts if tables else 0,
        layout=layout,
        copied=copied,
        head=head,
        exact=frozenset(t.name for t in tensors if _is_router(t.name, names)),
    )


def _plan_dense(
    source: HuggingFaceCheckpoint,
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
    source: HuggingFaceCheckpoint,
    name: str,
    info: TensorInfo,
    names: NameTable,
    spec: ModelSpec,
    formats: Assignment,
    head: str,
) -> DenseTensor:
    is_coded = name in source.quantised and name != names.name("embed_tokens")
    format = "f32" if is_coded else FLOAT_FORMATS[source.entry(name).dtype]
    if len(info.shape) == 1 and info.shape[0]:
        return DenseTensor(name, "vector", "f32", 1, info.shape)
    if len(info.shape) != 2 or 0 in info.shape:
        raise UnsupportedModelError(
            f"tensor has {len(info.shape)} dimensions: {name}, checkpoint {source.path}\n"
            f"expected a vector or a matrix, got {list(info.shape)}"
        )
    if _is_router(name, names):
        return DenseTensor(name, "matrix", format, 1, info.shape)  # exact; widened when loaded
    if name == names.name("embed_tokens") and not spec.tie_word_embeddings:
        return DenseTensor(name, "rows", format, 1, info.shape)
    stored, group = formats.of_dense(name, tensor_class(name, head))
    return DenseTensor(name, "matrix", stored, group, info.shape)


def _is_router(name: str, names: NameTable) -> bool:
    router = names.layer.get("router")
    return router is not None and name.endswith("." + router)
