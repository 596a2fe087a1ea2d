"""What the samples of a step say of its groups."""

from __future__ import annotations

import pytest

from moe_trm.rollout.sample_metrics import sample_metrics
from moe_trm.types import SamplingParams
from tests.unit.records import make_record


@pytest.mark.parametrize(
    ("rewards", "equal", "solved"),
    [
        ([[1.0, 1.0], [1.0, 0.0]], 0.5, 0.5),
        ([[0.0, 0.0], [1.0, 0.0]], 0.5, 0.0),
        ([[1.0, 1.0], [3.0, 3.0]], 1.0, 0.5),
        ([[1.5, 1.5], [1.5, 0.5]], 0.5, 0.5),
        ([[0.4, 0.4], [0.4, 0.4]], 1.0, 0.0),
    ],
)
def test_solved_groups_have_the_highest_reward_in_every_sample(
    rewards: list[list[float]], equal: float, solved: float
) -> None:
    records = [
        make_record(sample_id=2 * group + place, group_id=group, reward=reward)
        for group, own in enumerate(rewards)
        for place, reward in enumerate(own)
    ]
    found = sample_metrics(records, SamplingParams())
    assert (found["reward/zero_variance_groups"], found["reward/solved_groups"]) == (equal, solved)
