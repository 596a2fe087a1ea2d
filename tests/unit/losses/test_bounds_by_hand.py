"""Losses with unequal bounds, scaled bounds, and dropped tokens of later turns, with numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm import losses
from moe_trm.losses import LossInputs
from moe_trm.ratios import LogRatios


def inputs_of(rollout: list[list[float]], current: list[list[float]], advantages: list[list[float]]) -> LossInputs:
    sampled, now, signs = (torch.tensor(rows, dtype=torch.float64) for rows in (rollout, current, advantages))
    return LossInputs.uncorrected(LogRatios(sampled, sampled, now, torch.ones_like(sampled).bool()), now, signs)


def values_of(name: str, inputs: LossInputs, **parameters: float | str) -> Tensor:
    return losses.get(name)(inputs, **parameters).values


@pytest.mark.parametrize(
    ("loss", "tight", "wide"),
    [
        # The probability moves by 0.2 from 0.5.
        ("dppo_tv", 0.1, 0.3),
        # 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.0872.
        ("dppo_kl", 0.05, 0.1),
    ],
)
def test_each_sign_of_dppo_has_its_own_bound(loss: str, tight: float, wide: float) -> None:
    half, likelier, rarer = math.log(0.5), math.log(0.7), math.log(0.3)
    inputs = inputs_of([[half] * 4], [[likelier, rarer, likelier, rarer]], [[1.0, 1.0, -1.0, -1.0]])
    outward, inward = 1.4 * -likelier, 0.6 * -rarer
    high = values_of(loss, inputs, bound_low=tight, bound_high=wide)[0].tolist()
    assert high == pytest.approx([outward, inward, -outward, 0.0])
    low = values_of(loss, inputs, bound_low=wide, bound_high=tight)[0].tolist()
    assert low == pytest.approx([0.0, inward, -outward, -inward])


def test_espo_clips_certain_tokens_closer_than_uncertain_ones() -> None:
    """Entropies 1 and 3 about a mean of 2: clips of 0.1 and 0.3, though one rule for all would be 0.2."""
    inputs = inputs_of([[0.0] * 4] * 2, [[0.15, 0.15, 0.25, 0.25]] * 2, [[1.0] * 4, [-1.0] * 4])
    inputs = replace(inputs, entropy=torch.tensor([[1.0, 1.0, 3.0, 3.0]] * 2))
    values = values_of("espo", inputs, num_bins=2)
    assert values[0].tolist() == pytest.approx([-1.1, -1.1, -math.exp(0.25), -math.exp(0.25)])
    assert values[1].tolist() == pytest.approx([math.exp(0.15)] * 2 + [math.exp(0.25)] * 2)
    down = inputs_of([[0.0] * 4], [[-0.15, -0.15, -0.25, -0.25]], [[-1.0] * 4])
    down = replace(down, entropy=torch.tensor([[1.0, 1.0, 3.0, 3.0]]))
    assert values_of("espo", down, num_bins=2)[0].tolist() == pytest.approx([0.9, 0.9, *[math.exp(-0.25)] * 2])


@pytest.mark.parametrize("turn_ratio", ["geometric", "product"])
def test_a_dropped_token_counts_in_its_own_turn_however_late_that_is(turn_ratio: str) -> None:
    log_ratios = [0.1, 0.3, -0.2, 0.4, 0.6, 0.05]
    inputs = inputs_of([[0.0] * 6], [log_ratios], [[1.0, 1.0, 2.0, 4.0, 6.0, 3.0]])
    keep = torch.tensor([[True, True, True, False, True, True]])
    inputs = replace(inputs, turn_ids=torch.tensor([[0, 0, 1, 1, 1, 2]]), keep=keep)
    values = values_of("turn_ppo", inputs, clip_low=9.0, clip_high=9.0, turn_ratio=turn_ratio)[0].tolist()
    share = {"geometric": (2, 3, 1), "product": (1, 1, 1)}[turn_ratio]
    sums = (0.1 + 0.3, -0.2 + 0.4 + 0.6, 0.05)
    means = (1.0, 4.0, 3.0)
    first, second, third = (
        -mean * math.exp(total / count) for mean, total, count in zip(means, sums, share, strict=True)
    )
    assert [values[place] for place in (0, 1, 2, 4, 5)] == pytest.approx([first, first, second, second, third])
