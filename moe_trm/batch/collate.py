"""A micro-batch of records as padded tensors. Shape letters: B rows, R forwarded tokens of the longest row."""

from __future__ import annotations

import numpy as np
import torch

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.record import SamplingMask, row_sizes
from moe_trm.types import MicroBatch, RolloutRecord, TokenBatch, TrainRow

SHORTEST = 2
"""Forwarded tokens of a micro-batch at least."""


def forwarded_tokens(record: RolloutRecord) -> int:
    """Length of the record's row in a micro-batch by itself: all tokens but the last."""
    return max(SHORTEST, record.num_tokens - 1)


def collate(micro: MicroBatch, *, keep_mask: bool) -> TokenBatch:
    """Right-pad the rows of `micro`. An empty one becomes one row of padding, so that all ranks make the same forwards.

    With `keep_mask` the kept ids of the scored positions are concatenated in row-major order, which is the order of
    `mask.nonzero()`.
    """
    rows = micro.rows
    records = [row.record for row in rows]
    b, r = max(1, len(rows)), max([SHORTEST, *map(forwarded_tokens, records)])
    group_ids = np.full(b, -1, np.int64)
    group_ids[: len(rows)] = [record.group_id for record in records]
    lengths = np.array([record.num_tokens - 1 for record in records] or [0])
    valid = np.arange(r) < lengths[:, None]
    # All rows at once, one after the other: that is the order of the True places of `valid`, and of `mask`.
    kept = _scored(records)
    mask = _spread(valid, [record.sampled[1:] for record in records], bool)
    assert [record.num_sampled for record in records] == mask.sum(1)[: len(rows)].tolist(), (
        "one value per sampled token"
    )
    mask[mask] = kept

    def of_sampled(values: list[np.ndarray], dtype: type, fill: int = 0) -> np.ndarray:
        spread: np.ndarray = np.full((b, r), fill, dtype)
        spread[mask] = _joined(values, dtype)[kept]
        return spread

    input_ids = _spread(valid, [record.tokens[:-1] for record in records], np.int64)
    target_ids = _spread(valid, [record.tokens[1:] for record in records], np.int64)
    turn_ids = _spread(valid, [record.turn_ids[1:] for record in records], np.int16)
    rollout = of_sampled([record.rollout_logprobs for record in records], np.float32)
    full = of_sampled([record.full_logprobs for record in records], np.float32)
    versions = of_sampled([record.versions for record in records], np.int32, fill=-1)
    taught = [record.teacher_logprobs for record in records if record.teacher_logprobs is not None]
    all_taught = bool(taught) and len(taught) == len(records)
    advantages = np.where(mask, np.float32(np.nan), np.float32(0))
    kept_ids, kept_offsets, kept_logprobs = _kept(rows) if keep_mask else (None, None, None)
    return TokenBatch(
        input_ids=torch.from_numpy(input_ids),
        target_ids=torch.from_numpy(target_ids),
        valid=torch.from_numpy(valid),
        mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(rollout),
        full_logprobs=torch.from_numpy(full),
        versions=torch.from_numpy(versions),
        turn_ids=torch.from_numpy(turn_ids),
        advantages=torch.from_numpy(advantages),
        routes=tuple(row.record.routes for row in rows) or (None,),
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
        rewards=_rewards(records, b),
        group_ids=torch.from_numpy(group_ids),
        kept_logprobs=kept_logprobs,
        origins=tuple(row.record.origin for row in rows) or (None,),
        sampled_by=tuple(_versions(record) for record in records) or ((-1, -1),),
        servers=tuple(-1 if record.server is None else record.server for record in records) or (-1,),
        prompts=tuple((mask.argmax(1) + 1).tolist()),
        sample_ids=tuple(row.record.row_id for row in rows) or (-1,),
        sample_tokens=_sample_tokens(rows),
        row_weights=_weights(rows),
        reference_logprobs=torch.from_numpy(of_sampled(taught, np.float32)) if all_taught else None,
        pictures=tuple(record.pictures for record in records) if any(record.pictures for record in records) else (),
    )


def _versions(record: RolloutRecord) -> tuple[int, int]:
    """The oldest and the newest version that sampled the row."""
    return (int(record.versions.min()), int(record.versions.max())) if record.num_sampled else (-1, -1)


def _rewards(records: list[RolloutRecord], rows: int) -> torch.Tensor | None:
    """Reward of each row, 0 on padding rows; None where a record has none, which is in batches that do not train."""
    rewards = [record.reward for record in records if record.reward is not None]
    if len(rewards) < len(records):
        return None
    return torch.tensor(rewards + [0.0] * (rows - len(rewards)), dtype=torch.float32)


def _scored(records: list[RolloutRecord]) -> np.ndarray:
    """`RolloutRecord.scored` of all records, one after the other."""
    masks = [record.sampling_mask for record in records if record.sampling_mask is not None]
    if len(masks) == len(records):
        scored: np.ndarray = row_sizes(masks) > 0
        return scored
    return _joined([record.scored for record in records], bool)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    joined: np.ndarray = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
    return joined


def _spread(valid: np.ndarray, parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """`[B, R]`: the values of all forwarded tokens at their places, 0 elsewhere."""
    values: np.ndarray = np.zeros(valid.shape, dtype)
    values[valid] = _joined(parts, dtype)
    return values


def _sample_tokens(rows: tuple[TrainRow, ...]) -> torch.Tensor | None:
    """Scored tokens of the sample of each row; None where every row is a whole sample."""
    if all(row.sample_tokens is None for row in rows):
        return None
    num_tokens = [row.record.num_scored if row.sample_tokens is None else row.sample_tokens for row in rows]
    return torch.tensor(num_tokens, dtype=torch.int64)


def _weights(rows: tuple[TrainRow, ...]) -> torch.Tensor | None:
    if all(row.weight == 1 for row in rows):
        return None
    return torch.tensor([row.weight for row in rows], dtype=torch.float32)


def _kept(rows: tuple[TrainRow, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    masks = [recorded_support(row.record) for row in rows]
    ids = np.concatenate([np.zeros(0, np.int32), *(mask.ids for mask, _ in masks)])
    sizes = row_sizes([mask for mask, _ in masks])
    # Rows of dropped tokens are empty, and not among those that are scored.
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[sizes > 0])])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(logprobs for _, logprobs in masks)])
    return (
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(offsets),
        torch.from_numpy(logprobs.astype(np.float32, copy=False)),
    )


def recorded_support(record: RolloutRecord) -> tuple[SamplingMask, np.ndarray]:
    """The record's sampling mask, and the log-probs of its kept ids, `[M]` float32.

    Raises `RecordRejected` (`mask_missing`) without both.
    """
    mask = record.sampling_mask
    if mask is None or mask.logprobs is None:
        raise RecordRejected(
            "mask_missing",
            "sampling_mask.mode=keep needs the sampling mask of every record with its log-probs",
            where=f"sample {record.sample_id}",
            got="no mask" if mask is None else "kept ids only",
            expected="kept ids and their log-probs",
            fix="Record the rollouts again with sampling_mask.mode=keep, or set it to off.",
        )
    return mask, mask.logprobs
