"""Thresholds by length in a run: measured first, applied by octave, the same on every rank and after a resume."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.batch.plan import plan_step
from moe_trm.errors import ConfigError
from moe_trm.step.objective import Objective
from moe_trm.step.recipe import recipe
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, assert_same, config, one_update, outcome, rows

RULES: list[dict[str, Any]] = [
    {"name": "trm_max", "target_reject_rate": 0.5, "by_length": True, "thresholds": {"ratio": ratio}}
    for ratio in ("engine", "total")
]
BY_LENGTH: dict[str, Any] = {"correction": {"calibration_steps": 2, "rules": RULES}}
BESIDE: dict[str, Any] = {
    "correction": {"calibration_steps": 2, "rules": [*RULES, {"name": "token_k2", "target_reject_rate": 0.1}]}
}


def updates(objective: Objective, learner: FakeLearner, number: int) -> list[dict[str, float]]:
    mini = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)[0][0]
    return [one_update(objective, learner, mini, first=False)["metrics"] for _ in range(number)]


def test_it_measures_then_rejects_by_octave_and_says_so() -> None:
    learner, objective = FakeLearner(Ranks(1), 0), Objective(config(**BY_LENGTH))
    first, second, *_, last = updates(objective, learner, 12)
    for measured in (first, second):
        assert measured["correction/kept_fraction"] == 1.0
        assert not any("_length_" in name for name in measured if name.startswith("correction/"))
    for name in ("trm_max@engine", "trm_max@total"):
        shares = {key: value for key, value in last.items() if key.startswith(f"correction/{name}/rejected_length_")}
        limits = {key for key in last if key.startswith(f"correction/{name}/threshold_max_kl_length_")}
        assert shares
        assert limits
        assert any(0 < share < 1 for share in shares.values())
        assert 0 <= last[f"correction/{name}/unjudged_fraction"] < 1
    one, two = (
        {key.partition("@")[2].partition("/")[2]: value for key, value in last.items() if f"@{ratio}/thr" in key}
        for ratio in ("engine", "total")
    )
    assert one.keys() == two.keys()
    assert one != two


def test_a_resumed_run_goes_on_alike() -> None:
    """Between two steps of measuring, and between two of rejecting."""
    learner, whole = FakeLearner(Ranks(1), 0), Objective(config(**BESIDE))
    expected = updates(whole, learner, 9)
    for stop in (1, 6):
        first, second = Objective(config(**BESIDE)), Objective(config(**BESIDE))
        updates(first, learner, stop)
        second.restore(first.state(learner), learner)
        assert updates(second, learner, 9 - stop) == expected[stop:]


def test_a_checkpoint_without_them_begins_to_measure() -> None:
    learner, before, after = FakeLearner(Ranks(1), 0), Objective(config()), Objective(config(**BY_LENGTH))
    updates(before, learner, 3)
    state = before.state(learner)
    del state["thresholds"]["by_length"]  # as older checkpoints are
    after.restore(state, learner)
    assert updates(after, learner, 1)[0]["correction/kept_fraction"] == 1.0


def test_a_score_that_was_changed_begins_to_measure() -> None:
    def with_score(score: str) -> Objective:
        thresholds = {"score": score}
        rule = {"name": "trm", "target_reject_rate": 0.5, "by_length": True, "thresholds": thresholds}
        return Objective(config(correction={"calibration_steps": 2, "rules": [rule]}))

    learner, before, after = FakeLearner(Ranks(1), 0), with_score("max"), with_score("mean")
    updates(before, learner, 5)
    after.restore(before.state(learner), learner)
    first, second, third = updates(after, learner, 3)
    assert first["correction/kept_fraction"] == second["correction/kept_fraction"] == 1.0
    assert ["correction/trm/unjudged_fraction" in measured for measured in (first, second, third)] == [
        False,
        False,
        True,
    ]


def test_ranks_have_the_same_thresholds() -> None:
    one = outcome(config(**BY_LENGTH), ranks=1, micro_batch_rows=100, steps=6)
    two = outcome(config(**BY_LENGTH), ranks=2, micro_batch_rows=2, steps=6)
    assert_same(one, two)
    assert one["metrics"]["correction/kept_fraction"] < 1


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"name": "trm_max", "thresholds": {"max_kl": 1.0}, "by_length": True}, "chosen from a target"),
        ({"name": "token_k2", "target_reject_rate": 0.1, "by_length": True}, "no length"),
        ({"name": "seq_tis", "target_reject_rate": 0.1, "by_length": True}, "rejects no rows"),
    ],
)
def test_what_cannot_work_is_refused_at_launch(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(config(correction={"rules": [rule]}))
