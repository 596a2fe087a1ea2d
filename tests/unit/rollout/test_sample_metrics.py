"""What the samples of a step say of its groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
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


@pytest.mark.parametrize(("log_prob", "copies"), [(-2.0, 3), (-0.01, 0)])
def test_answers_are_copies_where_the_policy_makes_equal_ones_next_to_impossible(log_prob: float, copies: int) -> None:
    """Four of eight answers of a prompt are one; of another prompt all are different."""
    samples = [make_record(sample_id=i, group_id=i // 8, num_sampled=6) for i in range(16)]
    copied = replace(samples[0], rollout_logprobs=np.full(6, log_prob, np.float32))
    samples[:4] = [replace(copied, sample_id=i) for i in range(4)]
    metrics = sample_metrics(samples, SamplingParams())
    assert metrics["response/copies"] == copies
    assert metrics["response/copies_log_p"] == pytest.approx(np.log(35 * 2) + 3 * 6 * log_prob, rel=1e-5)


def test_equal_answers_to_different_prompts_are_no_copies() -> None:
    samples = [replace(make_record(), sample_id=i, group_id=i) for i in range(4)]
    metrics = sample_metrics(samples, SamplingParams())
    assert metrics["response/copies"] == 0
    assert "response/copies_log_p" not in metrics
