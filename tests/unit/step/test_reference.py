"""The reference in the advantage of each token, kept by the learner or served as a teacher."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.errors import LearnerError
from moe_trm.learner.protocol import Scores
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.reference import Reference
from moe_trm.types import MicroBatch, TrainRow
from routing.record.sources import Native
from tests.unit.advantages import valued
from tests.unit.step.shared_minibatch import (
    FakeLearner,
    Ranks,
    anchor_logprobs,
    by_reward,
    config,
    reference_logprobs,
    rows,
)


@pytest.mark.parametrize("taught", [False, True])
def test_kl_in_the_advantage_lowers_that_of_each_token_by_its_own(taught: bool) -> None:
    """Of a reference that the learner keeps, and of a teacher that came with the samples; an empty micro-batch too."""
    teacher = ["http://127.0.0.1:1"] if taught else []
    settings = config(kl={"coef": 0.3, "where": "advantage", "estimator": "k1", "teacher": teacher})
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)
    micros = [
        *(MicroBatch(tuple(with_teacher(row) for row in micro.rows)) for micro in mini.micro_batches),
        MicroBatch(()),
    ]
    mini = replace(mini, micro_batches=tuple(micros))
    batches = [valued(micro.rows, *map(by_reward, micro.rows)) for micro in micros]
    part = AnchoredMinibatch(
        mini, batches, [Scores(anchor_logprobs(batch)) for batch in batches], [Native()] * len(batches)
    )
    learner = FakeLearner(Ranks(1), 0)
    reference = Reference(settings, learner)
    assert bool(learner.snapshots) != taught
    scored = reference.add_logprobs(learner, [part])
    assert reference.kl_penalties(scored) is None
    [shaped] = reference.subtract_kl_from_advantages(scored)
    assert shaped.kl_coef == 0.0
    for batch, new in zip(batches, shaped.batches, strict=True):
        known = new.reference_logprobs
        assert known is not None
        if batch.mask.any():
            torch.testing.assert_close(known, batch.reference_logprobs if taught else reference_logprobs(batch))
        expected = batch.advantages - 0.3 * (anchor_logprobs(batch) - known)
        torch.testing.assert_close(new.advantages, torch.where(batch.mask, expected, 0.0))
        assert torch.equal(new.advantages != 0, batch.mask)


def test_a_sample_without_the_log_probs_of_its_teacher_is_not_trained() -> None:
    settings = config(kl={"coef": 0.3, "teacher": ["http://127.0.0.1:1"]})
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=12)
    batches = [collate(micro, keep_mask=False) for micro in mini.micro_batches]
    part = AnchoredMinibatch(mini, batches, [Scores(anchor_logprobs(batch)) for batch in batches], [Native()])
    learner = FakeLearner(Ranks(1), 0)
    with pytest.raises(LearnerError, match="without the teacher's log-probs"):
        Reference(settings, learner).add_logprobs(learner, [part])


def with_teacher(row: TrainRow) -> TrainRow:
    """A teacher that is sure of other tokens than the policy."""
    record = row.record
    values = -np.abs(np.sin(np.arange(record.num_sampled) + record.sample_id)).astype(np.float32) - 0.1
    return replace(row, record=replace(record, teacher_logprobs=values))
