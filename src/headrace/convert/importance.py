"""The importance matrix: how large the inputs of each linear were on some text.

An error in a weight moves an output by the error times its input, so a squared error counts the
mean square of that input. Sums are float64, added in the order of tokens, so that chunking changes
nothing. Owns the sums, their file, and the reading of llama.cpp's imatrix files.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.arrays import Float32, Int32
from headrace.checkpoint.gguf_header import GgufTensor, read_header
from headrace.checkpoint.gguf_names import ARCHITECTURES, EXPERT_ROLES
from headrace.checkpoint.layout import format_checksum
from headrace.checkpoint.values import bytes_checksum, check_finite, read_range
from headrace.convert.quantise import normalised
from headrace.errors import CheckpointError, UnsupportedModelError

Float64: TypeAlias = npt.NDArray[np.float64]
PRIOR_TOKENS = 32
"""An expert's mean is drawn to its layer's as if it had seen so many tokens of the layer's kind."""
FORMAT = "headrace importance 1"
GGUF_MAGIC = b"GGUF"


@dataclass
class ExpertSums:
    """What the experts of one layer saw."""

    inputs: Float64
    """[E, D], of gate and up."""
    hidden: Float64
    """[E, F], of down."""
    counts: npt.NDArray[np.int64]
    """[E], tokens."""


@dataclass
class DenseSums:
    """What one dense linear saw."""

    squares: Float64
    """[K]"""
    count: int = 0


@dataclass
class Importance:
    """Sums of squares of the inputs of every linear that was run."""

    dense: dict[str, DenseSums] = field(default_factory=dict)
    """By Hugging Face name."""
    experts: dict[int, ExpertSums] = field(default_factory=dict)
    """By layer."""
    about: dict[str, Any] = field(default_factory=dict)
    """What it was made from, for people."""

    def add_dense(self, name: str, x: Float32) -> None:
        """Add the input of a dense linear, x [T, K]."""
        sums = self.dense.setdefault(name, DenseSums(np.zeros(x.shape[1], np.float64)))
        sums.squares = added(sums.squares, x)
        sums.count += len(x)

    def add_experts(
        self, layer: int, num_experts: int, ids: Int32, x: Float32, hidden: Float32
    ) -> None:
        """Add the inputs of a layer's experts.

        Args:
            layer: its number.
            num_experts: E.
            ids: [T, A], the experts of each token.
            x: [T, D], the input of gate and up.
            hidden: [T, A, F], the input of down.
        """
        sums = self.experts.get(layer)
        if sums is None:
            sums = self.experts[layer] = ExpertSums(
                np.zeros((num_experts, x.shape[1])),
                np.zeros((num_experts, hidden.shape[2])),
                np.zeros(num_experts, np.int64),
            )
        for expert in np.unique(ids):
            tokens, places = np.nonzero(ids == expert)
            sums.inputs[expert] = added(sums.inputs[expert], x[tokens])
            sums.hidden[expert] = added(sums.hidden[expert], hidden[tokens, places])
            sums.counts[expert] += len(tokens)

    def of_dense(self, name: str, cols: int) -> Float32 | None:
        """Return what the inputs of a dense matrix count, [K] float32 of mean 1; None if it was not
        run, as the layers that predict further tokens are not.

        Raises:
            CheckpointError: it was run with another number of inputs.
        """
        sums = self.dense.get(name)
        if sums is None:
            return None
        return _checked(sums.squares, cols, name)

    def of_expert(self, layer: int, expert: int, role: str, cols: int) -> Float32 | None:
        """Return the same for gate, up or down of an expert.

        An expert that few tokens chose is judged by its layer: the mean of its own tokens and of
        PRIOR_TOKENS more that are like the layer's.

        Raises:
            CheckpointError: it was run with another number of inputs, or there is no such expert.
        """
        sums = self.experts.get(layer)
        if sums is None:
            return None
        squares = sums.hidden if role == "down" else sums.inputs
        where = f"layer {layer}, expert {expert}, {role}"
        if expert >= len(squares):
            raise CheckpointError(
                f"importance is of another model: {where}\nexpected more than {expert} experts, "
                f"got {len(squares)}"
            )
        mean = np.add.reduce(squares, axis=0) / max(1, int(sums.counts.sum()))
        return _checked(squares[expert] + PRIOR_TOKENS * mean, cols, where)

    @property
    def checksum(self) -> str:
        """Of all sums: two that give the same bytes have the same one."""
        parts = [
            f"\0{name}\0{array.shape}\0".encode() + np.ascontiguousarray(array).tobytes()
            for name, array in sorted(self._arrays().items())
        ]
        return format_checksum(bytes_checksum(np.frombuffer(b"".join(parts), np.uint8)))

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, dense in self.dense.items():
            arrays[f"dense/{name}/squares"] = dense.squares
            arrays[f"dense/{name}/count"] = np.array(dense.count, np.int64)
        for layer, sums in self.experts.items():
            arrays[f"experts/{layer}/inputs"] = sums.inputs
            arrays[f"experts/{layer}/hidden"] = sums.hidden
            arrays[f"experts/{layer}/counts"] = sums.counts
        return arrays

    def save(self, path: Path) -> None:
        """Write the sums to a file, under a temporary name first."""
        about = json.dumps({"format": FORMAT, **self.about}, sort_keys=True)
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, about=np.frombuffer(about.encode(), np.uint8), **self._arrays())  # type: ignore[arg-type]
        partial.replace(path)


def added(sums: Float64, x: Float32) -> Float64:
    """Add the squares of rows x [T, K] to sums [K], one row after the other."""
    squares = np.square(x, dtype=np.float64)
    total: Float64 = np.add.reduce(np.concatenate([sums[None], squares]), axis=0)
    return total


def _checked(squares: Float64, cols: int, where: str) -> Float32:
    if len(squares) != cols:
        raise CheckpointError(
            f"importance is of another model: {where}\nexpected {cols} inputs, got {len(squares)}"
        )
    return normalised(squares)


def read_importance(path: Path, model_type: str) -> Importance:
    """Read a file that `save` wrote, or an imatrix of llama.cpp in GGUF form.

    Args:
        path: the file.
        model_type: of the model, whose names an imatrix has in the words of GGUF.

    Raises:
        CheckpointError: the file is missing, damaged or of another kind.
        UnsupportedModelError: GGUF has no names for this architecture.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"cannot read importance {path}: {error.strerror}") from error
    if magic == GGUF_MAGIC:
        return _read_imatrix(path, model_type)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            return _from_arrays({name: content[name] for name in content.files}, path)
    # NumPy and JSON name what does not fit in several ways.
    except (
        OSError, ValueError, KeyError, TypeError, EOFError, RecursionError,
        zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"malformed importance file: {path}\nexpected one of `convert --calibrate`, or an "
            f"imatrix of llama.cpp in GGUF form\n{str(error).partition('This file contains')[0]}\n"
            "hint: `llama-imatrix --in-file OLD --output-format gguf -o NEW` turns an old imatrix "
            "into that form"
        ) from None


def _from_arrays(arrays: dict[str, npt.NDArray[Any]], path: Path) -> Importance:
    about = json.loads(arrays.pop("about").tobytes())
    if not isinstance(about, dict):
        raise ValueError("`about` is no JSON object")
    if about.pop("format", None) != FORMAT:
        raise ValueError(f"got no `{FORMAT}`")
    found = Importance(about=about)
    for name, array in arrays.items():
        if array.dtype not in (np.float64, np.int64) or not np.isfinite(array).all():
            raise ValueError(f"bad values: {name}")
        if (array < 0).any():
            raise ValueError(f"a sum of squares or a count is negative: {name}")
        kind, rest = name.split("/", 1)
        if kind == "dense" and rest.endswith("/squares"):
            base = rest.removesuffix("/squares")
            count = int(arrays[f"dense/{base}/count"])
            found.dense[base] = DenseSums(array, count)
        elif kind == "experts" and rest.endswith("/inputs"):
            layer = rest.removesuffix("/inputs")
            hidden, counts = (arrays[f"experts/{layer}/{part}"] for part in ("hidden", "counts"))
            if not len(array) == len(hidden) == len(counts):
                raise ValueError(f"numbers of experts differ: {name}")
            found.experts[int(layer)] = ExpertSums(array, hidden, counts)
    return found


def _read_imatrix(path: Path, model_type: str) -> Importance:
    header = read_header(path)
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise UnsupportedModelError(
            f"an imatrix names tensors as GGUF does, which has no names for {model_type}: {path}"
        )
    suffix = ".in_sum2"
    names = [name.removesuffix(suffix) for name in header.tensors if name.endswith(suffix)]
    if header.metadata.get("general.type") != "imatrix" or not names:
        raise CheckpointError(
            f"no imatrix: {path}\nexpected `general.type` to be imatrix and tensors named *{suffix}"
        )
    found = Importance(about={"imatrix": path.name})
    experts: dict[int, dict[str, tuple[Float64, Float64]]] = {}
    for name in names:
        squares = _values(path, header.tensors[name + suffix], name + suffix)
        counts = _values(path, header.tensors.get(name + ".counts"), name + ".counts").reshape(-1)
        parts = name.split(".", 2)
        role = next((r for r, own in EXPERT_ROLES.items() if parts[2:] == [own]), None)
        if role is not None and parts[1].isdecimal():
            if squares.ndim != 2 or len(squares) != len(counts):
                raise CheckpointError(
                    f"malformed imatrix: {name}, file {path}\nexpected one row and one count for "
                    f"each expert, got {list(squares.shape)} and {list(counts.shape)}"
                )
            experts.setdefault(int(parts[1]), {})[role] = (squares, counts)
        else:
            found.dense[architecture.hugging_face_name(name)] = DenseSums(
                squares.reshape(-1), int(counts.sum())
            )
    for layer, by_role in experts.items():
        if not {"gate", "down"} <= set(by_role):
            raise CheckpointError(
                f"malformed imatrix: layer {layer}, file {path}\nexpected gate, up and down, "
                f"got {', '.join(sorted(by_role))}"
            )
        (inputs, counts), (hidden, _) = by_role["gate"], by_role["down"]
        found.experts[layer] = ExpertSums(inputs, hidden, counts.astype(np.int64))
    return found


def _values(path: Path, tensor: GgufTensor | None, name: str) -> Float64:
    if tensor is None or tensor.type.name != "F32":
        got = "nothing" if tensor is None else tensor.type.name
        raise CheckpointError(f"malformed imatrix: {name}, file {path}\nexpected F32, got {got}")
    data = np.empty(4 * int(np.prod(tensor.shape, dtype=np.int64)), np.uint8)
    read_range(path, tensor.offset, data)
    check_finite(data, "f32", name, path)
    values = data.view("<f4").astype(np.float64).reshape(tensor.shape)
    if (values < 0).any():
        raise CheckpointError(f"malformed imatrix: {name}, file {path}\na value is negative")
    return values
