"""Rotary position frequencies: how a config states them, and their values.

Two generations of names are read: `rope_theta` beside `rope_scaling`, and one object
`rope_parameters`. A scaling rule that is not implemented is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.arrays import Float32
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.models.fields import ConfigFields

Float64: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """A rope rule. `parameters` holds what its `kind` needs beside `theta`.

    Attributes:
        theta: base of the frequencies.
        kind: `default`, `linear`, `yarn` or `llama3`.
        factor: how far the context is stretched; 1 for `default`.
        original_context: tokens the model was trained on before stretching; 0 if unused.
        fast, slow: yarn `beta_fast`, `beta_slow`; llama3 `high_freq_factor`, `low_freq_factor`.
        truncate: yarn: round the ramp's ends to whole dimensions.
        attention_factor: multiplies cos and sin.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    fast: float = 0.0
    slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ConfigError(f"config.json: `rope_theta` must be above 1, got {self.theta}")
        if self.kind == "llama3" and self.fast <= self.slow:
            raise ConfigError(
                "config.json: `high_freq_factor` must exceed `low_freq_factor`\n"
                f"got {self.fast} and {self.slow}"
            )

    def inv_freq(self, head_dim: int) -> Float32:
        """Angle per position of each rotated pair: [head_dim / 2] float32, computed in float64."""
        plain = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        rules = {"default": _default, "linear": _linear, "yarn": _yarn, "llama3": _llama3}
        return rules[self.kind](self, plain).astype(np.float32)


def _default(rope: Rope, plain: Float64) -> Float64:
    return plain


def _linear(rope: Rope, plain: Float64) -> Float64:
    return plain / rope.factor


def _yarn(rope: Rope, plain: Float64) -> Float64:
    """Keep fast dimensions, stretch slow ones, ramp between (YaRN, section 3.2)."""
    dim = 2 * plain.size

    def dimension(turns: float) -> float:
        """The dimension that makes `turns` full turns within the original context."""
        return (
            dim
            * math.log(rope.original_context / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.fast), dimension(rope.slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp: Float64 = np.clip((np.arange(plain.size) - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def _llama3(rope: Rope, plain: Float64) -> Float64:
    """Stretch wavelengths above the original context / slow, keep those below it / fast."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength
    smooth: Float64 = np.clip((turns - rope.slow) / (rope.fast - rope.slow), 0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def read_rope(fields: ConfigFields) -> Rope:
    """Take the rope fields of a config, under their old or new names.

    Raises:
        ConfigError: `theta` or a parameter of the rule is missing, or a parameter is unknown.
        UnsupportedModelError: the rule itself is not implemented.
    """
    old = fields.value("rope_scaling", default=None)
    new = fields.value("rope_parameters", default=None)
    given = _agree(old, new)
    if "rope_theta" in given:
        inner = ConfigFields(given, "config.json, rope parameters")
        theta = inner.number("rope_theta")
        if fields.is_set("rope_theta") and fields.number("rope_theta") != theta:
            raise ConfigError("config.json: `rope_theta` and `rope_parameters.rope_theta` disagree")
        fields.value("rope_theta", default=None)
    else:
        inner = ConfigFields(given, "config.json, rope parameters")
        theta = _read_theta(fields)
    kind = inner.value("rope_type", "type", default="default")
    if not isinstance(kind, str) or kind not in _READERS:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported\n"
            f"expected one of {', '.join(_READERS)}"
        )
    context = fields.integer("max_position_embeddings")
    rope = _READERS[kind](inner, theta, context)
    # 5.x files repeat the rotary share of the head; anything but the whole head is another model.
    inner.require("partial_rotary_factor", 1.0)
    inner.finish()
    return rope


def _read_theta(fields: ConfigFields) -> float:
    if not fields.is_set("rope_theta"):
        raise ConfigError(
            "config.json: field `rope_theta` is missing, and there are no `rope_parameters`\n"
            "hint: the first Llama files leave it out and mean 10000; write it into config.json"
        )
    return fields.number("rope_theta")


def _agree(old: Any, new: Any) -> dict[str, Any]:
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"config.json: field `{name}` must be an object\ngot {value!r}")
    if old and new and any(new.get(k, v) != v for k, v in old.items()):
        raise ConfigError("config.json: `rope_scaling` and `rope_parameters` disagree")
    return {**(old or {}), **(new or {})}


def _read_default(fields: ConfigFields, theta: float, context: int) -> Rope:
    return Rope(theta)


def _read_linear(fields: ConfigFields, theta: float, context: int) -> Rope:
    return Rope(theta, "linear", factor=fields.number("factor"))


def _read_yarn(fields: ConfigFields, theta: float, context: int) -> Rope:
    factor = fields.number("factor")
    mscale = fields.number("mscale", default=0.0, least=0.0)
    mscale_all = fields.number("mscale_all_dim", default=0.0, least=0.0)
    if fields.is_set("attention_factor"):
        attention_factor = fields.number("attention_factor")
    elif mscale and mscale_all:
        attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_context=fields.integer("original_max_position_embeddings", default=context),
        fast=fields.number("beta_fast", default=32.0),
        slow=fields.number("beta_slow", default=1.0),
        truncate=fields.boolean("truncate", default=True),
        attention_factor=attention_factor,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_llama3(fields: ConfigFields, theta: float, context: int) -> Rope:
    return Rope(
        theta,
        "llama3",
        factor=fields.number("factor"),
        original_context=fields.integer("original_max_position_embeddings"),
        fast=fields.number("high_freq_factor"),
        slow=fields.number("low_freq_factor"),
    )


_READERS = {
    "default": _read_default,
    "linear": _read_linear,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
}
