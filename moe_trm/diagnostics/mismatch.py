"""How far two policies are apart on the sampled tokens, ratio by ratio. Shape letters: B sequences, T tokens."""

from __future__ import annotations

import math

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
    With the rollout's log-probs of its kept support, `total/exact_kl` is the mean KL(rollout || current) on it, not an estimate.
    Rows without sampled tokens count nowhere. Log-ratios are clamped to +-20 nats before any exponential. Source: methods.md 8.1.
    """
    ratios = evidence.ratios
    names = ("engine", "staleness", "total") if ratios.split else ("merged", "update", "total")
    parts = [_ratio_metrics(name, ratios.get(name).detach(), ratios.mask) for name in names]
    parts += [_policy_metrics(name, ratios) for name in (names[0], "total")]
    if evidence.exact_kl is not None:
        parts.append(summable.mean("total/exact_kl", evidence.exact_kl, ratios.mask))
    return summable.add(parts)


def _ratio_metrics(name: str, log_ratio: Tensor, mask: Tensor) -> summable.Summable:
    # Log-ratios are 0 off the mask, and so is every summand below: no further masking, few passes over the tokens.
    x, rows = clamp_log_ratio(log_ratio), mask.any(dim=1)
    tokens = mask.sum(dtype=torch.float64)
    sum_x, sum_expm1, sum_expm1_twice = _sum(x), _sum(x.expm1()), _sum((2 * x).expm1())
    row_total = clamp_log_ratio(row_sum(log_ratio, mask))
    drop = -row_mean(x, mask)
    per_token = {
        "kl": -sum_x,
        "k3_kl": (sum_expm1 - sum_x).clamp(min=0.0),
        "abs_log_ratio": _sum(x.abs()),
        "chi2_token": sum_expm1_twice,
        "rollout_is_high_fraction": (x > math.log(HIGH_RATIO)).sum(dtype=torch.float64),
        "rollout_is_low_fraction": (x < -math.log(HIGH_RATIO)).sum(dtype=torch.float64),
        "rollout_is": sum_expm1 + tokens,
    }
    metrics = {f"{name}/{key}:sum": value for key, value in per_token.items()}
    metrics |= {f"{name}/{key}:count": tokens for key in per_token}
    metrics[f"{name}/rollout_is:square"] = sum_expm1_twice + tokens
    return {
        **metrics,
        **summable.maximum(f"{name}/rollout_is_max", x.exp()),  # 0 off the mask: 1
        **summable.minimum(f"{name}/rollout_is_min", x.exp()),
        **summable.mean(f"{name}/chi2_seq", (2 * row_total).expm1(), rows),
        **summable.mean(f"{name}/log_ppl_diff", drop, rows),
        **summable.mean(f"{name}/log_ppl_abs_diff", drop.abs(), rows),
        **summable.mean(f"{name}/ppl_ratio", drop.exp(), rows),
        **summable.moments(f"{name}/rollout_is_seq", row_total.exp(), rows),
    }


def _policy_metrics(name: str, ratios: LogRatios) -> summable.Summable:
    mask, rows = ratios.mask, ratios.mask.any(dim=1)
    rollout = ratios.rollout_logprobs
    training = rollout + ratios.get(name).detach()
    p, q = torch.where(mask, rollout.exp(), 0.0), torch.where(mask, training.exp(), 0.0)
    tokens, gap = mask.sum(dtype=torch.float64), (p - q).abs()
    return {
        **summable.mean(f"{name}/rollout_ppl", (-row_mean(rollout, mask)).exp(), rows),
        **summable.mean(f"{name}/training_ppl", (-row_mean(training, mask)).exp(), rows),
        **summable.correlation(f"{name}/probs_pearson", p, q, tokens),
        f"{name}/probs_diff:sum": _sum(gap),
        f"{name}/probs_diff:squared": _sum(gap * gap),
        f"{name}/probs_diff:count": tokens,
        **summable.maximum(f"{name}/probs_diff_max", gap),
    }


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)
