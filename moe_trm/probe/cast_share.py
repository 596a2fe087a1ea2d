"""Share of the mismatch that comes from the weight cast alone: the learner scores with the rollout's rounded weights.

replayed - rollout = (replayed - cast) + (cast - rollout) = cast + arithmetic, without remainder. This splits numerics
once more.

Shape letter: N scored tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.ratios import k3_sum
from moe_trm.step.passes import rollout_routes
from moe_trm.types import TokenBatch

CAST = "cast"
"""Name of the snapshot with rounded weights."""


def narrower_dtype(config: Config) -> str | None:
    """The rollout's dtype where a push to it rounds weights, and nothing else does; else None."""
    rollout = config.rollout
    rounds = config.learner.dtype == "float32" != rollout.server.dtype and rollout.quantization is None
    return rollout.server.dtype if rounds else None


def cast_share(
    learner: Learner, batches: Sequence[TokenBatch], replayed: Sequence[Scores], dtype: str
) -> dict[str, float]:
    """`probe/cast_k3_kl` and `probe/arithmetic_k3_kl`, in nats.

    Each is the mean of e^x - 1 - x over scored tokens, for one part of the split. Collective.

    Args:
        learner: scores once more, under its weights rounded to `dtype`.
        batches: with the rollout's routes and log-probs.
        replayed: scores of the learner's own weights with these routes.
        dtype: the rollout's.
    """
    learner.snapshot(CAST, rounded_to=dtype)
    try:
        cast = learner.score(batches, [rollout_routes(batch) for batch in batches], weights=CAST)
    finally:
        learner.forget(CAST)
    sums = dict.fromkeys(("tokens", "cast", "arithmetic"), torch.zeros((), dtype=torch.float64))
    for batch, own, rounded in zip(batches, replayed, cast, strict=True):
        own_N, rounded_N = (score.logprobs.cpu()[batch.mask] for score in (own, rounded))
        sums["tokens"] = sums["tokens"] + len(own_N)
        sums["cast"] = sums["cast"] + k3_sum(own_N - rounded_N)
        sums["arithmetic"] = sums["arithmetic"] + k3_sum(rounded_N - batch.rollout_logprobs[batch.mask])
    total = learner.reduce(sums)
    return {f"probe/{part}_k3_kl": total[part] / total["tokens"] for part in ("cast", "arithmetic")}
