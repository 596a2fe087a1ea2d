"""Age of the trained tokens and of the waiting groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from moe_trm.types import RolloutRecord


def age_metrics(
    records: Sequence[RolloutRecord], version: int, queued: Mapping[int, int], bound: int
) -> dict[str, float]:
    """Age of a token: the learner's version minus the one that sampled it.

    - `rollout/age_mean`, `rollout/age_max`, `rollout/age_share/<age>`
    - `rollout/stale_tokens`: tokens with an age above 0.
    - `rollout/mixed_rows`: rows sampled by several versions.
    - `queue/groups`, `queue/age/<age>`: groups waiting when the step was requested, by the age of their oldest token.

    Every step has every age up to the `bound` on trained tokens, so an age without tokens reads 0.
    """
    ages = version - np.concatenate([record.versions for record in records])
    row_of = np.repeat(np.arange(len(records)), [len(record.versions) for record in records])
    changes = (np.diff(ages) != 0) & (np.diff(row_of) == 0)
    values, numbers = np.unique(ages, return_counts=True)
    counts, possible = Counter(dict(zip(values.tolist(), numbers.tolist(), strict=True))), range(bound + 1)
    return {
        "rollout/age_mean": float(ages.mean()),
        "rollout/age_max": float(ages.max()),
        "rollout/stale_tokens": float((ages > 0).sum()),
        "rollout/mixed_rows": float(len(np.unique(row_of[1:][changes]))),
        **{f"rollout/age_share/{age}": counts[age] / len(ages) for age in sorted({*counts, *possible})},
        "queue/groups": float(sum(queued.values())),
        **{f"queue/age/{age}": float(queued.get(age, 0)) for age in sorted({*queued, *possible})},
    }
