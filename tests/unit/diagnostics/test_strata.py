"""Right and wrong rows follow the reward's own scale: the mean of the group, in whatever micro-batch a row is."""

from __future__ import annotations

import pytest
import torch

from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.diagnostics import acceptance
from moe_trm.methods import summable
from moe_trm.ratios import LogRatios
from moe_trm.step.advantages import group_means
from moe_trm.types import RewardedSample

REWARDS = [0.2, 1.2, 0.2, 0.7, 0.1, 0.1, 0.1, 0.0, 1.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2]
RIGHT, WRONG = (1, 3, 8), (0, 2, 7)
"""Rows; those of the group with equal rewards are in neither class."""


def accepted(rows: list[int], dropped: int) -> summable.Summable:
    samples = [RewardedSample(i, GROUPS[i], 3, reward) for i, reward in enumerate(REWARDS)]
    means = group_means([samples[:4], samples[4:]])
    nothing, mask = torch.zeros(len(rows), 3), torch.ones(len(rows), 3, dtype=torch.bool)
    evidence = Evidence(
        LogRatios(nothing, nothing, nothing, mask),
        nothing,
        rewards=torch.tensor([REWARDS[row] for row in rows]),
        group_means=torch.tensor([means[GROUPS[row]] for row in rows]),
    )
    keep = mask & (torch.tensor(rows) != dropped)[:, None]
    return acceptance(evidence, Correction(keep.float(), keep, {}))


@pytest.mark.parametrize("parts", [[list(range(9))], [[0, 4, 8], [1, 2], [3, 5, 6, 7]], [[row] for row in range(9)]])
@pytest.mark.parametrize("dropped", range(9))
def test_partial_credit_is_neither_right_nor_wrong_by_itself(parts: list[list[int]], dropped: int) -> None:
    got = summable.finalize(summable.add([accepted(rows, dropped) for rows in parts]))
    for name, rows in (("correct", RIGHT), ("wrong", WRONG)):
        assert got[f"acceptance/{name}"] == pytest.approx(1 - (dropped in rows) / len(rows))


def test_the_mean_of_equal_rewards_is_that_reward_to_the_last_bit() -> None:
    assert group_means([[RewardedSample(i, 5, 1, 0.1) for i in range(3)], []]) == {5: 0.1}
