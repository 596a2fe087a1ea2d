"""Online DPO: pairs of every size of group, ties, rows in several micro-batches, and what it cannot do without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from moe_trm import losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios

GROUPS = torch.tensor([0, 1, 0, 1, 0, 2, 2])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.5, 1.0, 1.0])
"""Three samples of which two are alike, two samples, and two that are equal."""


def made() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    rollout, reference, current = (-torch.rand(7, 5, generator=gen, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(7, 5, generator=gen) < 0.7
    mask[:, 0] = True
    return rollout, reference, current, mask


def inputs(current: Tensor) -> LossInputs:
    rollout, reference, _, mask = made()
    given = LossInputs.uncorrected(LogRatios(rollout, rollout + 0.1, current, mask), current, torch.zeros(7, 5))
    return replace(given, rewards=REWARDS, group_ids=GROUPS, reference_logprobs=reference)


def loss_of(current: Tensor) -> Tensor:
    given = inputs(current)
    dpo = losses.get("dpo")
    values = dpo(given, beta=0.3).values
    return aggregate(values, given.keep, given.mask, dpo.aggregation, num_sequences=7, num_tokens=1, horizon=5)


def pairwise(current: Tensor) -> Tensor:
    """The same in words of the paper: prompt by prompt and pair by pair."""
    _, reference, _, mask = made()
    score = [(current[i][mask[i]] - reference[i][mask[i]]).sum() for i in range(7)]
    total = torch.zeros((), dtype=torch.float64)
    for group in range(3):
        own = [i for i in range(7) if GROUPS[i] == group]
        pairs = [(i, j) for i in own for j in own if REWARDS[i] > REWARDS[j]]
        for i, j in pairs:
            total = total - logsigmoid(0.3 * (score[i] - score[j])) * len(own) / (7 * len(pairs))
    return total


def test_value_and_gradient_are_those_of_every_pair() -> None:
    found, expected = made()[2].requires_grad_(), made()[2].requires_grad_()
    ours, theirs = loss_of(found), pairwise(expected)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found.grad, expected.grad)
    assert found.grad is not None
    assert not found.grad[5:].any(), "equal rewards teach nothing"


def test_a_row_that_is_differentiated_alone_has_the_gradient_of_all_its_pairs() -> None:
    """Rows of one prompt in several micro-batches: the others are constants there."""
    whole = made()[2].requires_grad_()
    loss_of(whole).backward()
    assert whole.grad is not None
    for row in range(7):
        own = made()[2].requires_grad_()
        only = torch.zeros(7, 1, dtype=torch.bool)
        only[row] = True
        loss_of(torch.where(only, own, own.detach())).backward()
        assert own.grad is not None
        torch.testing.assert_close(own.grad[row], whole.grad[row])


def test_it_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="under policy and reference"):
        losses.get("dpo")(replace(inputs(made()[2]), reference_logprobs=None))
    with pytest.raises(ConfigError, match="beta > 0"):
        losses.get("dpo").bind(beta=0.0)
