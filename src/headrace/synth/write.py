"""Writes a random model as a container or as a Hugging Face directory, file by file, resumable.

A Hugging Face checkpoint gets one shard for the dense tensors and one for each layer's experts.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.arrays import Bytes
from headrace.checkpoint.base import CONFIG_NAME, GENERATION_CONFIG_NAME
from headrace.checkpoint.journal import Journal, is_published
from headrace.checkpoint.layout import (
    DENSE_NAME,
    FORMAT_VERSION,
    KEEP,
    DenseTensor,
    Recipe,
    dense_header,
    dense_order,
    expert_file_name,
    expert_header,
    make_manifest,
    padded_header,
    weight_file_bytes,
)
from headrace.checkpoint.records import make_record_layout
from headrace.checkpoint.safetensors import INDEX_NAME
from headrace.checkpoint.values import pack_values
from headrace.checkpoint.writer import (
    write_arrays,
    write_bytes,
    write_dense_file,
    write_error,
    write_expert_file,
    write_json,
)
from headrace.errors import ConfigError
from headrace.models.registry import REGISTRY, load_spec
from headrace.models.weights import Parameter
from headrace.synth.model import DEFAULT_SKEW, SynthModel
from headrace.synth.shapes import SynthShape
from headrace.synth.tokenizer import tokenizer_files

FORMATS = ("container", "hf")
MAX_SKEW = 10.0
"""Beyond that a layer has but one favourite, whatever the token."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OTHER_BYTES = 32 << 20
"""Manifest, tokenizer and configs take less."""


@dataclass(frozen=True)
class SynthReport:
    """What was written."""

    dest: Path
    total_bytes: int
    num_files: int
    already_done: bool


def require_arguments(format: str, seed: int, skew: float) -> None:
    """Raise ConfigError unless `synthesize` takes these."""
    if format not in FORMATS:
        raise ConfigError(f"unknown format: {format!r}\nexpected one of {', '.join(FORMATS)}")
    if seed < 0:
        raise ConfigError(f"seed is negative: {seed}")
    if not 0 <= skew <= MAX_SKEW:
        raise ConfigError(f"skew is out of range\nexpected 0..{MAX_SKEW:g}, got {skew}")


def synthesize(
    shape: SynthShape,
    dest: Path,
    *,
    recipe: Recipe,
    seed: int = 0,
    skew: float = DEFAULT_SKEW,
    format: str = "container",
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> SynthReport:
    """Write a checkpoint of random weights.

    The same arguments give the same bytes. A killed run is resumed by the same call.

    Args:
        shape: dimensions.
        dest: the directory to make.
        recipe: formats of a container; a Hugging Face checkpoint is bf16 throughout.
        seed: of the weights, 0 or more.
        skew: how uneven the experts' popularity is; 0 is even.
        format: "container" or "hf".
        progress: called with a file name, the bytes done and the bytes in all.

    Raises:
        ConfigError: the destination exists, or an argument is out of range.
        CheckpointError: the drive is full.
    """
    require_arguments(format, seed, skew)
    if KEEP in recipe.formats:
        raise ConfigError("random weights have no source whose formats could be kept")
    dest = dest.resolve()
    binding = {
        "version": FORMAT_VERSION,
        "recipe": recipe.describe(),
        "source": {"kind": "synthetic", "seed": seed, "skew": skew, "shape": asdict(shape)},
    }
    writer = (_ContainerWriter if format == "container" else _HuggingFaceWriter)(
        SynthModel(shape, seed, skew), recipe, Journal(dest), progress
    )
    total = sum(writer.file_bytes().values())
    report = SynthReport(dest, total, len(writer.file_bytes()), already_done=False)
    if is_published(dest, binding):
        return SynthReport(dest, total, report.num_files, already_done=True)
    try:
        with writer.journal as journal:
            journal.require_space(writer.file_bytes(), OTHER_BYTES)
            journal.begin(binding)
            if journal.is_complete:
                journal.publish(None)
            else:
                writer.run(binding)
    except OSError as error:
        raise write_error(dest, error) from error
    return report


class _Writer:
    """What both forms share."""

    def __init__(
        self,
        model: SynthModel,
        recipe: Recipe,
        journal: Journal,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.model, self.shape, self.recipe = model, model.shape, recipe
        self.journal, self.progress = journal, progress
        self.done = 0
        spec = load_spec(self.shape.config())
        architecture = REGISTRY[spec.model_type]
        self.names = architecture.names
        self.parameters = {
            self.names.name(p.role, p.layer): p for p in architecture.parameters(spec)
        }

    def file_bytes(self) -> dict[str, int]:
        """Return the length of each weight file, in the order of writing."""
        raise NotImplementedError

    def run(self, binding: dict[str, Any]) -> None:
        """Write all files and publish."""
        raise NotImplementedError

    def step(self, name: str) -> Callable[[int], None]:
        """Return a callback that reports bytes written to one file."""
        total = sum(self.file_bytes().values())

        def advance(num_bytes: int) -> None:
            self.done += num_bytes
            self.progress(name, self.done, total)

        return advance

    def write_small_files(self) -> dict[str, bytes]:
        """Write tokenizer and configs; return their contents."""
        shape = self.shape
        files = tokenizer_files(shape.vocab_size)
        files[CONFIG_NAME] = json.dumps(shape.config(), indent=1, sort_keys=True).encode()
        end = {"eos_token_id": shape.vocab_size - 1, "do_sample": False}
        files[GENERATION_CONFIG_NAME] = json.dumps(end, sort_keys=True).encode()
        for name, data in files.items():
            write_bytes(self.journal.partial / name, data)
        return files

    def vector(self, parameter: Parameter) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a norm's weight: all ones."""
        return np.ones(parameter.shape, np.float32)

    def matrix(self, parameter: Parameter) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a matrix of attention or a router, [N, K] float32."""
        assert parameter.layer is not None, "these belong to a layer"
        if parameter.role == "router":
            return self.model.router(parameter.layer)
        if parameter.role in _ATTENTION:
            return self.model.attention(parameter.role, parameter.layer)
        raise AssertionError(f"no random weights for {parameter.role}")


class _ContainerWriter(_Writer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape, recipe = self.shape, self.recipe
        self.layout = make_record_layout(
            shape.hidden_size,
            shape.moe_intermediate_size,
            recipe.experts,
            recipe.group_of(recipe.experts),
        )
        self.tensors = dense_order([self._plan(n, p) for n, p in self.parameters.items()])

    def _plan(self, name: str, parameter: Parameter) -> DenseTensor:
        if len(parameter.shape) == 1:
            return DenseTensor(name, "vector", "f32", 1, parameter.shape)
        if parameter.role == "embed_tokens":
            return DenseTensor(name, "rows", "bf16", 1, parameter.shape)
        if parameter.role == "router":
            return DenseTensor(name, "matrix", "f32", 1, parameter.shape)
        dense = self.recipe.dense
        return DenseTensor(name, "matrix", dense, self.recipe.group_of(dense), parameter.shape)

    def file_bytes(self) -> dict[str, int]:
        layers, num = range(self.shape.num_hidden_layers), self.shape.num_experts
        return weight_file_bytes(self.tensors, num, dict.fromkeys(layers, self.layout))

    def _load(self, tensor: DenseTensor) -> Bytes:
        parameter = self.parameters[tensor.name]
        if tensor.kind == "vector":
            return self.vector(parameter).view(np.uint8)
        if parameter.role == "embed_tokens":
            return self.model.embedding().view(np.uint8).reshape(-1)
        if parameter.role == "lm_head":
            return self.model.head(tensor.format, tensor.group)
        values = self.matrix(parameter)
        shape = (values.shape[0], values.shape[1])
        data = values.view(np.uint8).reshape(-1)
        path = self.journal.partial / DENSE_NAME
        return pack_values(data, shape, "f32", tensor.format, tensor.group, tensor.name, path)

    def run(self, binding: dict[str, Any]) -> None:
        num = self.shape.num_experts
        dense = self._dense()
        records = {layer: self._records(layer) for layer in range(self.shape.num_hidden_layers)}
        files = self.write_small_files()
        self.journal.publish(
            make_manifest(
                model_type=self.shape.model_type,
                recipe=self.recipe,
                source=binding["source"],
                tensors=self.tensors,
                dense_checksums=dense,
                num_experts=num,
                layouts=dict.fromkeys(records, self.layout),
                record_checksums=records,
                files=files,
            )
        )

    def _dense(self) -> list[int]:
        """Write the dense tensors unless they are there; return their checksums."""
        advance = self.step(DENSE_NAME)
        path = self.journal.partial / DENSE_NAME
        return self.journal.keep_or_write(
            DENSE_NAME,
            dense_header(self.tensors),
            [(t.nbytes, t.stored_bytes) for t in self.tensors],
            advance,
            lambda: write_dense_file(path, self.tensors, self._load, advance),
        )[0]

    def _records(self, layer: int) -> list[int]:
        """Write a layer's file unless it is there; return its checksums."""
        name, record_bytes = expert_file_name(layer), self.layout.record_bytes
        num, advance = self.shape.num_experts, self.step(name)
        made = (self.model.record(layer, e, self.layout) for e in range(num))
        path = self.journal.partial / name
        return self.journal.keep_or_write(
            name,
            expert_header(layer, num, record_bytes),
            [(record_bytes, record_bytes)] * num,
            advance,
            lambda: write_expert_file(path, layer, num, record_bytes, made, advance),
        )[0]


class _HuggingFaceWriter(_Writer):
    def _shards(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Return the tensors of each shard, name and shape, in the order of their bytes."""
        shape = self.shape
        num = shape.num_hidden_layers + 1
        shards = {
            f"model-00001-of-{num:05}.safetensors": [
                (name, p.shape) for name, p in sorted(self.parameters.items())
            ]
        }
        experts = self.names.experts
        assert experts is not None, "synthetic models have experts"
        inner, hidden = shape.moe_intermediate_size, shape.hidden_size
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for layer in range(shape.num_hidden_layers):
            shards[f"model-{layer + 2:05}-of-{num:05}.safetensors"] = [
                (experts.name(layer, expert, role), size)
                for expert in range(shape.num_experts)
                for role, size in sizes.items()
            ]
        return shards

    @staticmethod
    def _header(tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
        return padded_header((n, "BF16", s, 2 * int(np.prod(s))) for n, s in tensors)

    def file_bytes(self) -> dict[str, int]:
        return {
            name: len(self._header(tensors)) + sum(2 * int(np.prod(s)) for _, s in tensors)
            for name, tensors in self._shards().items()
        }

    def _dense(self, name: str) -> Bytes:
        parameter = self.parameters[name]
        if parameter.role == "embed_tokens":
            return self.model.embedding().view(np.uint8).reshape(-1)
        if parameter.role == "lm_head":
            return self.model.head_rows().view(np.uint8).reshape(-1)
        is_vector = len(parameter.shape) == 1
        values = self.vector(parameter) if is_vector else self.matrix(parameter)
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded.view(np.uint8).reshape(-1)

    def _expert_arrays(self, layer: int) -> Iterator[Bytes]:
        for expert in range(self.shape.num_experts):
            for rows in self.model.expert_rows(layer, expert):
                yield rows.view(np.uint8).reshape(-1)

    def run(self, binding: dict[str, Any]) -> None:
        weight_map = {}
        for index, (name, tensors) in enumerate(self._shards().items()):
            weight_map.update(dict.fromkeys((n for n, _ in tensors), name))
            advance = self.step(name)
            if self.journal.finished(name) is None:
                arrays = (
                    (self._dense(n) for n, _ in tensors)
                    if index == 0
                    else self._expert_arrays(index - 1)
                )
                path = self.journal.partial / name
                write_arrays(path, self._header(tensors), arrays, advance)
                self.journal.finish(name, [])
        total = sum(self.file_bytes().values())
        self.write_small_files()
        write_json(
            self.journal.partial / INDEX_NAME,
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
        self.journal.publish_plain()
