"""Filters for rollouts that are not worth training on: truncated samples, and groups whose rewards carry no signal.

Samples dropped here are valid. The ledger counts them under their reason, and more prompts are issued in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.config.schema import BatchConfig
from moe_trm.types import RolloutRecord


def is_overlong(record: RolloutRecord) -> bool:
    """True when the answer was cut at the token limit, so that its reward is not known."""
    return record.finish_reason == "length"


def reason_to_drop_sample(record: RolloutRecord, batch: BatchConfig) -> str | None:
    """The reason to leave this sample alone out of its group, or None: `overlong` under `batch.overlong=drop`."""
    return "overlong" if batch.overlong == "drop" and is_overlong(record) else None


def reason_to_drop(records: Sequence[RolloutRecord], batch: BatchConfig) -> str | None:
    """Reason not to train the group of these accepted and rewarded samples of one prompt, or None.

    | reason | when |
    |---|---|
    | `overlong` | every sample is dropped by itself |
    | `zero_variance` | `batch.zero_variance=drop`, and the rewards are equal or one sample is left: advantages are 0 |
    | `empty` | no sample was accepted |
    """
    if not records:
        return "empty"
    reasons = [reason_to_drop_sample(record, batch) for record in records]
    rewards = [record.reward for record, reason in zip(records, reasons, strict=True) if reason is None]
    if not rewards:
        return reasons[0]
    return "zero_variance" if batch.zero_variance == "drop" and len(set(rewards)) == 1 else None
