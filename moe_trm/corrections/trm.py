"""Trust-region masking: a row trains only if the policies stayed close on it, by its worst token, its average, both, or
another score.

Where the evidence holds the exact KL, every rule also reports `only_exact_keeps` and `only_sampled_keeps`: the share of
rows on which the exact and the sampled divergence decide differently at the same thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.corrections.decision import check_positive, keep_rows, weigh_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.row_scores import Divergence, Score, check_score, divergence_score, unscored
from moe_trm.corrections.rule import rule
from moe_trm.methods import summable


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_score": quantile})
def trm(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    max_score: float,
    score: Score = "mean",
    divergence: Divergence = "sampled",
    ln_delta: float | None = None,
) -> RowDecision:
    """Trust-region masking with any score: keep row i iff score_i <= max_score.

    `score`: `max` (as `trm_max`), `mean` (as `trm_avg`), `ser`, `ln` (as `ln_trm`, with `ln_delta` for its delta), or
    `sum`, the KL of the whole row, which grows with length. `divergence="sampled"`: d = k2 for `max`, k3 for `mean` and
    `sum`, |w - 1| for `ser` and `ln`. `divergence="exact"`: d = KL(mu || pi_theta) of each context, and for `ser` and
    `ln` min(2, sqrt(2 KL)), which is at least E_mu |w - 1| (Pinsker). Units are as for the named rules.
    Source: Trust Region Masking (arXiv 2512.23075).

    When: scores are to be compared under one name, or `ser` and `ln_trm` should read the exact divergence.
    """
    check_positive("trm", "max_score", max_score)
    check_score("trm", score, ln_delta)
    return _masked(evidence, log_ratio, score, max_score, divergence, ln_delta)


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_kl": quantile})
def trm_max(evidence: Evidence, log_ratio: Tensor, *, max_kl: float, divergence: Divergence = "sampled") -> RowDecision:
    """TRM-Max: keep row i iff max_t d_t <= max_kl.

    `divergence="sampled"`: d = k2 = (log w)^2 / 2, symmetric in w and 1/w, from the sampled token alone.
    `divergence="exact"`: d = KL(mu || pi_theta) of each context; only then does the guarantee max_t KL <= max_kl hold.
    The threshold does not depend on length, the chance to pass does: (1 - p)^T. `max_kl` in nats has no published value
    and no default. Source: Trust Region Masking (arXiv 2512.23075).

    When: every token of what trains must be close, as the bounds assume; expect long answers to be rejected more and
    look at `acceptance/length_*`.
    """
    check_positive("trm_max", "max_kl", max_kl)
    return _masked(evidence, log_ratio, "max", max_kl, divergence)


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"mean_kl": quantile})
def trm_avg(
    evidence: Evidence, log_ratio: Tensor, *, mean_kl: float, divergence: Divergence = "sampled"
) -> RowDecision:
    """TRM-Avg: keep row i iff mean_t d_t <= mean_kl.

    `divergence="sampled"`: d = k3 = w - 1 - log w, never negative and unbiased, E_mu[k3] = KL(mu || pi_theta).
    `divergence="exact"`: d = KL(mu || pi_theta) of each context. Neutral to length. `mean_kl` in nats has no published
    value and no default. Source: Trust Region Masking (arXiv 2512.23075).

    When: answers as a whole must be close and lengths differ; one bad token in a long answer passes, so pair it with
    `token_veto` or `trm_max`.
    """
    check_positive("trm_avg", "mean_kl", mean_kl)
    return _masked(evidence, log_ratio, "mean", mean_kl, divergence)


@rule(
    ratio="total",
    scope="sequence",
    calibrate=lambda worst, average: {"max_kl": worst, "mean_kl": average},
)
def trm_max_avg(
    evidence: Evidence, log_ratio: Tensor, *, max_kl: float, mean_kl: float, divergence: Divergence = "sampled"
) -> RowDecision:
    """TRM-Max&Avg: keep row i iff TRM-Max and TRM-Avg both keep it, which allows looser thresholds for each.

    The score reported is the larger of the two statistics, each divided by its threshold: above 1 the row is dropped.
    A `target_reject_rate` puts both thresholds at one quantile of their statistics, at which together they reject this
    share. Divergences and units as in `trm_max` and `trm_avg`. Source: Trust Region Masking (arXiv 2512.23075).

    When: both are wanted at once with looser thresholds for each; the usual way to run trust-region masking.
    """
    check_positive("trm_max_avg", "max_kl", max_kl)
    check_positive("trm_max_avg", "mean_kl", mean_kl)

    def statistics(divergence: str) -> tuple[Tensor, Tensor]:
        worst, average = (divergence_score(score, evidence, log_ratio, divergence) for score in ("max", "mean"))
        return worst, average

    def kept(divergence: str) -> Tensor:
        worst, average = statistics(divergence)
        return (worst <= max_kl) & (average <= mean_kl)

    worst, average = statistics(divergence)
    decision = keep_rows(kept(divergence), (worst / max_kl).maximum(average / mean_kl))
    decision = replace(decision, statistics=torch.stack([worst, average], dim=1))
    return _with_disagreement(decision, evidence, divergence, kept)


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_score": quantile}, rejects=False)
def trm_soft(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    max_score: float,
    score: Score = "mean",
    power: float = 1.0,
    divergence: Divergence = "sampled",
    ln_delta: float | None = None,
) -> RowDecision:
    """Trust-region masking that fades: w_i = min(1, max_score / score_i)^power on every token of row i.

    Rows within the bound count in full, a row twice beyond it half as much (`power` 1), and nothing jumps at the
    bound. `power` -> infinity is `trm`. The weight is a measure of trust, no ratio: it may stand beside a loss that
    contains one. Scores and divergences are as in `trm`. It bounds the share of far rows, not their distance: the
    guarantees of masking do not hold. Reports `faded_fraction`, the share of rows beyond the bound, which is what a
    `target_reject_rate` chooses. No form is published: the paper names soft masking as future work.
    Source: ours, after Trust Region Masking (arXiv 2512.23075).

    When: masking rejects too much, or its share jumps from step to step, and the worst rows are not broken.
    """
    check_positive("trm_soft", "max_score", max_score)
    check_positive("trm_soft", "power", power)
    check_score("trm_soft", score, ln_delta)
    distance = divergence_score(score, evidence, log_ratio, divergence, ln_delta)
    weights = (max_score / distance).clamp(max=1.0) ** power
    rows = evidence.ratios.packing.lengths > 0
    # A row whose score is 0 is not far; one whose score is not finite is not known, and is dropped.
    weights = torch.where(distance == 0, 1.0, torch.where(distance.isfinite(), weights, torch.nan))
    metrics = summable.fraction("faded_fraction", ~(distance <= max_score), rows) | unscored(score, evidence)
    return replace(weigh_rows(weights), score=distance, metrics=metrics)


def _masked(
    evidence: Evidence,
    log_ratio: Tensor,
    name: str,
    threshold: float,
    divergence: str,
    ln_delta: float | None = None,
) -> RowDecision:
    def scored(divergence: str) -> Tensor:
        return divergence_score(name, evidence, log_ratio, divergence, ln_delta)

    score = scored(divergence)
    decision = replace(keep_rows(score <= threshold, score), metrics=unscored(name, evidence))
    return _with_disagreement(decision, evidence, divergence, lambda kind: scored(kind) <= threshold)


def _with_disagreement(
    decision: RowDecision, evidence: Evidence, divergence: str, kept_by: Callable[[str], Tensor]
) -> RowDecision:
    """Add the share of rows that only one of the divergences would keep, where both are known.

    The decision is by `divergence`; `kept_by` decides by the other one.
    """
    if evidence.exact_kl is None:
        return decision
    other_kind = "sampled" if divergence == "exact" else "exact"
    kept = {divergence: decision.keep, other_kind: kept_by(other_kind)}
    # For bools, `a > b` is True where only `a` is.
    only = {
        "only_exact_keeps": kept["exact"] > kept["sampled"],
        "only_sampled_keeps": kept["sampled"] > kept["exact"],
    }
    rows = evidence.ratios.packing.some
    return replace(decision, metrics={**decision.metrics, **summable.fractions(only, rows)})
