"""Samples as the rows that are trained.

A sample is one member of its group and one sequence of the loss, however many rows it is (`agent.rows`): its rows share
the denominator of its mean over tokens.
"""

from __future__ import annotations

from moe_trm.types import RolloutRecord, TrainRow


def train_rows(sample: RolloutRecord) -> list[TrainRow]:
    """The rows of `sample`, which has all of them."""
    rows = sample.rows
    tokens = sum(row.num_scored for row in rows) if len(rows) > 1 else None
    return [TrainRow(row, tokens) for row in rows]


def num_sampled(sample: RolloutRecord) -> int:
    """Sampled tokens of all its rows."""
    return sum(row.num_sampled for row in sample.rows)
