"""Rows with false masks take no part in the gradient and are counted; more than a few of them stop the run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm.batch.plan import plan_step
from moe_trm.errors import FalseRecords
from moe_trm.learner.protocol import Scores
from moe_trm.step.mask_judge import JUDGED, LOWEST, REFUSED
from moe_trm.step.objective import Objective
from moe_trm.step.passes import Anchored
from moe_trm.types import TokenBatch, TrainRow
from routing.record.sources import Native
from tests.unit.advantages import valued
from tests.unit.records import make_record
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, config

CLAIMED = 0.9
"""Mass of the sets of made-up records, whose three ids have the probabilities 0.45, 0.225 and 0.225."""
SETTINGS = {"rollout": {"top_p": 0.85, "top_k": 20}, "kl": {"coef": 0.1}}


def gradients(lies: dict[int, float], *, keep: str = "keep") -> tuple[Objective, dict[str, float], dict[int, Tensor]]:
    """One update of 12 rows, of which the learner finds the sets of `lies` to have another mass."""
    settings = config(**SETTINGS, sampling_mask={"mode": keep})
    rows = [TrainRow(make_record(sample_id=i, group_id=i // 4, num_sampled=5)) for i in range(12)]
    [[mini]] = plan_step(rows, seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=4)
    objective, learner = Objective(settings), FakeLearner(Ranks(1), 0)
    assert objective.needs_kept_mass == (keep == "keep")
    batches = [valued(micro.rows, keep_mask=keep == "keep") for micro in mini.micro_batches]
    batches = [_with_reference(batch) for batch in batches]
    part = Anchored(mini, batches, [Scores(b.rollout_logprobs) for b in batches], [Native()] * len(batches), 0.1)
    loss_of, found = objective.bind(part, learner, first=True), dict[int, Tensor]()
    for index, (batch, micro) in enumerate(zip(batches, mini.micro_batches, strict=True)):
        samples = [row.record.sample_id for row in micro.rows]
        current = batch.rollout_logprobs.clone().requires_grad_()
        masses = torch.tensor([lies.get(number, CLAIMED) for number in samples])
        log_mass = torch.where(batch.mask, masses.log()[:, None], 0.0)
        loss_of(index, Scores(current, log_kept_mass=log_mass, log_kept_least=log_mass + math.log(0.25))).backward()
        assert current.grad is not None
        found |= {n: current.grad[i][batch.mask[i]] for i, n in enumerate(samples)}
    return objective, objective.take(learner), found


def _with_reference(batch: TokenBatch) -> TokenBatch:
    return replace(batch, reference_logprobs=batch.rollout_logprobs - 0.5)


def test_a_row_with_a_false_mask_is_counted_and_has_no_gradient() -> None:
    objective, metrics, found = gradients({3: 0.5})
    assert metrics[REFUSED] == pytest.approx(1 / 12)
    assert metrics[JUDGED] == 12
    assert metrics[LOWEST] == pytest.approx(0.815, abs=1e-3)
    assert not found[3].any()
    assert all(gradient.all() for number, gradient in found.items() if number != 3)
    objective.check(metrics)


def test_sound_masks_are_all_trained() -> None:
    objective, metrics, found = gradients({})
    assert metrics[REFUSED] == 0
    assert all(gradient.all() for gradient in found.values())
    objective.check(metrics)


def test_false_masks_in_more_than_a_few_rows_stop_the_run() -> None:
    objective, metrics, _ = gradients({1: 0.5, 5: 0.5, 9: 0.999})
    with pytest.raises(FalseRecords, match=r"3 samples \(25.0% of the step\)"):
        objective.check(metrics)


def test_masks_that_are_not_scored_over_are_not_judged() -> None:
    objective, metrics, found = gradients({3: 0.5}, keep="off")
    assert REFUSED not in metrics
    assert found[3].all()
    objective.check(metrics)
