"""What an update compares with the learner's scores is on the learner's device, and has the values that a CPU gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import corrections, diagnostics, losses
from moe_trm.advantages.compared import rewarded_samples
from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import Config
from moe_trm.corrections import Evidence
from moe_trm.learner.protocol import Scores
from moe_trm.losses import LossInputs, aggregate
from moe_trm.losses import get as loss_named
from moe_trm.methods.row_fields import RowFields
from moe_trm.ratios import LogRatios
from moe_trm.step.anchors import Anchors
from moe_trm.step.objective import Objective
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.reference import Reference
from moe_trm.types import MicroBatch, TokenBatch, TrainBatch
from routing.record.sources import RouteSource
from tests.unit.advantages import estimator
from tests.unit.corrections.test_correction_properties import THRESHOLDS
from tests.unit.doubles import StandInLearner
from tests.unit.other_device import DEVICE, other_device
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, assert_same, one_update, rows
from tests.unit.step.shared_minibatch import config as objective_config
from tests.unit.step.test_anchors import batch_of, config
from tests.unit.step.test_objective import WHOLE


class DeviceLearner(StandInLearner):
    """Scores on a device that refuses operands of another, and that every machine has."""

    device = DEVICE

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
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
    anchors, learner = Anchors(settings, "none", reads_minibatch=False), DeviceLearner()
    steps: list[TrainBatch] = [batch_of(1, [0])] if behavior == "same" else [batch_of(1, [0]), batch_of(2, [0, 1])]
    parts: list[AnchoredMinibatch] = []
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


OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: WHOLE[name] for name in ("m2po", "normalised by token", "kl_cov", "turns", "kl in the loss", "entropy")},
    "kl in the reward": WHOLE["kl in the reward"],
    "by length": {"correction": {"rules": [{"name": "trm_avg", "target_reject_rate": 0.2, "by_length": True}]}},
    "by turn": {"rollout": {"function": "package.module:rollout"}},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_update_mixes_no_devices_and_has_the_values_of_a_cpu(name: str) -> None:
    """Micro-batches of unlike widths, the last one empty."""
    settings = objective_config(**OBJECTIVES[name])
    expected = updated(settings, torch.device("cpu"))
    with other_device():
        found = updated(settings, DEVICE)
    assert_same(expected, found)


def updated(settings: Config, device: torch.device) -> dict[str, Any]:
    learner, objective = FakeLearner(Ranks(1), 0), Objective(settings)
    learner.device = device
    reference, made = Reference(settings, learner), rows()[:6]
    lowered = estimator(settings), rewarded_samples("grpo", [row.record for row in made])
    [[planned]] = plan_step(made, seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=4)
    mini = replace(planned, micro_batches=(*planned.micro_batches, MicroBatch(())))
    found = one_update(objective, learner, mini, first=False, reference=reference, lowered=lowered)
    return found | {"gradients": {row: gradient.cpu() for row, gradient in found["gradients"].items()}}


@pytest.mark.parametrize("name", corrections.names())
def test_a_rule_mixes_no_devices(name: str) -> None:
    rule = corrections.get(name).bind(**THRESHOLDS.get(name, {}))
    expected = rule(evidence_on(torch.device("cpu"))[0])
    with other_device():
        found = rule(evidence_on(DEVICE)[0])
        assert torch.equal(found.keep.cpu(), expected.keep)
        torch.testing.assert_close(found.weights.cpu(), expected.weights)
        finished = diagnostics.finalize(found.metrics)
    assert finished == pytest.approx(diagnostics.finalize(expected.metrics), nan_ok=True)


@pytest.mark.parametrize("name", losses.names())
def test_a_loss_mixes_no_devices(name: str) -> None:
    expected, gradient = lost(name, torch.device("cpu"))
    with other_device():
        found, moved = lost(name, DEVICE)
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(moved.cpu(), gradient)


def lost(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values and gradient of a loss, with tokens that a rule weighs and drops."""
    seen, current = evidence_on(device)
    correction = corrections.get("icepop").bind(low=0.7, high=1.4)(seen)
    inputs = LossInputs.corrected(seen.ratios, current, seen.advantages, correction).with_fields(seen)
    values = losses.get(name).bind()(inputs).values
    torch.where(correction.keep, values, 0.0).sum().backward()
    assert current.grad is not None
    return torch.where(correction.keep, values, 0.0).detach(), current.grad


def evidence_on(device: torch.device) -> tuple[Evidence, Tensor]:
    """Rows of unlike lengths, the last of them padding, with everything that a rule or a loss may read.

    And the current log-probs, whose gradient is asked for.
    """
    draw = torch.Generator().manual_seed(5)
    mask = torch.arange(9) < torch.tensor([[9], [4], [1], [7], [0]])
    rollout, behavior, proximal, current = (0.3 * torch.randn(5, 9, generator=draw) - 1 for _ in range(4))
    leaf = current.to(device).requires_grad_()
    ratios = LogRatios(rollout.to(device), behavior.to(device), leaf, mask.to(device), proximal.to(device))
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0])[:, None].expand(5, 9)
    known = RowFields(
        turn_ids=(torch.arange(9) // 3).expand(5, 9).short().to(device),
        versions=torch.zeros(5, 9, dtype=torch.int32, device=device),
        exact_kl=rollout.abs().to(device),
        entropy=current.abs().to(device),
        router_shift=(behavior.abs() / 10).to(device),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]).to(device),
        group_ids=torch.tensor([0, 0, 1, 1, 2]).to(device),
        reference_logprobs=behavior.to(device),
    )
    return Evidence(ratios, advantages.to(device)).with_fields(known), leaf
