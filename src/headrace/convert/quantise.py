"""Packing as a recipe asks for it, with the books of what was lost.

Owns the choice between plain and searched scales and the sums of the report. What importance is,
and where it comes from, is `importance.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.arrays import Bytes, Float32
from headrace.checkpoint.layout import Recipe
from headrace.checkpoint.values import pack_values, quantise_values
from headrace.quant_search import SEARCHED


@dataclass
class Loss:
    """Sums over the tensors of a class that were quantised."""

    squared_error: float = 0.0
    squares: float = 0.0
    num_values: int = 0
    nbytes: int = 0

    @property
    def relative(self) -> float:
        """Root mean square of the error over that of the weights."""
        return math.sqrt(self.squared_error / self.squares) if self.squares > 0 else 0.0

    def as_dict(self) -> dict[str, float | int]:
        """Return what the report says of a class."""
        return {
            "relative_rms_error": self.relative,
            "num_values": self.num_values,
            "bits_per_value": 8 * self.nbytes / self.num_values,
        }


@dataclass
class Quantiser:
    """Packs matrices by one recipe and adds up what each class lost."""

    recipe: Recipe
    losses: dict[str, Loss] = field(default_factory=dict)
    """By class of tensors."""

    def pack(
        self,
        values: Bytes,
        shape: tuple[int, int],
        source: str,
        format: str,
        group: int,
        name: str,
        path: Path,
        first: int = 0,
        kind: str = "other",
        importance: Float32 | None = None,
    ) -> Bytes:
        """Pack row-major values as `pack_values` does, and note the loss under `kind`.

        `importance` [K] is what a squared error of each input counts; None: see quant_search.

        Raises:
            CheckpointError: as `pack_values`.
        """
        if self.recipe.scales != "search" or format not in SEARCHED:
            return pack_values(values, shape, source, format, group, name, path, first)
        packed, squared_error, squares = quantise_values(
            values, shape, source, format, group, importance, name, path, first
        )
        loss = self.losses.setdefault(kind, Loss())
        loss.squared_error += squared_error
        loss.squares += squares
        loss.num_values += shape[0] * shape[1]
        loss.nbytes += len(packed)
        return packed


def normalised(counts: npt.NDArray[np.float64]) -> Float32:
    """Scale importance to a mean of one; all alike where nothing was seen.

    Args:
        counts: [K], each >= 0.

    Returns:
        [K] float32.
    """
    mean = float(np.add.reduce(counts, dtype=np.float64)) / len(counts)
    if not (math.isfinite(mean) and mean > 0):
        return np.ones(len(counts), np.float32)
    return (counts / mean).astype(np.float32)
