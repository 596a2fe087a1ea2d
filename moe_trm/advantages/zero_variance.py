"""Advantages of groups whose samples all have the same reward, from the entropy at each token.

Shape letters: S sampled tokens of one row. NumPy float64.
"""

from __future__ import annotations

import numpy as np

from moe_trm.advantages.by_row import Array
from moe_trm.batch.collate import recorded_support
from moe_trm.types import RolloutRecord


def entropy_shaped(entropies: Array, *, right: bool, scale: float) -> Array:
    """RL-ZVP: A_t = scale H_t where all samples of the prompt are right, A_t = -scale (max_s H_s - H_t) where all are
    wrong, H_t the policy's entropy at the token, which counts as a constant.

    So a right answer is rewarded most where the policy hesitated, and a wrong one is punished least there.
    Source: RL-ZVP (arXiv 2509.21880), as CompassMax-V3-Thinking (2512.07710) uses it.

    When: many prompts are too easy or too hard for the group, and dropping them (`batch.zero_variance`) would waste
    their rollouts. Costs one pass over the recorded support on each rank.

    Args:
        entropies: `[S]` nats, of the sampled tokens of one row.
        right: whether the group's reward is above 0.
        scale: the paper's alpha.
    """
    if not len(entropies):
        return entropies
    return scale * entropies if right else -scale * (entropies.max() - entropies)


def support_entropy(record: RolloutRecord) -> Array:
    """`[S]` -sum_v p_v log p_v of each scored token, p the recorded distribution over the kept support.

    Raises `RecordRejected` (`mask_missing`) for a record without it.
    """
    mask, logprobs = recorded_support(record)
    row_of = np.repeat(np.arange(mask.num_rows), np.diff(mask.offsets))
    logs = logprobs.astype(np.float64)
    # An id of probability zero adds nothing: 0 times -inf would be NaN.
    terms = np.where(np.isneginf(logs), 0.0, -np.exp(logs) * np.where(np.isneginf(logs), 0.0, logs))
    entropy: Array = np.bincount(row_of, weights=terms, minlength=mask.num_rows)[record.scored]
    return entropy
