"""Samples with their advantages as the rows that are trained. Shape letter: S scored or sampled tokens of one sample.

A sample is one member of its group and one sequence of the loss, however many rows it is (`agent.rows`): its rows share
its advantage, and the denominator of its mean over tokens.
"""

from __future__ import annotations

import numpy as np

from moe_trm.batch.advantages import Array
from moe_trm.types import RolloutRecord, TrainRow


def train_rows(sample: RolloutRecord, advantages: float | Array) -> list[TrainRow]:
    """The rows of `sample`.

    Args:
        sample: with all its rows.
        advantages: of the sample, or `[S]` of its sampled tokens, row after row.
    """
    rows = sample.rows
    tokens = sum(row.num_scored for row in rows) if len(rows) > 1 else None
    if isinstance(advantages, float):
        return [TrainRow(row, advantages, sample_tokens=tokens) for row in rows]
    ends = np.cumsum([row.num_sampled for row in rows])
    parts = np.split(advantages, ends[:-1])
    return [TrainRow(row, float(own.mean()), own, tokens) for row, own in zip(rows, parts, strict=True)]


def num_sampled(sample: RolloutRecord) -> int:
    """Sampled tokens of all its rows."""
    return sum(row.num_sampled for row in sample.rows)
