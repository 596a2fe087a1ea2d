"""What an update compares with the learner's scores is on the learner's device, from the anchors on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moe_trm.learner.protocol import Scores
from moe_trm.losses import LossInputs, aggregate
from moe_trm.losses import get as loss_named
from moe_trm.step.anchors import Anchors
from moe_trm.step.passes import Anchored
from moe_trm.types import TokenBatch, TrainBatch
from routing.replay import RouteSource
from tests.unit.doubles import StandInLearner
from tests.unit.step.test_anchors import batch_of, config

DEVICE = torch.device("meta")


class DeviceLearner(StandInLearner):
    """Scores on a device that refuses operands of another, and that every machine has."""

    device = DEVICE

    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
        temperature: float | None = None,
    ) -> list[Scores]:
        for batch in batches:
            assert batch.input_ids.device == batch.valid.device == torch.device("cpu"), "the host checks routes by them"
        return [Scores(torch.zeros(batch.mask.shape, device=DEVICE)) for batch in batches]

    def snapshot(self, name: str, **options: Any) -> int:
        return 0

    def forget(self, name: str) -> None: ...


@pytest.mark.parametrize("behavior", ["same", "snapshot", "merged", "interpolate", "bypass"])
def test_ratios_and_loss_mix_no_devices(behavior: str) -> None:
    settings = config(eta=0) if behavior == "same" else config(behavior=behavior)
    anchors, learner = Anchors(settings, "none", whole=False), DeviceLearner()
    steps: list[TrainBatch] = [batch_of(1, [0])] if behavior == "same" else [batch_of(1, [0]), batch_of(2, [0, 1])]
    parts: list[Anchored] = []
    for batch in steps:
        parts = anchors.score(learner, batch)
    for part in parts:
        current = torch.zeros(part.batches[0].mask.shape, device=DEVICE, requires_grad=True)
        ratios = part.ratios(0, current)
        inputs = LossInputs.uncorrected(ratios, current, part.batches[0].advantages)
        loss = loss_named("ppo_clip").bind(ratio="update")(inputs)
        share = aggregate(loss.values, inputs.keep, inputs.mask, "token-mean", num_sequences=2, num_tokens=4, horizon=8)
        share.backward()
        assert current.grad is not None
        assert share.device == current.grad.device == DEVICE
