"""A reward that differs within every group, however little the model can do."""

from __future__ import annotations

from moe_trm.tasks import RewardInput


def reward(sample: RewardInput) -> float:
    """0, 1/4, ... 1, by the ids of the answer."""
    return sum(sample.completion_ids) % 5 / 4
