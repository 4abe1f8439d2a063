"""The native packer and checksum against the second opinion in packed_reference.py."""

import numpy as np
import packed_reference as reference
import pytest
from checkpoint_helpers import to_bf16

from headrace import _core

FORMATS = [("q4", 32), ("q4", 64), ("q8", 32), ("mxfp4", 32), ("bf16", 1), ("f16", 1), ("f32", 1)]


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("shape", [(16, 64), (33, 70), (1, 1), (48, 129)])
def test_packer_writes_the_documented_bytes(
    format: str, group: int, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal(shape).astype(np.float32)
    weights[rng.random(shape) < 0.1] = 0
    weights[0] = 0  # a group without a scale
    sources = [to_bf16(weights), weights.astype(np.float16), weights]
    for source in sources:
        packed = _core.pack(source, format, group)
        assert len(packed) == _core.packed_bytes(format, *shape, group)
        assert len(packed) == reference.packed_bytes(format, *shape, group)
        if format == "f16" and source.dtype == np.uint16:
            continue  # bf16 to f16 is never asked for
        np.testing.assert_array_equal(packed, reference.pack(source, format, group))
        matrix = _core.Matrix(packed, format, *shape, group)
        np.testing.assert_array_equal(
            _core.unpack(matrix), reference.unpack_bytes(packed, format, *shape, group)
        )


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_checksum_is_the_documented_one(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    assert _core.checksum(data) == reference.checksum(data)
