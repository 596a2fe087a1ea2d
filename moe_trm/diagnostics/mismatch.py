"""How far two policies are apart on the sampled tokens, ratio by ratio. Shape letters: B sequences, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm import summable
from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.rows import row_mean, row_sum
from moe_trm.ratios import LogRatios, clamp_log_ratio

HIGH_RATIO = 2.0


def metrics(evidence: Evidence) -> summable.Summable:
    """Mismatch metrics of each part of the log-ratio, summable; `finalize` turns them into numbers.

    Prefixes: `engine/`, `staleness/`, `total/`; or `merged/`, `update/`, `total/` when the weights that sampled are gone.
    With x a log-ratio between a later and an earlier policy and means over sampled tokens, or over rows that have any:

    | name | definition |
    |---|---|
    | `kl` | mean(-x): unbiased under the earlier policy, noisy, may be negative |
    | `k3_kl` | mean(e^x - 1 - x): unbiased too, never negative |
    | `abs_log_ratio` | mean abs(x) |
    | `chi2_token`, `chi2_seq` | mean(e^{2x}) - 1 of tokens; of row sums |
    | `log_ppl_diff`, `log_ppl_abs_diff`, `ppl_ratio` | mean over rows of d, abs(d), e^d with d = mean_t(-x) |
    | `rollout_is_{mean,std,eff_sample_size}` | of e^x over tokens |
    | `rollout_is_seq_{mean,std,eff_sample_size}` | of e^{sum x} over rows |
    | `rollout_is_high_fraction`, `rollout_is_low_fraction` | share of tokens with e^x above 2, below 1/2 |

    `engine/` (or `merged/`) and `total/` also have `rollout_ppl`, `training_ppl` (means over rows of e^{mean(-log p)}),
    `probs_pearson` and `probs_diff_{mean,std}` (of abs(p - q)), each of the rollout's log-probs against the other policy's.
    Rows without sampled tokens count nowhere. Log-ratios are clamped to +-20 nats before any exponential. Source: methods.md 8.1.
    """
    ratios = evidence.ratios
    names = ("engine", "staleness", "total") if ratios.split else ("merged", "update", "total")
    parts = [_ratio_metrics(name, ratios.get(name).detach(), ratios.mask) for name in names]
    parts += [_policy_metrics(name, ratios) for name in (names[0], "total")]
    return summable.add(parts)


def _ratio_metrics(name: str, log_ratio: Tensor, mask: Tensor) -> summable.Summable:
    x, rows = clamp_log_ratio(log_ratio), mask.any(dim=1)
    ratio, row_total = x.exp(), clamp_log_ratio(row_sum(log_ratio, mask))
    drop = -row_mean(x, mask)
    return {
        **summable.mean(f"{name}/kl", -x, mask),
        **summable.mean(f"{name}/k3_kl", x.expm1() - x, mask),
        **summable.mean(f"{name}/abs_log_ratio", x.abs(), mask),
        **summable.mean(f"{name}/chi2_token", (2 * x).expm1(), mask),
        **summable.mean(f"{name}/chi2_seq", (2 * row_total).expm1(), rows),
        **summable.mean(f"{name}/log_ppl_diff", drop, rows),
        **summable.mean(f"{name}/log_ppl_abs_diff", drop.abs(), rows),
        **summable.mean(f"{name}/ppl_ratio", drop.exp(), rows),
        **summable.moments(f"{name}/rollout_is", ratio, mask),
        **summable.moments(f"{name}/rollout_is_seq", row_total.exp(), rows),
        **summable.fraction(f"{name}/rollout_is_high_fraction", ratio > HIGH_RATIO, mask),
        **summable.fraction(f"{name}/rollout_is_low_fraction", ratio < 1 / HIGH_RATIO, mask),
    }


def _policy_metrics(name: str, ratios: LogRatios) -> summable.Summable:
    mask, rows = ratios.mask, ratios.mask.any(dim=1)
    rollout = ratios.rollout_logprobs
    training = torch.where(mask, rollout + ratios.get(name).detach(), 0.0)
    p, q = rollout.exp(), training.exp()
    gap = summable.moments(f"{name}/probs_diff", (p - q).abs(), mask)
    return {
        **summable.mean(f"{name}/rollout_ppl", (-row_mean(rollout, mask)).exp(), rows),
        **summable.mean(f"{name}/training_ppl", (-row_mean(training, mask)).exp(), rows),
        **summable.correlation(f"{name}/probs_pearson", p, q, mask),
        **gap,
    }
