"""The filters on covariance choose the share they are told, another one at each step, and the same one again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_trm import losses
from moe_trm.config.schema import Config
from moe_trm.corrections import finalize
from moe_trm.errors import ConfigError
from moe_trm.learner.protocol import Scores
from moe_trm.losses import LossInputs
from moe_trm.ratios import LogRatios
from moe_trm.step.objective import Objective
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import MicroBatch, MiniBatch, TokenBatch, TrainRow
from routing.record.sources import Native, RouteSource
from tests.integration.objective_support.recompute import recompute
from tests.unit.advantages import valued
from tests.unit.records import make_record
from tests.unit.step.shared_minibatch import FakeLearner, Ranks

CHOICE: dict[str, dict[str, Any]] = {"kl_cov": {}, "clip_cov": {"low": -1.0, "high": 9.0}}


def tied(draw: tuple[int, int] = (0, 0)) -> LossInputs:
    """40 tokens of one log-prob and one advantage: all covariances are 0."""
    current = torch.full((4, 10), -1.0)
    ratios = LogRatios(current - 0.1, current - 0.1, current, torch.ones(4, 10, dtype=torch.bool))
    return replace(LossInputs.uncorrected(ratios, current, torch.ones(4, 10)), draw=draw)


def chosen(name: str, inputs: LossInputs, **more: Any) -> torch.Tensor:
    """Tokens that are treated unlike the plain surrogate."""
    parameters = {"share": 0.05, **CHOICE[name], **more}
    values = losses.get(name)(inputs, **parameters).values
    return (values - values.median()).abs() > 1e-6


@pytest.mark.parametrize("name", CHOICE)
def test_ties_do_not_penalise_everybody(name: str) -> None:
    assert int(chosen(name, tied()).sum()) == 2
    parameters = {"share": 0.05, **CHOICE[name]}
    assert finalize(losses.get(name)(tied(), **parameters).metrics)["loss/cov_fraction"] == pytest.approx(0.05)


@pytest.mark.parametrize("name", CHOICE)
def test_the_choice_differs_by_step_and_repeats_by_seed(name: str) -> None:
    by_step = [chosen(name, tied((7, step))) for step in range(8)]
    assert len({tuple(found.flatten().nonzero().flatten().tolist()) for found in by_step}) >= 7
    for step, found in enumerate(by_step):
        assert torch.equal(found, chosen(name, tied((7, step))))
    assert any(not torch.equal(found, chosen(name, tied((8, step)))) for step, found in enumerate(by_step))


def test_a_larger_covariance_is_chosen_before_a_tie() -> None:
    inputs = tied()
    current = inputs.current_logprobs.clone()
    current[2, 3] = -0.5
    advantages = inputs.advantages.clone()
    advantages[2, 3] = 3.0
    ratios = LogRatios(current - 0.1, current - 0.1, current, inputs.mask)
    found = losses.get("kl_cov")(
        replace(inputs, ratios=ratios, current_logprobs=current, advantages=advantages), share=0.05
    )
    assert (
        found.values[2, 3] > losses.get("unclipped")(replace(inputs, ratios=ratios, advantages=advantages)).values[2, 3]
    )


def test_a_run_hands_its_seed_and_step_to_the_loss() -> None:
    settings = {
        "model": {"checkpoint": "none"},
        "loss": {"name": "clip_cov", "parameters": {"share": 0.1, "low": -99.0, "high": 99.0}},
    }
    rows = tuple(TrainRow(make_record(sample_id=i, num_sampled=10)) for i in range(4))
    batch = valued(rows)
    mini = MiniBatch((MicroBatch(rows),), 4, 40)

    def trained(seed: int, version: int) -> tuple[int, ...]:
        objective = Objective(Config.model_validate({**settings, "seed": seed}))
        part = AnchoredMinibatch(mini, [batch], [Scores(batch.rollout_logprobs)], [Native()], version=version)
        current = batch.rollout_logprobs.clone().requires_grad_()
        objective.bind(part, FakeLearner(Ranks(1), 0), first=True)(0, Scores(current)).backward()
        assert current.grad is not None
        return tuple((current.grad != 0).flatten().nonzero().flatten().tolist())

    assert trained(1, 1) == trained(1, 1)
    assert len(trained(1, 1)) == 36
    assert len({trained(1, version) for version in range(6)}) > 1
    assert len({trained(seed, 1) for seed in range(6)}) > 1


PLANS = ([[0, 1, 2, 3, 4, 5]], [[5, 3], [1, 4, 2, 0]], [[2], [4, 0, 1], [5, 3]])
"""Three orders in which the same rows are planned, by micro-batches."""
MOVED = 0.05
"""By so much the log-probs have moved since the anchors."""


class Moved(FakeLearner):
    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        return [Scores(batch.rollout_logprobs + MOVED) for batch in batches]


@pytest.mark.parametrize("name", CHOICE)
def test_ties_are_broken_alike_in_every_planned_order(name: str) -> None:
    """By the ids of the rows, in the update and in its recomputation."""
    loss = {
        "name": name,
        "parameters": {"share": 0.1, **CHOICE[name], **({"low": -99.0} if name == "clip_cov" else {})},
    }
    config = Config.model_validate({"model": {"checkpoint": "none"}, "loss": loss})
    rows = [TrainRow(make_record(sample_id=i, num_sampled=10 - i)) for i in range(6)]
    found = []
    for plan in PLANS:
        micros = tuple(MicroBatch(tuple(rows[i] for i in micro)) for micro in plan)
        batches = [
            replace(valued(micro.rows), rewards=torch.ones(len(micro.rows)), group_ids=torch.tensor(own))
            for micro, own in zip(micros, plan, strict=True)
        ]
        anchors, version = [batch.rollout_logprobs for batch in batches], int(batches[0].versions.max())
        part = AnchoredMinibatch(
            MiniBatch(micros, 6, 45), batches, [Scores(own) for own in anchors], [Native()] * len(plan), version=version
        )
        current = [Scores((own + MOVED).requires_grad_()) for own in anchors]
        bound = Objective(config).bind(part, Moved(Ranks(1), 0), first=False)
        expected = recompute(config, batches, anchors, current).coefficients
        by_token: dict[tuple[int, int], float] = {}
        for number, scores in enumerate(current):
            (gradient,) = torch.autograd.grad(bound(number, scores), scores.logprobs)
            torch.testing.assert_close(gradient.double(), expected[number], rtol=1e-5, atol=1e-8)
            for row, own in zip(plan[number], batches[number].mask, strict=True):
                values = gradient[plan[number].index(row)][own]
                by_token |= {(row, place): round(float(value), 5) for place, value in enumerate(values)}
        found.append(by_token)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 2, "some are chosen, and others are not"


@pytest.mark.parametrize(("name", "values"), [("quatro", {"multiplier": "auto"}), ("ppo_clip", {"clip_low": "wide"})])
def test_a_word_where_a_number_belongs_is_a_configuration_error(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="number") as refused:
        losses.get(name).bind(**values)
    assert next(iter(values)) in str(refused.value)
    assert "TypeError" not in str(refused.value)
    losses.get("ctpo").bind(form="geometric")


def test_a_loss_on_parts_of_the_minibatch_is_told_too(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from moe_trm.losses import TokenLoss\n"
        "from moe_trm.losses.loss import loss\n"
        "@loss(aggregation='token-mean')\n"
        "def mine(inputs, log_ratio):\n"
        "    return TokenLoss(log_ratio * (100 * inputs.draw[0] + inputs.draw[1]), {})\n",
        encoding="utf-8",
    )
    rows = (TrainRow(make_record(num_sampled=4)),)
    batch = valued(rows)
    settings = {"model": {"checkpoint": "none"}, "loss": {"name": f"{own}:mine"}, "seed": 3}
    part = AnchoredMinibatch(
        MiniBatch((MicroBatch(rows),), 1, 4), [batch], [Scores(batch.rollout_logprobs)], [Native()], version=5
    )
    current = batch.rollout_logprobs.clone().requires_grad_()
    Objective(Config.model_validate(settings)).bind(part, FakeLearner(Ranks(1), 0), first=True)(
        0, Scores(current)
    ).backward()
    assert current.grad is not None
    assert float(current.grad.sum()) == pytest.approx(305.0)
