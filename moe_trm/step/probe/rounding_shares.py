"""Shares of the mismatch that rounded weights make: the learner scores with the weights as the engine has them.

With weights that are first quantised, then cast:

replayed - rollout = (replayed - quantised) + (quantised - cast) + (cast - rollout)
                   = quantization + cast + arithmetic, without remainder.

Shape letter: N scored tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moe_trm.config.precision_rules import unrepeatable
from moe_trm.config.schema import LearnerConfig, RolloutConfig
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.ratios import k3
from moe_trm.step.passes import anchor_source, judged_before
from moe_trm.step.probe.sample import ProbeRows, products, standard_errors
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch

ROUNDED = "rounded"
"""Name of the snapshot with rounded weights."""


def roundings(learner: LearnerConfig, rollout: RolloutConfig) -> Mapping[str, Rounding]:
    """Roundings of a push, in its order, by the names of the shares; each with those before it.

    Empty where a push rounds nothing, where ranks cannot repeat the rounding on their own parts of the weights, where
    every pass rounds as a push does, where pushes have noise or the engine rounds once more by itself, and with
    adapters, whose factors alone are in a copy of the weights.
    """
    by_name = dict[str, Rounding]()
    elsewhere = rollout.quantization is not None or max(rollout.norm_noise, rollout.fake_router_noise) > 0
    inside = learner.round_like_rollout or learner.lora.rank > 0
    if elsewhere or inside or unrepeatable(learner, rollout) is not None:
        return by_name
    narrows = learner.dtype == "float32" != rollout.server.dtype
    if rollout.fake_quantization is not None:
        between = learner.dtype if narrows else rollout.server.dtype
        by_name["quantization"] = Rounding(between, rollout.fake_quantization)
    if narrows:
        by_name["cast"] = Rounding(rollout.server.dtype, rollout.fake_quantization)
    return by_name


def rounding_shares(
    learner: Learner,
    batches: Sequence[TokenBatch],
    replayed: Sequence[Scores],
    roundings: Mapping[str, Rounding],
    rows: ProbeRows,
) -> dict[str, float]:
    """`probe/quantization_k3_kl`, `probe/cast_k3_kl` and `probe/arithmetic_k3_kl`, in nats. Collective.

    Each is the mean of e^x - 1 - x over scored tokens, for one part of the split, with its standard error beside it
    (`_se`) where a sample of rows was scored. The learner scores once more for each of `roundings`; `replayed` are
    scores of its own weights with the rollout's routes.
    """
    columns: dict[str, torch.Tensor] = {}
    earlier = _scored(batches, replayed)
    for share, rounding in roundings.items():
        learner.snapshot(ROUNDED, rounding=rounding)
        try:
            sources = [anchor_source("R3", batch, judged_before(batch)) for batch in batches]
            scores = learner.score(batches, sources, weights=ROUNDED)
        finally:
            learner.forget(ROUNDED)
        after = _scored(batches, scores)
        columns[share], earlier = k3(earlier - after), after
    rollout_N = torch.cat([batch.rollout_logprobs[batch.mask].cpu() for batch in batches])
    columns["arithmetic"] = k3(earlier - rollout_N)
    spread = dict.fromkeys(columns, "tokens")
    columns["tokens"] = torch.ones(len(rollout_N), dtype=torch.float64)
    sums = {name: values.sum() for name, values in columns.items()}
    total = learner.reduce(sums if rows.is_complete else sums | products(columns, _rows_of(batches), spread))
    errors = standard_errors(total, spread, rows)
    return {f"probe/{share}_k3_kl": total[share] / total["tokens"] for share in spread} | {
        f"probe/{share}_k3_kl_se": error for share, error in errors.items()
    }


def _rows_of(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """`[N]` number of each token's row."""
    return torch.cat([torch.tensor(batch.sample_ids)[batch.mask.cpu().nonzero()[:, 0]] for batch in batches])


def _scored(batches: Sequence[TokenBatch], scores: Sequence[Scores]) -> torch.Tensor:
    return torch.cat([score.logprobs[batch.mask].cpu() for batch, score in zip(batches, scores, strict=True)])
