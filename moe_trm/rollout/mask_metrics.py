"""Metrics of the sampling masks of one step. Shape letters: S sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.sampling_mask.codec import encoded_lengths
from moe_trm.sampling_mask.record import join
from moe_trm.types import RolloutRecord, SamplingParams

MEASURED_IDS = 1 << 20
"""Kept ids of a step whose encoded bytes are counted, at most by one answer more: deflating all takes long."""


def mask_metrics(records: Sequence[RolloutRecord], params: SamplingParams) -> dict[str, float]:
    """`sampling_mask/*` of the accepted records; empty when no mask was recorded.

    | metric | meaning |
    |---|---|
    | `size_mean`, `size_median`, `size_p99`, `size_max`, `singleton_fraction` | of the sizes of the kept sets |
    | `kept_mass_mean` | the rollout engine's own probability of the kept sets, where it tells that |
    | `violations` | repaired sampled tokens outside their set; rejected ones: `records/rejected/mask_violation` |
    | `top_k` | in force |
    | `id_bytes_per_token`, `bytes_per_token` | encoded, without and with log-probs; of the first answers |
    """
    recorded = [(record, record.sampling_mask) for record in records if record.sampling_mask is not None]
    if not recorded:
        return {}
    mask = join([mask for _, mask in recorded])
    # All records at once: an array operation on one short record takes as long as one on all of them.
    tokens, places, full, rollout = (
        np.concatenate([getattr(record, name) for record, _ in recorded])
        for name in ("tokens", "sampled", "full_logprobs", "rollout_logprobs")
    )
    sizes = np.diff(mask.offsets)
    scored = sizes > 0
    kept_sizes, log_mass = sizes[scored], (full - rollout)[scored]
    median, p99 = np.quantile(kept_sizes, (0.5, 0.99)).tolist()
    vocab_size = 1 + int(max(mask.ids.max(), tokens[places].max()))
    if len(mask.ids) <= MEASURED_IDS:
        measured = mask
    else:
        before = np.cumsum([0, *(len(own.ids) for _, own in recorded[:-1])]).tolist()
        measured = join([own for (_, own), ids in zip(recorded, before, strict=True) if ids < MEASURED_IDS])
    bare, whole = encoded_lengths(measured, vocab_size)
    return {
        "sampling_mask/size_mean": float(kept_sizes.mean()),
        "sampling_mask/size_median": median,
        "sampling_mask/size_p99": p99,
        "sampling_mask/size_max": float(sizes.max()),
        "sampling_mask/singleton_fraction": float((kept_sizes == 1).mean()),
        "sampling_mask/violations": float(mask.violations),
        "sampling_mask/top_k": float(params.top_k),
        "sampling_mask/id_bytes_per_token": bare / measured.num_rows,
        "sampling_mask/bytes_per_token": whole / measured.num_rows,
        **({} if np.isnan(log_mass).any() else {"sampling_mask/kept_mass_mean": _mean_mass(log_mass)}),
    }


def _mean_mass(log_mass: np.ndarray) -> float:
    return float(np.exp(np.minimum(log_mass, 0.0)).mean())
