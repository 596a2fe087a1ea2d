"""How far two policies are apart on the sampled tokens, ratio by ratio.

Shape letters: B sequences, T tokens, N sampled tokens, packed: padding is dropped before anything is computed of single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_trm import summable
from moe_trm.corrections.evidence import Evidence
from moe_trm.ratios import LOG_RATIO_LIMIT, clamp_log_ratio

HIGH_RATIO = 2.0
BLOCK = 1 << 15
"""Tokens worked on together: what they need stays in a core's cache."""


def metrics(evidence: Evidence, names: Sequence[str] | None = None) -> summable.Summable:
    """Mismatch metrics of each part of the log-ratio, summable; `finalize` turns them into numbers.

    Prefixes: `engine/`, `staleness/`, `total/`; or `merged/`, `update/`, `total/` when the weights that sampled are gone; `names`
    asks for fewer. With x a log-ratio between a later and an earlier policy and means over sampled tokens, or over rows that
    have any:

    | name | definition |
    |---|---|
    | `kl` | mean(-x): unbiased under the earlier policy, noisy, may be negative |
    | `k3_kl` | mean(e^x - 1 - x): unbiased too, never negative |
    | `abs_log_ratio` | mean abs(x) |
    | `chi2_token`, `chi2_seq` | mean(e^{2x}) - 1 of tokens; of row sums |
    | `log_ppl_diff`, `log_ppl_abs_diff`, `ppl_ratio` | mean over rows of d, abs(d), e^d with d = mean_t(-x) |
    | `rollout_is_{mean,std,eff_sample_size,max,min}` | of e^x over tokens |
    | `rollout_is_seq_{mean,std,eff_sample_size,max,min}` | of e^{sum x} over rows |
    | `rollout_is_high_fraction`, `rollout_is_low_fraction` | share of tokens with e^x above 2, below 1/2 |

    `engine/` (or `merged/`) and `total/` also have `rollout_ppl`, `training_ppl` (means over rows of e^{mean(-log p)}),
    `probs_pearson` and `probs_diff_{mean,std,max}` (of abs(p - q)), each of the rollout's log-probs against the other policy's.
    With the rollout's distribution on its kept support, `total/exact_kl` is the mean KL(rollout || current) on it, not an estimate.
    Rows without sampled tokens count nowhere. Log-ratios are clamped to +-20 nats before any exponential.
    Source: verl's rollout correction, whose names are kept.
    """
    ratios = evidence.ratios
    known = ("engine", "staleness", "total") if ratios.split else ("merged", "update", "total")
    packing = ratios.packing
    lengths, rollout_N = packing.lengths, ratios.packed_rollout_logprobs()
    surprise = -packing.row_sums(rollout_N)
    result: summable.Summable = {}
    for name in known:
        if names is None or name in names:
            # Log-ratios are 0 off the mask: their rows may be summed as they are.
            log_ratio = ratios.get(name).detach()
            log_ratio_N = packing.pack(log_ratio)
            moved = log_ratio.sum(dim=1)
            result |= _token_metrics(name, log_ratio_N) | _row_metrics(name, log_ratio, moved, lengths)
            if name in (known[0], "total"):
                result |= _policy_metrics(name, rollout_N, log_ratio_N)
                result |= _perplexities(name, surprise, moved, lengths)
    if evidence.exact_kl is not None and (names is None or "total" in names):
        result |= summable.mean("total/exact_kl", evidence.exact_kl, ratios.mask)
    return result


def _token_metrics(name: str, log_ratio_N: Tensor) -> summable.Summable:
    extremes = _extremes(f"{name}/rollout_is", log_ratio_N)
    far = _is_far(log_ratio_N)
    sums = torch.zeros(6, dtype=torch.float64, device=log_ratio_N.device)
    limit = math.log(HIGH_RATIO)
    for block in torch.split(log_ratio_N, BLOCK):
        x = clamp_log_ratio(block) if far else block
        less = x.expm1()
        sums += torch.stack(
            [
                *(_sum(part) for part in (x, x.abs(), less)),
                _sum(less.mul_(less + 2)),
                *(summable.count(part) for part in (x > limit, x < -limit)),
            ]
        )
    sum_x, sum_abs, sum_expm1, sum_expm1_twice, num_high, num_low = sums.unbind()
    tokens = torch.tensor(float(len(log_ratio_N)), dtype=torch.float64, device=log_ratio_N.device)
    per_token = {
        "kl": -sum_x,
        "k3_kl": (sum_expm1 - sum_x).clamp(min=0.0),
        "abs_log_ratio": sum_abs,
        "chi2_token": sum_expm1_twice,
        "rollout_is_high_fraction": num_high,
        "rollout_is_low_fraction": num_low,
        "rollout_is": sum_expm1 + tokens,
    }
    metrics = {f"{name}/{key}:sum": value for key, value in per_token.items()}
    metrics |= {f"{name}/{key}:count": tokens for key in per_token}
    metrics[f"{name}/rollout_is:square"] = sum_expm1_twice + tokens
    return metrics | extremes


def _row_metrics(name: str, log_ratio: Tensor, moved: Tensor, lengths: Tensor) -> summable.Summable:
    rows, total = lengths > 0, clamp_log_ratio(moved)
    # A second pass over all tokens only where a clamp would change one of them.
    drop = -(clamp_log_ratio(log_ratio).sum(dim=1) if _is_far(log_ratio) else moved) / lengths.clamp(min=1)
    return {
        **summable.mean(f"{name}/chi2_seq", (2 * total).expm1(), rows),
        **summable.mean(f"{name}/log_ppl_diff", drop, rows),
        **summable.mean(f"{name}/log_ppl_abs_diff", drop.abs(), rows),
        **summable.mean(f"{name}/ppl_ratio", drop.exp(), rows),
        **summable.moments(f"{name}/rollout_is_seq", total.exp(), rows),
        **_extremes(f"{name}/rollout_is_seq", total[rows]),
    }


def _extremes(name: str, log_ratios: Tensor) -> summable.Summable:
    """Largest and smallest ratio, from the extremes of its logarithm; infinities of no values at all stay what they are."""
    top, bottom = summable.highest(log_ratios), summable.lowest(log_ratios)
    return {
        f"{name}_max:max": torch.where(top == -math.inf, top, clamp_log_ratio(top).exp()),
        f"{name}_min:min": torch.where(bottom == math.inf, bottom, clamp_log_ratio(bottom).exp()),
    }


def _policy_metrics(name: str, rollout_N: Tensor, log_ratio_N: Tensor) -> summable.Summable:
    sums = torch.zeros(7, dtype=torch.float64, device=rollout_N.device)
    widest = summable.maximum(f"{name}/probs_diff_max", rollout_N[:0])
    for rollout, log_ratio in zip(torch.split(rollout_N, BLOCK), torch.split(log_ratio_N, BLOCK), strict=True):
        p = rollout.exp()
        q = (rollout + log_ratio).exp()
        gap = (p - q).abs_()
        # Variances are differences of sums: products need the full 53 bits.
        p, q = p.double(), q.double()
        sums += torch.stack([p.sum(), q.sum(), p @ p, q @ q, p @ q, _sum(gap), _sum(gap * gap)])
        widest = summable.add([widest, summable.maximum(f"{name}/probs_diff_max", gap)])
    roles = dict(zip(("x", "y", "xx", "yy", "xy"), sums, strict=False))
    tokens = torch.tensor(float(len(rollout_N)), dtype=torch.float64, device=rollout_N.device)
    return {
        **{f"{name}/probs_pearson:{role}": value for role, value in roles.items()},
        f"{name}/probs_pearson:count": tokens,
        f"{name}/probs_diff:sum": sums[5],
        f"{name}/probs_diff:squared": sums[6],
        f"{name}/probs_diff:count": tokens,
        **widest,
    }


def _perplexities(name: str, surprise: Tensor, moved: Tensor, lengths: Tensor) -> summable.Summable:
    rows, count = lengths > 0, lengths.clamp(min=1)
    return {
        **summable.mean(f"{name}/rollout_ppl", (surprise / count).exp(), rows),
        **summable.mean(f"{name}/training_ppl", ((surprise - moved) / count).exp(), rows),
    }


def _is_far(log_ratio: Tensor) -> bool:
    """Whether a clamp would change a value, NaN included."""
    return log_ratio.numel() > 0 and not bool(torch.stack(log_ratio.aminmax()).abs().amax() <= LOG_RATIO_LIMIT)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)
