"""The llama3 rope rule, had back from the factors that a GGUF file states in its place.

The file holds by what each rope frequency is divided. The rule that made these numbers has three
parameters beside the largest factor; every release has the same ones, and they are checked against
all the numbers in the file.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arrays import Float32
from headrace.checkpoint.gguf_header import GgufTensor
from headrace.checkpoint.values import read_range
from headrace.errors import CheckpointError, UnsupportedModelError

LOW, HIGH, ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""`low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings` of Llama 3.1 to
3.3."""
TOLERANCE = 1e-5


def llama3_scaling(tensor: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """State factors [Dh / 2] as the `rope_scaling` of a config.

    Raises:
        CheckpointError: the tensor is misshapen or holds no sensible factors.
        UnsupportedModelError: no llama3 rule with the parameters of the releases gives them.
    """
    if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
        raise CheckpointError(
            f"tensor has the wrong shape or type: {tensor.name}, file {tensor.path}\n"
            f"expected F32 [{head_dim // 2}], got {tensor.type.name} {list(tensor.shape)}"
        )
    factors: Float32 = np.empty(head_dim // 2, np.float32)
    read_range(tensor.path, tensor.offset, factors.view(np.uint8))
    factor = float(factors.max())
    if np.isfinite(factors).all() and factor >= 1:
        expected = _factors(theta, head_dim, factor)
        if np.allclose(factors, expected, rtol=TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": ORIGINAL_CONTEXT,
            }
    raise UnsupportedModelError(
        f"rope factors follow no rule that is known: {tensor.name}, file {tensor.path}\n"
        f"expected those of llama3 rope over {ORIGINAL_CONTEXT} positions, got factors from "
        f"{float(factors.min()):g} to {factor:g}"
    )


def _factors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    frequency = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = ORIGINAL_CONTEXT * frequency / (2 * math.pi)
    smooth = np.clip((turns - LOW) / (HIGH - LOW), 0, 1)
    scaled: npt.NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return scaled
