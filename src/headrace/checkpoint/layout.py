"""What a container holds and where: the one description that the writer and the reader share.

The words and numbers of `headrace.json` and of the file headers are made here, from a recipe and a
list of tensors. docs/format.md says the same in prose. Touches no file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headrace import _core
from headrace.checkpoint.base import NUMPY_TYPES
from headrace.checkpoint.jsonfile import canonical_json
from headrace.checkpoint.records import RECORD_ALIGNMENT, RecordLayout, align_up
from headrace.errors import ConfigError
from headrace.quant import MULTIPLES

FORMAT_NAME = "headrace container"
FORMAT_VERSION = 1
MANIFEST_NAME = "headrace.json"
DENSE_NAME = "dense.safetensors"
KINDS = ("matrix", "rows", "vector")
_GROUPS = {
    "q4": (32, 64),
    "q8": (32,),
    "mxfp4": (32,),
    "q8f": (16, 32),
    "q8a": (16, 32),
    "q4f": (32, 64),
    "q4a": (32, 64),
    "f8": (32, 128),
    "q2k": (16,),
    "q3k": (16,),
    "q4k": (32,),
    "q5k": (32,),
    "q6k": (16,),
    "q6ka": (16,),
    "bf16": (1,),
    "f16": (1,),
    "f32": (1,),
}
KEPT = ("q8f", "q8a", "q4f", "q4a", "f8", *MULTIPLES)
"""Formats that hold codes as a source had them: a container may, whatever its recipe says."""
_SAFETENSORS_NAMES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


SCALES = ("largest", "search")
FORMATS = ("q4", "q8", "mxfp4", "bf16", "f32")
"""What weights may be packed in on request; f32 rounds none that a source holds as floats."""
KEEP = "keep"
"""In place of a format: the one that the source's reader gives a matrix; nothing is rounded."""
_CHOICES = (KEEP, *FORMATS)


@dataclass(frozen=True)
class Rule:
    """What some tensors are stored as, in place of what the recipe says of their kind."""

    match: str
    """A class of tensors, or a pattern (as `fnmatch`) of names; `convert/recipe.py` reads it."""
    format: str
    group: int

    def __post_init__(self) -> None:
        _require("rule's format", self.format, _CHOICES)
        _require(f"group of {self.format}", self.group, _GROUPS.get(self.format, (1,)))


@dataclass(frozen=True)
class Recipe:
    """How weights are stored. `group` is the inputs per scale of q4; q8 and mxfp4 have 32, what is
    kept has its own.
    """

    experts: str = "q4"
    dense: str = "q8"
    group: int = 64
    head: str | None = None
    """Format of the vocabulary's matrix; None: that of the other dense ones."""
    rules: tuple[Rule, ...] = ()
    """The first that matches a tensor counts."""
    scales: str = "largest"
    """largest: the largest weight of a group gives its scale. search: the least squared error."""
    importance: str | None = None
    """Checksum of the importance matrix that weighted the errors; None: there was none."""

    def __post_init__(self) -> None:
        _require("experts", self.experts, _CHOICES)
        _require("dense", self.dense, _CHOICES)
        _require("group", self.group, (32, 64))
        if self.head is not None:
            _require("head", self.head, _CHOICES)
        _require("scales", self.scales, SCALES)
        if self.importance is not None and self.scales != "search":
            raise ConfigError("an importance matrix does nothing unless scales are searched")

    def group_of(self, format: str) -> int:
        """Return the inputs per scale that this recipe gives a format."""
        return self.group if format == "q4" else _GROUPS.get(format, (1,))[0]

    @property
    def formats(self) -> frozenset[str]:
        """Every format that it names."""
        named = {self.experts, self.dense, *(rule.format for rule in self.rules)}
        return frozenset(named if self.head is None else named | {self.head})

    def describe(self) -> dict[str, Any]:
        """Return the recipe's entry in the manifest: what has its default is left out, but for the
        three fields that every manifest has.
        """
        default = Recipe()
        fields = asdict(self)
        fields["rules"] = list(fields["rules"])
        always = ("experts", "dense", "group")
        return {
            name: value
            for name, value in fields.items()
            if name in always or getattr(self, name) != getattr(default, name)
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Recipe":
        """Read what `describe` made.

        Raises:
            ConfigError: a field is unknown, missing or out of range.
        """
        try:
            rules = tuple(Rule(**rule) for rule in fields.get("rules", ()))
            return cls(**{**fields, "rules": rules})
        except TypeError as error:
            raise ConfigError(f"no recipe: {error}") from None


def _require(field: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(
            f"unknown value for {field}: {value!r}\nexpected one of {', '.join(map(str, allowed))}"
        )


@dataclass(frozen=True)
class DenseTensor:
    """One tensor of `dense.safetensors`."""

    name: str
    kind: str
    """matrix: packed. rows: row-major, so that single rows can be read. vector: float32."""
    format: str
    group: int
    shape: tuple[int, ...]
    type: str | None = None
    """The GGUF tensor type that its codes came from, where the format does not tell."""

    @property
    def nbytes(self) -> int:
        """Bytes that carry values; what the checksum covers."""
        if self.kind == "matrix":
            rows, cols = self.shape
            return int(_core.packed_bytes(self.format, rows, cols, self.group))
        num = self.shape[0] * (self.shape[1] if self.kind == "rows" else 1)
        return num * NUMPY_TYPES[self.format].itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file: packed matrices are padded so that the next tensor is aligned too."""
        return align_up(self.nbytes, RECORD_ALIGNMENT) if self.kind == "matrix" else self.nbytes

    @property
    def stored_dtype(self) -> str:
        """In the file's header, as safetensors names it."""
        return "U8" if self.kind == "matrix" else _SAFETENSORS_NAMES[self.format]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In the file's header."""
        return (self.stored_bytes,) if self.kind == "matrix" else self.shape

    def describe(self, checksum: int) -> dict[str, Any]:
        """Return the tensor's entry in the manifest."""
        return {
            "kind": self.kind,
            "format": self.format,
            "group": self.group,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "checksum": format_checksum(checksum),
            **({} if self.type is None else {"type": self.type}),
        }


def is_valid_format(format: Any, group: Any) -> bool:
    """Whether there is such a packed format with such a group."""
    return isinstance(format, str) and type(group) is int and group in _GROUPS.get(format, ())


def format_checksum(value: int) -> str:
    """Write a 64-bit checksum as 16 hexadecimal digits: JSON numbers are exact to 53 bits only."""
    return f"{value:016x}"


def expert_file_name(layer: int) -> str:
    """Return the file name of a layer's records."""
    return f"experts-{layer:03}.safetensors"


def record_name(layer: int, expert: int) -> str:
    """Return the tensor name of a record."""
    return f"layers.{layer}.experts.{expert}"


def dense_order(tensors: Sequence[DenseTensor]) -> list[DenseTensor]:
    """Order tensors as the file holds them: matrices, rows, vectors, by name within each.

    Matrices have a length that is a multiple of 4096, so that each of them and the first table of
    rows starts aligned.
    """
    return sorted(tensors, key=lambda t: (KINDS.index(t.kind), t.name))


def padded_header(entries: Iterator[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Make length and JSON of a safetensors header whose data start at a multiple of 4096."""
    header, at = {}, 0
    for name, dtype, shape, nbytes in entries:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    padded = align_up(8 + len(text), RECORD_ALIGNMENT) - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def dense_header(tensors: Sequence[DenseTensor]) -> bytes:
    """Return the bytes before the data of `dense.safetensors`; `tensors` in `dense_order`."""

    def entries() -> Iterator[tuple[str, str, Sequence[int], int]]:
        for t in tensors:
            yield t.name, t.stored_dtype, t.stored_shape, t.stored_bytes

    return padded_header(entries())


def expert_header(layer: int, num_experts: int, record_bytes: int) -> bytes:
    """Return the bytes before the data of a layer's file."""
    return padded_header(
        (record_name(layer, e), "U8", (record_bytes,), record_bytes) for e in range(num_experts)
    )


def weight_file_bytes(
    tensors: Sequence[DenseTensor], num_experts: int, layouts: Mapping[int, RecordLayout]
) -> dict[str, int]:
    """Return the length of each weight file of a container, in the order of writing.

    Args:
        tensors: in `dense_order`.
        num_experts: E.
        layouts: layer with experts -> how its records lie; empty in a dense model.
    """
    sizes = {DENSE_NAME: len(dense_header(tensors)) + sum(t.stored_bytes for t in tensors)}
    for layer, layout in layouts.items():
        header = expert_header(layer, num_experts, layout.record_bytes)
        sizes[expert_file_name(layer)] = len(header) + num_experts * layout.record_bytes
    return sizes


def describe_layout(layout: RecordLayout) -> dict[str, Any]:
    """Return the record layout's entry in the manifest."""
    content = asdict(layout)
    for matrix in (content["gate"], content["up"], content["down"]):
        if matrix["type"] is None:
            del matrix["type"]
    return content


def make_manifest(
    *,
    model_type: str,
    recipe: Recipe,
    source: dict[str, Any],
    tensors: Sequence[DenseTensor],
    dense_checksums: Sequence[int],
    num_experts: int,
    layouts: Mapping[int, RecordLayout],
    record_checksums: Mapping[int, Sequence[int]],
    files: Mapping[str, bytes],
) -> dict[str, Any]:
    """Return the content of `headrace.json`.

    Args:
        model_type: the architecture, as config.json names it.
        recipe: how weights were stored.
        source: where they came from; anything JSON holds, without times and places.
        tensors: in `dense_order`.
        dense_checksums: one per tensor.
        num_experts: E; 0 in a dense model.
        layouts: layer -> how its records lie; empty in a dense model.
        record_checksums: layer -> one per expert.
        files: contents of configs, tokenizer and chat template files, by name.
    """
    dense = {t.name: t.describe(c) for t, c in zip(tensors, dense_checksums, strict=True)}
    experts = None
    if layouts:
        common = layouts[min(layouts)]
        experts = {
            "num_experts": num_experts,
            "layout": describe_layout(common),
            "layers": {
                str(layer): {
                    "file": expert_file_name(layer),
                    "checksums": [format_checksum(c) for c in checksums],
                    **(
                        {}
                        if layouts[layer] == common
                        else {"layout": describe_layout(layouts[layer])}
                    ),
                }
                for layer, checksums in sorted(record_checksums.items())
            },
        }
    manifest = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "model_type": model_type,
        "recipe": recipe.describe(),
        "source": source,
        "dense": {"file": DENSE_NAME, "tensors": dense},
        "experts": experts,
        "files": {name: describe_file(data) for name, data in files.items()},
    }
    return {**manifest, "checksum": manifest_checksum(manifest)}


def describe_file(data: bytes) -> dict[str, Any]:
    """Return the manifest's entry of a file that holds no weights."""
    return {"nbytes": len(data), "checksum": format_checksum(_checksum(data))}


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest: of its JSON without the key `checksum`."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return format_checksum(_checksum(canonical_json(rest)))


def _checksum(data: bytes) -> int:
    return int(_core.checksum(np.frombuffer(data, np.uint8)))
