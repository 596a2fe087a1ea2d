"""Metrics of the samples that a step trains, and of the time in which they were made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.batch.outcome import explained_variance
from moe_trm.batch.train_rows import num_sampled
from moe_trm.rollout.mask_metrics import mask_metrics
from moe_trm.rollout.turn_metrics import turn_metrics
from moe_trm.types import RolloutRecord, SamplingParams


def sample_metrics(records: Sequence[RolloutRecord], params: SamplingParams) -> dict[str, float]:
    """Rewards, lengths, turns and sampling masks of these samples, at least one."""
    rewards = np.array([record.reward for record in records])
    lengths = np.array([num_sampled(record) for record in records])
    groups = np.array([record.group_id for record in records])
    spread = [np.ptp(rewards[groups == group]) for group in np.unique(groups)]
    solved = [rewards[groups == group].min() == 1 for group in np.unique(groups)]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/zero_variance_groups": float(np.mean(np.array(spread) == 0)),
        "reward/solved_groups": float(np.mean(solved)) if rewards.max() <= 1 else 0.0,
        **explained_variance(rewards, groups),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/finished_fraction": float(np.mean([record.finish_reason == "stop" for record in records])),
        **turn_metrics(records),
        **mask_metrics([row for record in records for row in record.rows], params),
    }


def time_metrics(records: Sequence[RolloutRecord], busy_s: float, idle_s: float, push_s: float) -> dict[str, float]:
    """Seconds that sampling took and waited, those of the last push, and the rate of these samples' tokens."""
    tokens = sum(map(num_sampled, records))
    return {
        **({"rollout/tokens_per_s": tokens / busy_s} if busy_s else {}),
        "time/rollout_s": busy_s,
        "time/rollout_idle_s": idle_s,
        "time/rollout_idle_share": idle_s / (busy_s + idle_s),
        "time/push_s": push_s,
    }
