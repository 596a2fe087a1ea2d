"""Trust-region masking: a row trains only if the policies stayed close on it, by its worst token, its average, or both."""

from __future__ import annotations

from torch import Tensor

from moe_trm.corrections.decision import check_positive, keep_rows
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rows import row_max, row_mean
from moe_trm.corrections.rule import rule
from moe_trm.errors import ConfigError
from moe_trm.ratios import clamp_log_ratio


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_kl": quantile})
def trm_max(evidence: Evidence, log_ratio: Tensor, *, max_kl: float, divergence: str = "sampled") -> Correction:
    """TRM-Max: keep row i iff max_t d_t <= max_kl.

    `divergence="sampled"`: d = k2 = (log w)^2 / 2, symmetric in w and 1/w, from the sampled token alone.
    `divergence="exact"`: d = KL(mu || pi_theta) of each context; only then does the guarantee max_t KL <= max_kl hold.
    The threshold does not depend on length, the chance to pass does: (1 - p)^T. `max_kl` in nats has no published value and
    no default. Source: methods.md 2.9.
    """
    check_positive("trm_max", "max_kl", max_kl)
    score = row_max(_worst_divergence(evidence, log_ratio, divergence), evidence.mask)
    return keep_rows(score <= max_kl, evidence.mask, score)


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"mean_kl": quantile})
def trm_avg(evidence: Evidence, log_ratio: Tensor, *, mean_kl: float, divergence: str = "sampled") -> Correction:
    """TRM-Avg: keep row i iff mean_t d_t <= mean_kl.

    `divergence="sampled"`: d = k3 = w - 1 - log w, never negative and unbiased, E_mu[k3] = KL(mu || pi_theta).
    `divergence="exact"`: d = KL(mu || pi_theta) of each context. Neutral to length. `mean_kl` in nats has no published value
    and no default. Source: methods.md 2.9.
    """
    check_positive("trm_avg", "mean_kl", mean_kl)
    score = row_mean(_average_divergence(evidence, log_ratio, divergence), evidence.mask)
    return keep_rows(score <= mean_kl, evidence.mask, score)


@rule(ratio="total", scope="sequence")
def trm_max_avg(
    evidence: Evidence, log_ratio: Tensor, *, max_kl: float, mean_kl: float, divergence: str = "sampled"
) -> Correction:
    """TRM-Max&Avg: keep row i iff TRM-Max and TRM-Avg both keep it, which allows looser thresholds for each.

    The score reported is the larger of the two statistics, each divided by its threshold: above 1 the row is dropped.
    Divergences and units as in `trm_max` and `trm_avg`. Source: methods.md 2.9.
    """
    check_positive("trm_max_avg", "max_kl", max_kl)
    check_positive("trm_max_avg", "mean_kl", mean_kl)
    worst = row_max(_worst_divergence(evidence, log_ratio, divergence), evidence.mask)
    average = row_mean(_average_divergence(evidence, log_ratio, divergence), evidence.mask)
    keep = (worst <= max_kl) & (average <= mean_kl)
    return keep_rows(keep, evidence.mask, (worst / max_kl).maximum(average / mean_kl))


def _worst_divergence(evidence: Evidence, log_ratio: Tensor, divergence: str) -> Tensor:
    # k3 would let a ratio of 0.01 pass at a threshold that stops 100; k2 treats both alike.
    return clamp_log_ratio(log_ratio) ** 2 / 2 if divergence == "sampled" else _exact_kl(evidence, divergence)


def _average_divergence(evidence: Evidence, log_ratio: Tensor, divergence: str) -> Tensor:
    clamped = clamp_log_ratio(log_ratio)
    return clamped.expm1() - clamped if divergence == "sampled" else _exact_kl(evidence, divergence)


def _exact_kl(evidence: Evidence, divergence: str) -> Tensor:
    if divergence != "exact":
        raise ConfigError("unknown divergence", where="correction trm", got=divergence, expected="sampled, exact")
    if evidence.exact_kl is None:
        raise ConfigError(
            "divergence='exact' needs the exact KL of each context, and the evidence has none",
            where="correction trm",
            got="exact_kl=None",
            expected="exact_kl of shape [B, T]",
            fix="record the sampling mask with its log-probs (sampling_mask.mode=keep), or use divergence='sampled'",
        )
    return evidence.exact_kl.detach()
