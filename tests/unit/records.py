"""Small valid records for unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_trm.sampling_mask.record import SamplingMask, split
from moe_trm.types import RolloutRecord
from routing import RouteRecord, token_digest

VOCAB, EXPERTS, TOP_K, LAYERS = 32, 8, 2, (0, 1, 2)


def make_record(
    *,
    sample_id: int = 0,
    group_id: int = 0,
    num_prompt: int = 4,
    num_sampled: int = 5,
    version: int = 0,
    reward: float | None = 1.0,
    layers: Sequence[int] = LAYERS,
) -> RolloutRecord:
    """A valid record with random tokens, distinct experts and three kept ids per position, by `sample_id`."""
    rng = np.random.default_rng(sample_id)
    total = num_prompt + num_sampled
    tokens = rng.integers(0, VOCAB, total).astype(np.int32)
    experts = rng.random((total - 1, len(layers), EXPERTS)).argsort(-1)[..., :TOP_K]
    kept = (tokens[num_prompt:, None] + np.arange(3)) % VOCAB
    support = np.log(np.tile([0.5, 0.25, 0.25], (num_sampled, 1))).astype(np.float32)
    return RolloutRecord(
        sample_id=sample_id,
        group_id=group_id,
        prompt_id=f"prompt-{group_id}",
        tokens=tokens,
        sampled=np.arange(total) >= num_prompt,
        turn_ids=np.zeros(total, np.int16),
        rollout_logprobs=support[:, 0].copy(),
        full_logprobs=support[:, 0] + np.float32(np.log(0.9)),
        versions=np.full(num_sampled, version, np.int32),
        routes=RouteRecord(experts.astype(np.uint8), tuple(layers), EXPERTS, token_digest(tokens)),
        sampling_mask=SamplingMask(
            kept.reshape(-1).astype(np.int32), np.arange(num_sampled + 1, dtype=np.int64) * 3, support.reshape(-1)
        ).ascending(),
        finish_reason="stop",
        reward=reward,
    )


def split_record(record: RolloutRecord, sizes: Sequence[int]) -> RolloutRecord:
    """The same sample as several rows: of `sizes` sampled tokens each, with all that came before as context."""
    places, rows, first = np.flatnonzero(record.sampled), list[RolloutRecord](), 0
    masks = [None] * len(sizes) if record.sampling_mask is None else split(record.sampling_mask, sizes)
    for number, (size, mask) in enumerate(zip(sizes, masks, strict=True)):
        own = slice(first, first + size)
        length = int(places[own][-1]) + 1
        tokens, sampled = record.tokens[:length], np.zeros(length, bool)
        sampled[places[own]] = True
        routes = record.routes
        if routes is not None:
            routes = replace(routes, experts=routes.experts[: length - 1], token_digest=token_digest(tokens))
        row = replace(
            record,
            row=number,
            tokens=tokens,
            sampled=sampled,
            turn_ids=record.turn_ids[:length],
            rollout_logprobs=record.rollout_logprobs[own],
            full_logprobs=record.full_logprobs[own],
            versions=record.versions[own],
            routes=routes,
            sampling_mask=mask,
        )
        rows.append(row.bound())
        first += size
    return replace(rows[0], further=tuple(rows[1:]))
