"""Fewer or other experts than the router chose: on request only, and its cost always measured.

Only steps that decode are touched: a prompt is computed exactly. One step in N is computed exactly
first, on the same state; then the lossy step writes its own keys and values over those of the exact
one, so that it is the lossy stream that goes on, and nothing of the exact one is left in it. The
lossy step then chooses by the slots as they were before the exact one, which read what the rules
leave out: else a check would never see what `drop_cold` and `cache_aware_routing` cost. With every
rule off the model is the exact one, byte for byte.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace import ops
from headrace.arrays import Float32, Int32
from headrace.config import LOSSY_MODES, EngineConfig
from headrace.errors import ConfigError
from headrace.experts import ExpertStore
from headrace.models.blocks import MoE
from headrace.models.decoder import Decoder
from headrace.state import KVPool, StepRows

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """The modes asked for; None is off."""

    expert_top_p: float | None = None
    expert_top_k: int | None = None
    cache_aware_routing: float | None = None
    drop_cold: float | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> "Rules":
        """Take the modes from a config."""
        return cls(**{name: getattr(config, name) for name in LOSSY_MODES})

    @property
    def names(self) -> dict[str, float | int]:
        """Those that are on."""
        values = {name: getattr(self, name) for name in LOSSY_MODES}
        return {name: value for name, value in values.items() if value is not None}


def select(
    probabilities: Float32, held: npt.NDArray[np.bool_], top_k: int, rules: Rules
) -> list[Int32]:
    """Choose the experts of each token.

    In this order: `cache_aware_routing` b takes the A largest of p * (1 + b) for an expert that is
    in a slot and p for one that is not; `expert_top_k` keeps the likeliest k of them;
    `expert_top_p` keeps the likeliest until they have that share of the weight of the A;
    `drop_cold` drops what is in no slot and has less than that share. The likeliest stays always.
    Ties go to the lower id.

    Args:
        probabilities: [T, E], the router's softmax.
        held: [E], whether the expert is in a slot.
        top_k: A.
        rules: what is on.

    Returns:
        For each token the ids [1..A], likeliest first.
    """
    bias = rules.cache_aware_routing or 0.0
    scores = probabilities.astype(np.float64) * np.where(held, 1.0 + bias, 1.0)
    chosen = []
    for row, score in zip(probabilities.astype(np.float64), scores, strict=True):
        picked = np.argsort(-score, kind="stable")[:top_k]
        ids = picked[np.lexsort((picked, -row[picked]))]
        share = row[ids] / max(row[ids].sum(), np.finfo(np.float64).tiny)
        keep = np.ones(len(ids), bool)
        if rules.expert_top_k is not None:
            keep[rules.expert_top_k :] = False
        if rules.expert_top_p is not None and rules.expert_top_p < 1:
            before = np.cumsum(share) - share
            keep &= before < rules.expert_top_p
        if rules.drop_cold is not None:
            keep &= held[ids] | (share >= rules.drop_cold)
        keep[0] = True
        chosen.append(ids[keep].astype(np.int32))
    return chosen


class LossyMoE(MoE):
    """A mixture that follows the rules while they are on, and else is the exact one."""

    def __init__(self, exact: MoE, num_experts: int, switch: "Switch") -> None:
        self.layer = exact.layer
        self.top_k = exact.top_k
        self.renormalize = exact.renormalize
        self.router = exact.router
        self._exact = exact
        self._num_experts = num_experts
        self._switch = switch

    def __call__(self, x: Float32, experts: ExpertStore | None, *more: Any) -> Float32:
        """Route x [T, D] by the rules; `more` is what an exact mixture takes besides."""
        if not self._switch.is_on or experts is None:
            return self._exact(x, experts, *more)
        ids, weights = ops.router_topk(
            x, self.router, top_k=self.top_k, renormalize=self.renormalize
        )
        all_ids, all_weights = ops.router_topk(
            x, self.router, top_k=self._num_experts, renormalize=False
        )
        probabilities = np.empty_like(all_weights)
        np.put_along_axis(probabilities, all_ids, all_weights, axis=1)
        held = self._switch.held(self.layer, experts)
        chosen = select(probabilities, held, self.top_k, self._switch.rules)
        out = np.empty_like(x)
        for rows in _of_equal_length(chosen):
            picked = np.stack([chosen[row] for row in rows])
            shares = np.stack(
                [_weights(chosen[row], ids[row], weights[row], probabilities[row]) for row in rows]
            )
            with experts.acquire(self.layer, picked) as lease:
                out[rows] = ops.moe_ffn(np.ascontiguousarray(x[rows]), picked, shares, lease)
        return out


def _weights(chosen: Int32, ids: Int32, weights: Float32, probabilities: Float32) -> Float32:
    """Weights of the chosen: of the same sum as the exact ones, and these where nothing changed."""
    if np.array_equal(chosen, ids):
        return weights
    kept = probabilities[chosen].astype(np.float64)
    scaled: Float32 = (kept * (weights.astype(np.float64).sum() / kept.sum())).astype(np.float32)
    return scaled


def _of_equal_length(chosen: Sequence[Int32]) -> list[list[int]]:
    """Rows in groups that have as many experts: a group is one call."""
    groups: dict[int, list[int]] = {}
    for row, ids in enumerate(chosen):
        groups.setdefault(len(ids), []).append(row)
    return list(groups.values())


@dataclass
class Switch:
    """What all mixtures of a model share."""

    rules: Rules
    is_on: bool = False
    layers: list[int] = field(default_factory=list)  # of the mixtures
    noted: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def note_held(self, experts: ExpertStore) -> None:
        """Keep what is in slots now for the next lossy step."""
        self.noted = {layer: experts.held(layer) for layer in self.layers}

    def held(self, layer: int, experts: ExpertStore) -> npt.NDArray[np.bool_]:
        """Which experts of a layer are in a slot, or were when that was noted: [E]."""
        noted = self.noted.get(layer)
        return experts.held(layer) if noted is None else noted


class ExactModel(Protocol):
    """A model as the engine calls it."""

    def __call__(
        self,
        ids: Int32,
        rows: StepRows,
        kv: KVPool,
        experts: ExpertStore | None,
        logits_rows: Int32,
    ) -> Float32:
        """Compute one step; see `Decoder`."""


class LossyModel:
    """A model whose mixtures follow the rules where sequences decode; counts what it costs."""

    def __init__(
        self, model: ExactModel, switch: Switch, *, check_every: int, max_kl: float | None
    ) -> None:
        """Wrap a model.

        Args:
            model: whose mixtures ask `switch`.
            switch: shared with them.
            check_every: of how many decoding steps one is computed exactly as well.
            max_kl: a mean above it ends the modes; None never does.
        """
        self._model = model
        self._switch = switch
        self._check_every = check_every
        self._max_kl = max_kl
        self._num_steps = 0
        self._sum_kl = 0.0
        self._num_flips = 0
        self.num_checks = 0
        self.is_ended = False

    def __call__(
        self,
        ids: Int32,
        rows: StepRows,
        kv: KVPool,
        experts: ExpertStore | None,
        logits_rows: Int32,
    ) -> Float32:
        """Compute one step: exactly if it holds part of a prompt, else by the rules."""
        if self.is_ended or not rows.is_decoding:
            return self._model(ids, rows, kv, experts, logits_rows)
        is_checked = self._num_steps % self._check_every == 0
        self._num_steps += 1
        if is_checked and experts is not None:
            self._switch.note_held(experts)
        exact = self._model(ids, rows, kv, experts, logits_rows).copy() if is_checked else None
        self._switch.is_on = True
        try:
            logits = self._model(ids, rows, kv, experts, logits_rows)
        finally:
            self._switch.is_on = False
            self._switch.noted = {}
        if exact is not None:
            self._judge(exact, logits)
        return logits

    def _judge(self, exact: Float32, lossy: Float32) -> None:
        self._sum_kl += float(divergence(exact, lossy).sum())
        self._num_flips += int((exact.argmax(axis=1) != lossy.argmax(axis=1)).sum())
        self.num_checks += len(exact)
        mean = self._sum_kl / self.num_checks
        if self._max_kl is not None and mean > self._max_kl:
            self.is_ended = True
            _log.warning(
                "lossy modes end: mean KL %.4g is above %.4g; from here on tokens are computed "
                "exactly, after what was lossy before", mean, self._max_kl,
            )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """What was on since the start, and its cost: KL in nats, flips of the likeliest token."""
        checks = self.num_checks
        return {
            **self._switch.rules.names,
            "checked_tokens": checks,
            "mean_kl": self._sum_kl / checks if checks else None,
            "flip_rate": self._num_flips / checks if checks else None,
            "ended": self.is_ended,
        }


def divergence(exact: Float32, lossy: Float32) -> npt.NDArray[np.float64]:
    """KL(exact || lossy) of the softmax of each row of logits [R, V], in nats: [R]."""
    p, q = (log_softmax(scores) for scores in (exact, lossy))
    result: npt.NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)
    return result


def log_softmax(scores: Float32) -> npt.NDArray[np.float64]:
    """Natural-log probabilities of logits: [R, V] -> [R, V] float64."""
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def make_lossy(model: Decoder, config: EngineConfig) -> LossyModel | None:
    """Put the modes of a config into a model's mixtures; None if none is on.

    Raises:
        ConfigError: the model has no experts to choose from, or not so many.
    """
    rules = Rules.of(config)
    if not rules.names:
        return None
    spec = model.spec
    if not spec.moe_layers:
        names = ", ".join(rules.names)
        raise ConfigError(f"{names}: this model has no experts that a router chooses")
    if rules.expert_top_k is not None and rules.expert_top_k > spec.num_experts_per_tok:
        raise ConfigError(
            f"option `expert_top_k` is larger than the model's\n"
            f"expected 1..{spec.num_experts_per_tok}, got {rules.expert_top_k}"
        )
    switch = Switch(rules)
    for layer in model.layers:
        if isinstance(layer.ffn, MoE):
            switch.layers.append(layer.ffn.layer)
            layer.ffn = LossyMoE(layer.ffn, spec.num_experts, switch)
    return LossyModel(model, switch, check_every=config.lossy_check_every, max_kl=config.max_kl)
