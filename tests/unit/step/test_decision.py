"""Rules that only measure at first: what they change, what they say, and when they begin to act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.batch.plan import plan_step
from moe_trm.config import load
from moe_trm.config.rules import warnings
from moe_trm.step import decision
from moe_trm.step.decision import Decision
from moe_trm.step.objective import Objective
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, assert_same, config, one_update, outcome, rows

RULES: dict[str, Any] = {
    "rules": [
        {"name": "icepop", "thresholds": {"low": 0.9, "high": 1.1}},
        {"name": "opsm", "thresholds": {"delta": 0.01}},
    ]
}
HEALTHY = {"engine/k3_kl": 0.001, "engine/chi2_token": 0.01}
WIDE = {"engine/k3_kl": 0.001, "engine/chi2_token": 0.9}


def acting(steps: int, *metrics: dict[str, float]) -> list[bool]:
    """For each step and the one after: True where rules act."""
    made, found = Decision(steps), []
    for one in metrics:
        found.append(made.acts)
        assert made.end_step(one) == {"correction/acts": float(found[-1])}
    return [*found, made.acts]


def test_it_is_decided_once_by_the_mean_of_the_window() -> None:
    assert acting(2, HEALTHY, HEALTHY, WIDE, WIDE) == [False] * 5
    assert acting(2, WIDE, WIDE, HEALTHY) == [False, False, True, True]
    assert acting(2, HEALTHY, WIDE) == [False, False, True]
    assert acting(3, HEALTHY, HEALTHY, {"engine/k3_kl": 0.2, "engine/chi2_token": 0.0}) == [False] * 3 + [True]


def test_what_was_not_measured_is_not_health() -> None:
    assert acting(1, {}) == [False, True]
    assert acting(2, {}, HEALTHY) == [False, False, False]
    assert acting(1, {"engine/k3_kl": float("nan"), "engine/chi2_token": 0.0}) == [False, True]
    stale = {"merged/k3_kl": 0.5, "merged/chi2_token": 0.0, "total/k3_kl": 0.0, "total/chi2_token": 0.0}
    assert acting(1, stale) == [False, True]


def test_without_the_setting_rules_act_and_nothing_is_said() -> None:
    always = Decision(None)
    assert always.acts
    assert always.end_step(WIDE) == {}


def test_a_resumed_run_decides_as_it_would_have() -> None:
    whole, cut = Decision(3), Decision(3)
    for one in (whole, cut):
        one.end_step(WIDE)
    resumed, without = Decision(3), Decision(None)
    for one in (resumed, without):
        one.restore(cut.state())
    for _ in range(2):
        whole.end_step(HEALTHY)
        resumed.end_step(HEALTHY)
    assert whole.acts == resumed.acts is True
    assert whole.state() == resumed.state()
    assert without.acts


@pytest.mark.parametrize("normalize", ["off", "token"])
def test_measuring_changes_no_gradient_and_says_what_would_be(normalize: str) -> None:
    """As without rules, by parts and over the whole minibatch; each rule says what it would keep."""
    rules = {**RULES, "batch_normalize": normalize}
    plain = outcome(config(), ranks=1, micro_batch_rows=4)
    measured = outcome(config(correction={**rules, "decide_after": 2}), ranks=2, micro_batch_rows=2)
    applied = outcome(config(correction=rules), ranks=1, micro_batch_rows=4)
    for sample, gradient in plain["gradients"].items():
        assert measured["gradients"][sample] == pytest.approx(gradient, rel=1e-4, abs=1e-7)
    assert measured["metrics"]["correction/kept_fraction"] == 1
    assert measured["metrics"]["correction/acts"] == 0
    for rule in ("icepop", "opsm"):
        name = f"correction/{rule}/kept_fraction"
        assert measured["metrics"][name] == pytest.approx(applied["metrics"][name])
        assert measured["metrics"][name] < 1


@pytest.mark.parametrize("limit", [decision.K3_LIMIT, 0.01])
def test_after_the_window_the_rules_act_or_never_do(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up engines have a k3 of 0.024: below the limit, or above a lower one."""
    monkeypatch.setattr(decision, "K3_LIMIT", limit)
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=100)
    learner = FakeLearner(Ranks(1), 0)
    objective = Objective(config(correction={**RULES, "decide_after": 1}))
    first, second = (one_update(objective, learner, mini, first=False) for _ in range(2))
    assert first["metrics"]["engine/k3_kl"] == pytest.approx(0.024, abs=0.001)
    acts = float(limit == 0.01)
    assert (first["metrics"]["correction/acts"], second["metrics"].pop("correction/acts")) == (0, acts)
    if acts:
        assert_same(second, one_update(Objective(config(correction=RULES)), learner, mini, first=False))
    assert bool(second["metrics"]["correction/kept_fraction"] < 1) == bool(acts)
    resumed = Objective(config(correction={**RULES, "decide_after": 1}))
    resumed.restore(objective.state(learner), learner)
    third = one_update(resumed, learner, mini, first=False)
    assert third["metrics"].pop("correction/acts") == acts
    assert_same(second, third)


def test_without_rules_there_is_nothing_to_decide(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {checkpoint: none}\n")
    told = warnings(load(file, ["correction.decide_after=5"]))
    assert any("correction.decide_after has no effect" in line for line in told)
    for some in ("correction.rules=[{name: icepop}]", "correction.preset=decoupled_token_is"):
        assert not any("decide_after" in line for line in warnings(load(file, ["correction.decide_after=5", some])))
