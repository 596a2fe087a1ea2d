"""Sampling masks of records checked against the sampler's settings, by the engine's own figures alone."""

from __future__ import annotations

import numpy as np

from moe_trm.batch.collate import recorded_support
from moe_trm.config.rollout_rules import MASK_LIMIT
from moe_trm.config.schema import RolloutConfig, SamplingMaskConfig
from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.bounds import SamplerBounds
from moe_trm.types import RolloutRecord

ROUNDING = 0.01
"""Mass above one that is the rounding of two log-probs."""


def sampler_bounds(rollout: RolloutConfig, masks: SamplingMaskConfig) -> SamplerBounds:
    """The kept sets that a run's settings allow in its records."""
    top_k = MASK_LIMIT if rollout.top_k is None else min(rollout.top_k, MASK_LIMIT)
    has_floor, minimal = rollout.top_k is None and not rollout.min_p, masks.violation != "union"
    return SamplerBounds(rollout.top_p, top_k, has_floor, minimal)


def check_kept_sets(row: RolloutRecord, bounds: SamplerBounds) -> None:
    """Refuse what no learner has to be asked about: sizes, and the masses that the engine itself claims.

    Raises:
        RecordRejected: `mask_missing` without mask and log-probs, `mask_size` for more than `top_k` ids, `mask_mass`
            for a mass above 1, or below what top_p keeps.
    """
    mask, _ = recorded_support(row)
    sizes, where = np.diff(mask.offsets), f"sample {row.sample_id}"
    # A violation that was mended has added the sampled id.
    if len(sizes) and sizes.max() > bounds.top_k + int(not bounds.minimal):
        raise RecordRejected(
            "mask_size",
            "a sampling mask keeps more ids than top_k",
            where=f"{where}, position {int(sizes.argmax())}",
            got=int(sizes.max()),
            expected=f"at most {bounds.top_k}",
        )
    mass_S = np.exp(row.full_logprobs.astype(np.float64) - row.rollout_logprobs)
    is_low_S = (sizes < bounds.top_k) & (mass_S < bounds.lowest())
    wrong_S = (sizes > 0) & ((mass_S > 1 + ROUNDING) | is_low_S)  # NaN: the engine does not say
    if wrong_S.any():
        position = int(wrong_S.argmax())
        raise RecordRejected(
            "mask_mass",
            "a sampling mask has a probability, by the engine's own log-probs, that its settings cannot leave",
            where=f"{where}, position {position}",
            got=float(mass_S[position]),
            expected=f"{bounds.lowest():.4g} to 1",
        )
