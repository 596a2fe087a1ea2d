"""Rows with false masks take no part in the gradient and are counted; more than a few of them stop the run.

They are judged by the pass at the weights that sampled them, and by no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm.batch.plan import plan_step
from moe_trm.errors import FalseRecords
from moe_trm.learner.protocol import Scores
from moe_trm.sampling_mask.bounds import SamplerBounds
from moe_trm.step.anchors import Anchors
from moe_trm.step.mask_judge import MaskJudge, check_refused
from moe_trm.step.objective import Objective
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import MiniBatch, TokenBatch, TrainBatch, TrainRow
from routing.record.sources import Native, RouteSource
from tests.unit.advantages import valued
from tests.unit.records import make_record
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, config

MASS = 0.9
"""Mass of the sets of made-up records, whose three ids have the probabilities 0.45, 0.225 and 0.225."""
SETTINGS = {"rollout": {"top_p": 0.85}, "kl": {"coef": 0.1}, "sampling_mask": {"mode": "keep"}}
BOUNDS = SamplerBounds(0.85, 4096)
NUM_ROWS, NUM_SAMPLED, VERSION = 12, 12, 3


class MassLearner(FakeLearner):
    """It finds the sets of some rows to have another mass, under the weights of `version`, and all sets at others."""

    def __init__(self, lies: Mapping[int, float], weights: str | None = None) -> None:
        super().__init__(Ranks(1), 0)
        self._lies, self._weights = lies, weights

    def masses(self, batch: TokenBatch, *, moved: bool = False) -> Scores:
        masses = torch.tensor([0.3 if moved else self._lies.get(number, MASS) for number in batch.sample_ids])
        log_mass = torch.where(batch.mask, masses.log()[:, None], 0.0)
        return Scores(batch.rollout_logprobs, log_kept_mass=log_mass, log_kept_least=log_mass + math.log(0.25))

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        return [self.masses(batch, moved=weights != self._weights) for batch in batches]


def minibatch(version: int = VERSION, micro_batch_rows: int = 4) -> MiniBatch:
    rows = [
        TrainRow(make_record(sample_id=i, group_id=i // 4, num_sampled=NUM_SAMPLED, version=version))
        for i in range(NUM_ROWS)
    ]
    [[mini]] = plan_step(rows, seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=micro_batch_rows)
    return mini


def part(version: int = VERSION) -> AnchoredMinibatch:
    """A minibatch whose first update's own forward is the pass at the step's start."""
    mini = minibatch(version)
    batches = [valued(micro.rows, keep_mask=True) for micro in mini.micro_batches]
    batches = [replace(batch, reference_logprobs=batch.rollout_logprobs - 0.5) for batch in batches]
    return AnchoredMinibatch(mini, batches, [], [Native()] * len(batches), 0.1, version=VERSION)


def gradients(
    masks: MaskJudge, lies: dict[int, float], *, first: bool = True, version: int = VERSION, moved: bool = False
) -> tuple[dict[str, float], dict[int, Tensor]]:
    """One update: its metrics and the gradient of each row."""
    objective, learner, trained = Objective(config(**SETTINGS), masks=masks), MassLearner(lies), part(version)
    loss_of, of_row = objective.bind(trained, learner, first=first), dict[int, Tensor]()
    for index, batch in enumerate(trained.batches):
        current = batch.rollout_logprobs.clone().requires_grad_()
        loss_of(index, replace(learner.masses(batch, moved=moved), logprobs=current)).backward()
        assert current.grad is not None
        of_row |= {number: current.grad[i][batch.mask[i]] for i, number in enumerate(batch.sample_ids)}
    return objective.take(learner), of_row


def test_a_row_with_a_false_mask_is_counted_and_has_no_gradient() -> None:
    metrics, of_row = gradients(MaskJudge(BOUNDS), {3: 0.5})
    assert metrics["sampling_mask/refused_fraction"] == pytest.approx(1 / NUM_ROWS)
    assert metrics["sampling_mask/judged_fraction"] == 1
    assert metrics["sampling_mask/lowest_allowed"] == pytest.approx(0.815, abs=1e-3)
    assert not of_row[3].any()
    assert all(gradient.all() for number, gradient in of_row.items() if number != 3)
    check_refused(metrics, NUM_ROWS)


def test_sound_masks_are_all_trained() -> None:
    metrics, of_row = gradients(MaskJudge(BOUNDS), {})
    assert metrics["sampling_mask/refused_fraction"] == 0
    assert all(gradient.all() for gradient in of_row.values())
    check_refused(metrics, NUM_ROWS)


def test_false_masks_in_more_than_a_few_rows_stop_the_run() -> None:
    metrics, _ = gradients(MaskJudge(BOUNDS), {1: 0.5, 5: 0.5, 9: 0.4})
    with pytest.raises(FalseRecords, match=r"3 samples \(25.0% of the step\)"):
        check_refused(metrics, NUM_ROWS)


def test_what_else_is_in_a_micro_batch_changes_nothing() -> None:
    """A row that the engines disagree about is judged with another tolerance, and its neighbours are not."""
    verdicts = []
    for micro_batch_rows in (1, 4, NUM_ROWS):
        masks = MaskJudge(BOUNDS)
        for micro in minibatch(micro_batch_rows=micro_batch_rows).micro_batches:
            batch = valued(micro.rows, keep_mask=True)
            scores = MassLearner(dict.fromkeys(range(NUM_ROWS), 0.8)).masses(batch)
            noisy_B1 = torch.tensor(batch.sample_ids)[:, None] % 2 == 0
            logprobs = torch.where(noisy_B1 & batch.mask, batch.rollout_logprobs - 0.5, batch.rollout_logprobs)
            masks.observe(batch, replace(scores, logprobs=logprobs), VERSION)
            refused, _ = masks.measured(batch)
            assert refused.tolist() == [number % 2 == 1 for number in batch.sample_ids]
        verdicts.append(dict(sorted(masks._lowest_of_rows.items())))
    assert verdicts[0] == verdicts[1] == verdicts[2]


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_rows_of_other_weights_are_not_judged_and_counted_so(version: int) -> None:
    metrics, of_row = gradients(MaskJudge(BOUNDS), {3: 0.5}, version=version)
    assert metrics["sampling_mask/judged_fraction"] == 0
    assert metrics["sampling_mask/refused_fraction"] == 0
    assert "sampling_mask/lowest_allowed" not in metrics
    assert all(gradient.all() for gradient in of_row.values())


def test_weights_that_have_moved_judge_nothing_and_what_was_refused_stays_so() -> None:
    masks = MaskJudge(BOUNDS)
    moved, of_row = gradients(masks, {}, first=False, moved=True)
    assert moved["sampling_mask/judged_fraction"] == 0
    for batch in (judged := part()).batches:
        masks.observe(batch, MassLearner({3: 0.5}).masses(batch), judged.version)
    metrics, of_row = gradients(masks, {}, first=False, moved=True)
    assert metrics["sampling_mask/refused_fraction"] == pytest.approx(1 / NUM_ROWS)
    assert not of_row[3].any()
    assert gradients(masks, {}, first=False, moved=True)[0]["sampling_mask/judged_fraction"] == 0, "of the step before"


@pytest.mark.parametrize(("behavior", "num_judged"), [("snapshot", NUM_ROWS), ("merged", 0), ("bypass", 0)])
def test_stale_rows_are_judged_at_the_weights_that_sampled_them_or_not_at_all(behavior: str, num_judged: int) -> None:
    pipeline = {"mode": "async", "behavior": behavior, "max_staleness": 2}
    settings, masks = config(**SETTINGS, pipeline=pipeline), MaskJudge(BOUNDS)
    learner = MassLearner({3: 0.5}, "behavior-2")
    anchors = Anchors(settings, "none", reads_minibatch=True, masks=masks, first=2)
    for step in (3, 4):
        masks.end_step()
        [anchored] = anchors.score(learner, TrainBatch(step, (minibatch(2),), {}, versions=(2,)))
    for batch in anchored.batches:
        refused, measured = masks.measured(batch)
        if num_judged:
            assert [row for row, wrong in zip(batch.sample_ids, refused.tolist(), strict=True) if wrong] == [
                row for row in batch.sample_ids if row == 3
            ]
        assert float(measured["sampling_mask/judged_fraction:sum"]) == (len(batch.sample_ids) if num_judged else 0)
