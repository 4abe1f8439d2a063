"""Packing with searched scales: native against quant_search.py, byte for byte, and what it wins."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from headrace import _core, ops, quant, quant_search
from headrace.errors import CheckpointError, ConfigError, ShapeError

from .conftest import assert_same_bits

FORMATS = [("q4", 32), ("q4", 64), ("q8", 32), ("mxfp4", 32)]
SHAPES = [(1, 1), (16, 64), (17, 65), (48, 33), (5, 200)]


def unpacked(packed: np.ndarray, format: str, shape: tuple[int, int], group: int) -> np.ndarray:
    return quant.unpack(packed, format, *shape, group).astype(np.float64)


def weighed(w: np.ndarray, group: int) -> np.ndarray:
    """What a squared error of each weight counts where all inputs count alike."""
    squares = (w.astype(np.float64) ** 2).reshape(-1, group)
    return np.sqrt(squares.mean(1, keepdims=True) + squares).reshape(w.shape)


@pytest.fixture(params=ops.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    before = ops.isa()
    ops.set_isa(request.param)
    request.addfinalizer(lambda: ops.set_isa(before))
    return request.param


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [1.0, 1e-3, 3e-7, 4e4, 0.0])
def test_native_equals_reference(
    rng: np.random.Generator, isa: str, format: str, group: int, shape: tuple[int, int],
    factor: float,
) -> None:  # fmt: skip
    w = np.clip(rng.standard_t(3, shape) * factor, -5e5, 5e5).astype(np.float32)
    importance = rng.gamma(0.3, 1.0, shape[1]).astype(np.float32)
    importance[rng.random(shape[1]) < 0.2] = 0
    for counts in (None, importance):
        packed, _, _ = _core.quantise(w, format, group, counts)
        assert_same_bits(packed, quant_search.quantise(w, format, group, counts))


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_values_between_two_codes_and_extremes(isa: str, format: str, group: int) -> None:
    steps = np.arange(-64, 64, dtype=np.float32).reshape(2, 64) / 4
    odd = np.array([[1e30, -1e30], [0.0, -0.0], [1e-40, 2e-45]], np.float32)
    odd = np.tile(odd, (1, 32)) if format == "mxfp4" else np.tile(odd[1:], (1, 32))
    for w in (steps, odd):
        packed, _, _ = _core.quantise(w, format, group)
        assert_same_bits(packed, quant_search.quantise(w, format, group))


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_sources(rng: np.random.Generator, format: str, group: int, dtype: str) -> None:
    w = rng.standard_normal((20, 70)).astype(np.float32)
    source = w.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bf16" else w.astype("f2")
    packed, _, _ = _core.quantise(source, format, group)
    assert_same_bits(packed, quant_search.quantise(source, format, group))


@pytest.mark.parametrize(("format", "group", "least"), [
    ("q4", 32, 0.04), ("q4", 64, 0.04), ("q8", 32, 0.05), ("mxfp4", 32, 0.02),
])  # fmt: skip
def test_error_is_never_larger_and_on_the_whole_smaller(
    rng: np.random.Generator, format: str, group: int, least: float
) -> None:
    w = rng.standard_normal((64, 512)).astype(np.float32)
    plain = unpacked(_core.pack(w, format, group), format, w.shape, group)
    packed, squared_error, squares = _core.quantise(w, format, group)
    found = unpacked(packed, format, w.shape, group)
    counts = weighed(w, group)
    before = (counts * (w - plain) ** 2).reshape(-1, group).sum(1)
    after = (counts * (w - found) ** 2).reshape(-1, group).sum(1)
    assert (after <= before * (1 + 1e-5)).all()
    assert np.sqrt(after.sum() / before.sum()) < 1 - least
    assert squared_error == pytest.approx(((w - found) ** 2).sum(), rel=1e-5)
    assert squares == pytest.approx((w.astype(np.float64) ** 2).sum(), rel=1e-12)


def test_errors_of_large_weights_count_more(rng: np.random.Generator) -> None:
    w = rng.standard_t(4, (256, 512)).astype(np.float32)
    found = unpacked(_core.quantise(w, "q4", 32)[0], "q4", w.shape, 32)
    groups = np.arange(w.size // 32)
    largest = np.abs(w.reshape(-1, 32)).argmax(1)
    errors = ((w - found) ** 2).reshape(-1, 32)
    least = least_squares(w)
    assert errors[groups, largest].mean() < 0.8 * least[groups, largest].mean()
    assert errors.mean() < 1.05 * least.mean()


def least_squares(w: np.ndarray) -> np.ndarray:
    """Squared errors [groups, 32] of q4 with the tried scale that keeps their plain sum least."""
    rows = w.reshape(-1, 32).astype(np.float64)
    largest = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)
    best = np.full(rows.shape, np.inf)
    for divisor in quant_search.Q4_DIVISORS:
        scales = largest / divisor
        errors = (rows - np.clip(np.rint(rows / scales), -8, 7) * scales) ** 2
        best = np.where(errors.sum(1, keepdims=True) < best.sum(1, keepdims=True), errors, best)
    return best


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_importance_moves_the_error_to_where_it_counts_less(
    rng: np.random.Generator, format: str, group: int
) -> None:
    w = rng.standard_normal((64, 256)).astype(np.float32)
    importance = rng.gamma(0.5, 2.0, 256).astype(np.float32)
    alike = unpacked(_core.quantise(w, format, group)[0], format, w.shape, group)
    aimed = unpacked(_core.quantise(w, format, group, importance)[0], format, w.shape, group)
    assert ((w - aimed) ** 2 * importance).sum() < ((w - alike) ** 2 * importance).sum()
    assert ((w - aimed) ** 2).sum() > ((w - alike) ** 2).sum()


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_weight_is_named(format: str, group: int, bad: float) -> None:
    w = np.zeros((20, 70), np.float32)
    w[17, 66] = bad
    with pytest.raises(CheckpointError, match=r"tensor some\.weight, index \[17, 66\]"):
        _core.quantise(w, format, group, name="some.weight")


def test_a_scale_beyond_float16_is_refused() -> None:
    w = np.full((1, 32), 1e6, np.float32)
    with pytest.raises(CheckpointError, match="scale fits float16"):
        _core.quantise(w, "q4", 32)


def test_wrong_arguments_are_refused() -> None:
    w = np.zeros((4, 64), np.float32)
    with pytest.raises(ConfigError, match="no search for format `bf16`"):
        _core.quantise(w, "bf16", 1)
    with pytest.raises(ShapeError, match="importance"):
        _core.quantise(w, "q4", 32, np.ones(63, np.float32))


def test_the_version_belongs_to_the_bytes() -> None:
    """A change of these bytes needs another SEARCH_VERSION, and then another digest here."""
    rng = np.random.default_rng(3)
    w = (rng.integers(-999, 1000, (32, 192)) / 1024).astype(np.float32)
    importance = (1 + rng.integers(0, 9, 192)).astype(np.float32)
    digest = hashlib.sha256()
    for format, group in FORMATS:
        for counts in (None, importance):
            digest.update(_core.quantise(w, format, group, counts)[0].tobytes())
    assert (quant_search.SEARCH_VERSION, digest.hexdigest()[:16]) == (1, "78769cd1f2777bb9")
