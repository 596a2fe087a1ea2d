"""Parameters of a loss that follow the run: from the step's metrics, on every rank alike, over a resumption."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moe_trm.batch.plan import plan_step
from moe_trm.step.objective import Objective
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, config, one_update, rows

R2VPO = {"name": "r2vpo", "parameters": {"penalty": 0.5, "target": 0.05, "rate": 2.0}}


def steps(number: int, *, ranks: int = 1, first: bool = False, **settings: Any) -> list[dict[str, float]]:
    """Metrics of rank 0 in each of `number` steps on the same minibatch."""
    shares = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=ranks, micro_batch_rows=5)
    meeting = Ranks(ranks)

    def work(rank: int) -> list[dict[str, float]]:
        learner, objective = FakeLearner(meeting, rank), Objective(config(**settings))
        return [one_update(objective, learner, shares[rank][0], first=first)["metrics"] for _ in range(number)]

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(("ranks", "target"), [(1, 0.05), (2, 0.05), (2, 0.001)])
def test_the_penalty_follows_the_variance(ranks: int, target: float) -> None:
    """penalty + rate (variance - target), told as what the step used: down below the target, up above it."""
    found = steps(4, ranks=ranks, loss={**R2VPO, "parameters": {"penalty": 0.5, "target": target, "rate": 2.0}})
    penalty = 0.5
    for metrics in found:
        assert metrics["loss/penalty"] == pytest.approx(penalty)
        penalty = max(0.0, penalty + 2.0 * (metrics["loss/ratio_variance"] - target))
    assert (found[-1]["loss/penalty"] > 0.5) == (target == 0.001)


def test_it_changes_the_gradient_of_the_next_step() -> None:
    """The second step's loss is that of a run which begins at its penalty."""
    found = steps(2, loss=R2VPO)
    fixed = {"name": "r2vpo", "parameters": {"penalty": found[1]["loss/penalty"]}}
    assert found[1]["loss/policy"] == pytest.approx(steps(1, loss=fixed)[0]["loss/policy"])
    assert found[1]["loss/policy"] != pytest.approx(found[0]["loss/policy"])


def test_at_its_own_weights_the_penalty_falls_to_nothing() -> None:
    found = steps(7, first=True, loss=R2VPO)
    assert [metrics["loss/penalty"] for metrics in found] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


def test_tokens_that_a_rule_drops_do_not_count() -> None:
    rule = {"name": "token_k2", "thresholds": {"upper": 0.02, "ratio": "update"}}
    everything, some = (steps(1, loss=R2VPO, correction={"rules": rules})[0] for rules in ([], [rule]))
    assert some["loss/ratio_variance"] < everything["loss/ratio_variance"]
    nothing = {"name": "token_k2", "thresholds": {"upper": 1e-12, "ratio": "engine"}}
    found = steps(2, loss=R2VPO, correction={"rules": [nothing]})
    assert "loss/ratio_variance" not in found[0]
    assert "loss/penalty" not in found[0]


def test_without_a_target_it_stays_and_is_not_told() -> None:
    assert "loss/penalty" not in steps(1, loss={"name": "r2vpo"})[0]
    assert not [key for key in steps(1)[0] if key.startswith("loss/pen")]


def test_a_resumed_run_goes_on_where_it_was() -> None:
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)
    learner, settings = FakeLearner(Ranks(1), 0), config(loss=R2VPO)
    whole, cut = Objective(settings), Objective(settings)
    for _ in range(2):
        one_update(cut, learner, mini, first=False)
    resumed, other = Objective(settings), Objective(config(loss={"name": "r2vpo_clip"}))
    for objective in (resumed, other):
        objective.restore(cut.state(learner), learner)
    expected = [one_update(whole, learner, mini, first=False)["metrics"] for _ in range(3)][-1]
    assert one_update(resumed, learner, mini, first=False)["metrics"] == expected
    assert "loss/penalty" not in one_update(other, learner, mini, first=False)["metrics"]
    old = Objective(settings)
    old.restore({"thresholds": cut.state(learner)["thresholds"]}, learner)
    assert one_update(old, learner, mini, first=False)["metrics"]["loss/penalty"] == 0.5
