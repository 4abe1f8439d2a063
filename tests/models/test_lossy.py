"""The rules that choose fewer or other experts, and the measure of what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.arrays import Float32
from headrace.models.lossy import LossyModel, Rules, Switch, divergence, select
from headrace.state import StepRows

A = 3
EXPERTS = 8


def reference(row: Float32, held: set[int], rules: Rules) -> list[int]:
    """The same choice for one token, expert by expert, as the help of the options says it."""
    p = [float(x) for x in row]
    b = rules.cache_aware_routing or 0.0
    by_score = sorted(range(len(p)), key=lambda e: (-p[e] * ((1 + b) if e in held else 1.0), e))
    ids = sorted(by_score[:A], key=lambda e: (-p[e], e))
    total = sum(p[e] for e in ids)
    kept, before = [], 0.0
    for rank, e in enumerate(ids):
        share = p[e] / total
        wanted = rules.expert_top_k is None or rank < rules.expert_top_k
        wanted &= rules.expert_top_p is None or before < rules.expert_top_p
        wanted &= rules.drop_cold is None or e in held or share >= rules.drop_cold
        if wanted or rank == 0:
            kept.append(e)
        before += share
    return kept


def held_mask(held: set[int]) -> np.ndarray:
    return np.array([e in held for e in range(EXPERTS)])


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(expert_top_k=1),
        Rules(expert_top_k=2),
        Rules(expert_top_p=0.6),
        Rules(expert_top_p=1.0),
        Rules(cache_aware_routing=0.5),
        Rules(cache_aware_routing=100),
        Rules(drop_cold=0.3),
        Rules(drop_cold=1.0),
        Rules(expert_top_p=0.8, expert_top_k=2, cache_aware_routing=0.3, drop_cold=0.25),
    ],
)
def test_each_rule_does_what_it_says(rules: Rules) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        held = {int(e) for e in np.flatnonzero(rng.random(EXPERTS) < 0.5)}
        probabilities = rng.dirichlet(np.ones(EXPERTS), 5).astype(np.float32)
        got = select(probabilities, held_mask(held), A, rules)
        assert [ids.tolist() for ids in got] == [reference(p, held, rules) for p in probabilities]


def test_the_rules_by_hand() -> None:
    p = np.array([[0.05, 0.4, 0.1, 0.3, 0.15, 0, 0, 0]], np.float32)
    cold = held_mask(set())

    def chosen(held: np.ndarray, **rules: float) -> list[int]:
        return select(p, held, A, Rules(**rules))[0].tolist()  # type: ignore[arg-type]

    assert chosen(cold) == [1, 3, 4]
    assert chosen(cold, expert_top_k=2) == [1, 3]
    assert chosen(cold, expert_top_p=0.47) == [1]  # its share of the three is 0.4 / 0.85
    assert chosen(cold, expert_top_p=0.48) == [1, 3]
    assert chosen(cold, drop_cold=0.2) == [1, 3]  # 0.15 / 0.85
    assert chosen(held_mask({4}), drop_cold=0.2) == [1, 3, 4]
    assert chosen(cold, drop_cold=1.0) == [1], "the likeliest stays"
    assert chosen(held_mask({2}), cache_aware_routing=0.4) == [1, 3, 4]
    assert chosen(held_mask({2}), cache_aware_routing=0.6) == [1, 3, 2]


def test_ties_go_to_the_lower_id() -> None:
    p = np.full((1, EXPERTS), 1 / EXPERTS, np.float32)
    assert select(p, held_mask(set()), A, Rules())[0].tolist() == [0, 1, 2]


def test_divergence_of_known_distributions() -> None:
    p = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    q = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32))
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    np.testing.assert_allclose(divergence(p, q), [expected, 0], atol=1e-7)
    np.testing.assert_array_equal(divergence(p + 5, p + 5), 0)


class FakeModel:
    """Scores [0, 1] exactly and [1, 0] by the rules; notes in which order it was asked."""

    def __init__(self, switch: Switch) -> None:
        self.switch, self.calls = switch, list[bool]()

    def __call__(self, ids: object, *_: object) -> Float32:
        self.calls.append(self.switch.is_on)
        return np.array([[1, 0] if self.switch.is_on else [0, 1]] * len(ids), np.float32)  # type: ignore[arg-type]


def step(model: LossyModel, rows: int, is_decoding: bool) -> None:
    zeros = np.zeros(rows, np.int32)
    table = np.zeros((1, 1), np.int32)
    model(zeros, StepRows(zeros, zeros, table, is_decoding), None, None, zeros[-1:])  # type: ignore[arg-type]


def test_one_step_in_n_is_checked_exact_first_and_prompts_are_exact() -> None:
    switch = Switch(Rules(expert_top_k=1))
    inner = FakeModel(switch)
    model = LossyModel(inner, switch, check_every=3, max_kl=None)
    step(model, rows=5, is_decoding=False)
    step(model, rows=1, is_decoding=False)  # the last row of a prompt looks like a token's
    assert inner.calls == [False, False]
    inner.calls.clear()
    for _ in range(4):
        step(model, rows=1, is_decoding=True)
    # Exact first, so that the keys and values that stay are those of the lossy step.
    assert inner.calls == [False, True, True, True, False, True]
    report = model.report()
    assert report["checked_tokens"] == 2 and report["flip_rate"] == 1.0
    assert report["mean_kl"] == pytest.approx(np.tanh(0.5), rel=1e-6)
    assert not report["ended"]


def test_max_kl_ends_the_modes(caplog: pytest.LogCaptureFixture) -> None:
    switch = Switch(Rules(expert_top_k=1))
    inner = FakeModel(switch)
    model = LossyModel(inner, switch, check_every=2, max_kl=0.1)
    for _ in range(5):
        step(model, rows=1, is_decoding=True)
    assert inner.calls == [False, True, False, False, False, False]
    assert model.report()["ended"]
    assert len(caplog.records) == 1 and "mean KL 0.46" in caplog.text
