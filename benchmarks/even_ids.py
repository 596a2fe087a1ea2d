"""A reward that any model can learn from, also one with random weights."""

from __future__ import annotations

from moe_trm.tasks import RewardInput


def share(sample: RewardInput) -> float:
    """The share of even ids in the answer."""
    ids = sample.completion_ids
    return sum(1 - token_id % 2 for token_id in ids) / max(1, len(ids))
