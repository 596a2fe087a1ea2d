"""Off-policy sequence masking, as in DeepSeek-V3.2: do not push down what the policy no longer says."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.corrections.decision import weigh
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.row_scores import Divergence, Score, check_score, drop_score, unscored
from moe_trm.corrections.rows import over_tokens
from moe_trm.corrections.rule import rule
from moe_trm.methods import summable


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"delta": quantile})
def opsm(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    delta: float,
    score: Score = "mean",
    divergence: Divergence = "sampled",
    ln_delta: float | None = None,
) -> Correction:
    """Drop tokens with A < 0 in rows with D_i > delta, D_i = mean_t(log mu - log pi_theta) = -mean_t log w_t.

    Both comparisons are strict: A = 0 and D = delta stay. The statistic is of the row, the sign of each token, so rows
    of one sign are dropped whole. Positive rows lose only tokens whose ratio is NaN. D splits into engine and
    staleness parts, because log w = log rho + log r. delta is unpublished and has no default here; 1e-4 to 0.5 is in
    use. slime and miles compare current with proximal (`ratio: update` here) unless told to take the rollout's
    log-probs.
    `score` takes another reduction of -log w than the mean, or `ser`, which counts both directions.
    `divergence="exact"` reads KL(mu || pi_theta) of each context, of which -log w is the sampled estimate.
    Source: off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556).

    When: rollouts are old: wrong answers that the policy no longer gives stop pushing it. Leaves right answers alone.
    """
    check_score("opsm", score, ln_delta)
    mask, distance = evidence.mask, drop_score(score, evidence, log_ratio, divergence, ln_delta)
    too_far = over_tokens(~(distance <= delta), mask)
    negative = evidence.advantages < 0
    metrics = summable.mean("score", distance, mask.any(dim=1)) | summable.fraction(
        "negative_kept_fraction", ~too_far, mask & negative
    )
    metrics |= unscored(score, evidence)
    decision = weigh(torch.ones_like(log_ratio), mask, ~(negative & too_far) & ~log_ratio.isnan(), metrics)
    return replace(decision, score=distance, judged=(negative & mask).any(dim=1))
