"""Metrics of a step's samples that only some tasks have: named rewards, turns, and tool outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.types import RolloutRecord


def turn_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Metrics of `records` (at least one) with several answers or several parts of the reward.

    | metric | of |
    |---|---|
    | `reward/<name>/mean` | the samples whose reward has a part of that name |
    | `turns/mean`, `turns/max` | trained answers per sample, where any sample has several |
    | `turns/appended_tokens_mean` | tokens that a tool or user said between trained answers, per sample |
    | `turns/later_token_fraction` | share of sampled tokens that come after the first answer, hence after a tool |
    | `turns/rows_mean`, `turns/rows_max` | rows per sample, where any sample has several |
    """
    metrics = {f"reward/{name}/mean": mean for name, mean in part_means(records).items()}
    turns = np.array([sum(_answers(row) for row in record.rows) for record in records])
    if turns.max() > 1:
        rows = [row for record in records for row in record.rows]
        later = [int((row.turn_ids[row.sampled] > 0).sum()) for row in rows]
        metrics |= {
            "turns/mean": float(turns.mean()),
            "turns/max": float(turns.max()),
            "turns/appended_tokens_mean": float(np.mean([_appended(record) for record in records])),
            "turns/later_token_fraction": sum(later) / sum(row.num_sampled for row in rows),
        }
    several = [len(record.rows) for record in records]
    if max(several) > 1:
        metrics |= {"turns/rows_mean": float(np.mean(several)), "turns/rows_max": float(max(several))}
    return metrics


def part_means(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Mean of each named part of the reward, over the samples that have it."""
    return {
        name: float(np.mean([record.reward_parts[name] for record in records if name in record.reward_parts]))
        for name in sorted({name for record in records for name in record.reward_parts})
    }


def _answers(row: RolloutRecord) -> int:
    """Answers that it trains."""
    return len(set(row.turn_ids[row.sampled].tolist()))


def _appended(record: RolloutRecord) -> int:
    """Tokens that were not sampled, between two trained answers of the sample."""
    if record.session:
        return sum(turn.added for turn in record.session if turn.row >= 0 and turn.parent >= 0)
    return int((~record.sampled[int(record.sampled.argmax()) :]).sum())
