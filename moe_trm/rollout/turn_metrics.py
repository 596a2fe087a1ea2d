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
    | `turns/mean`, `turns/max` | answers per sample, where any sample has several |
    | `turns/appended_tokens_mean` | tokens that a tool or user said between answers, per sample |
    | `turns/later_token_fraction` | share of sampled tokens that come after the first answer, hence after a tool |
    """
    metrics = {
        f"reward/{name}/mean": float(
            np.mean([record.reward_parts[name] for record in records if name in record.reward_parts])
        )
        for name in sorted({name for record in records for name in record.reward_parts})
    }
    turns = np.array([int(record.turn_ids.max(initial=0)) + 1 for record in records])
    if turns.max() > 1:
        later = [int((record.turn_ids[record.sampled] > 0).sum()) for record in records]
        metrics |= {
            "turns/mean": float(turns.mean()),
            "turns/max": float(turns.max()),
            "turns/appended_tokens_mean": float(np.mean([_appended(record) for record in records])),
            "turns/later_token_fraction": sum(later) / sum(record.num_sampled for record in records),
        }
    return metrics


def _appended(record: RolloutRecord) -> int:
    """Tokens behind the first sampled one that were not sampled."""
    return int((~record.sampled[int(record.sampled.argmax()) :]).sum())
