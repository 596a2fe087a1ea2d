"""Mismatch of two policies on the sampled tokens, ratio by ratio.

Shape letters: B sequences, T tokens, N sampled tokens, packed: padding is dropped before any computation on single
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trm import summable
from moe_trm.corrections.evidence import Evidence
from moe_trm.packing import Packing
from moe_trm.ratios import LOG_RATIO_LIMIT, clamp_log_ratio

HIGH_RATIO = 2.0
PARTS = ("lag", "update")
"""Parts of staleness: where it is known, they are measured by tokens alone."""
PROBABILITY_TOP, CHI2_TOP = 0, 20
"""Powers of two that end the histograms: differences of probabilities are at most 1."""
BLOCK = 1 << 15
"""Tokens worked on together: what they need stays in a core's cache."""


def metrics(evidence: Evidence, names: Sequence[str] | None = None) -> summable.Summable:
    """Mismatch metrics of each part of the log-ratio, summable; `finalize` turns them into numbers.

    Prefixes: `engine/`, `lag/`, `update/`, `staleness/`, `total/`; `merged/`, `update/`, `total/` when the weights that
    sampled are gone; `total/` alone when the learner made no pass of its own at the step's start. What is not known has
    no number. `names` asks for fewer. x is a log-ratio between a later and an earlier policy. Means are over sampled
    tokens, or over rows that have any:

    | name | definition |
    |---|---|
    | `kl` | mean(-x): unbiased under the earlier policy, noisy, may be negative |
    | `k3_kl` | mean(e^x - 1 - x): unbiased too, never negative |
    | `abs_log_ratio` | mean abs(x) |
    | `chi2_token`, `chi2_seq` | mean(e^{2x}) - 1 of tokens; of row sums |
    | `log_ppl_diff`, `log_ppl_abs_diff`, `ppl_ratio` | mean over rows of d, abs(d), e^d with d = mean_t(-x) |
    | `log_ppl_diff_{max,min}` | the largest and the smallest d |
    | `rollout_is_{mean,std,eff_sample_size,max,min}` | of e^x over tokens |
    | `rollout_is_seq_{mean,std,eff_sample_size,max,min}` | of e^{sum x} over rows |
    | `rollout_is_high_fraction`, `rollout_is_low_fraction` | share of tokens with e^x above 2, below 1/2 |

    The parts of staleness, `lag/` and `update/` beside it, have those of single tokens alone. `engine/` (or `merged/`)
    and `total/` also have, each of the rollout's log-probs against the other policy's:

    | name | definition |
    |---|---|
    | `rollout_ppl`, `training_ppl` | mean over rows of e^s, with s = mean_t(-log p) |
    | `rollout_log_ppl`, `training_log_ppl` | mean over rows of s |
    | `probs_pearson` | correlation of p and q |
    | `probs_diff_{mean,std,max}` | of abs(p - q): the field's proxy of total variation |
    | `probs_diff_p95` | its 95th percentile over tokens |
    | `chi2_token_p95` | 95th percentile over rows of mean_t(e^{2x}) - 1 |

    Percentiles are of histograms (`moe_trm.summable`). When the rollout's distribution on its kept support is recorded,
    `total/exact_kl` is the exact mean KL(rollout || current) on it. Rows without sampled tokens are not counted.
    Log-ratios are clamped to +-20 nats before any exponential.
    Source: verl's rollout correction, whose names are kept.
    """
    ratios = evidence.ratios
    known, parts = ratios.known, PARTS if ratios.split else ()
    packing = ratios.packing
    lengths, rollout_N = packing.lengths, ratios.packed_rollout_logprobs()
    surprise = -packing.row_sums(rollout_N)
    result: summable.Summable = {}
    for name in known:
        if names is None or name in names:
            # Log-ratios are 0 off the mask: their rows may be summed as they are.
            log_ratio = ratios.get(name).detach()
            log_ratio_N = packing.pack(log_ratio)
            moved, span = log_ratio.sum(dim=1), Span.of(log_ratio_N)
            compared = name in (known[0], "total")
            result |= _token_metrics(name, log_ratio_N, span, packing if compared else None)
            if name not in parts:
                result |= _row_metrics(name, log_ratio, moved, lengths, span)
            if compared:
                result |= _policy_metrics(name, rollout_N, log_ratio_N)
                result |= _perplexities(name, surprise, moved, lengths)
    if evidence.exact_kl is not None and (names is None or "total" in names):
        result |= summable.mean("total/exact_kl", evidence.exact_kl, ratios.mask)
    return result


@dataclass(frozen=True)
class Span:
    """Smallest and largest of some log-ratios, 0-d float64."""

    bottom: Tensor
    top: Tensor

    @classmethod
    def of(cls, log_ratios: Tensor) -> Span:
        return cls(summable.lowest(log_ratios), summable.highest(log_ratios))

    def beyond(self, limit: float) -> bool:
        """True when one is farther than `limit` from 0, NaN included."""
        return not bool(torch.maximum(self.top, -self.bottom) <= limit)

    def ratios(self, name: str) -> summable.Summable:
        """`NAME_max` and `NAME_min` of the ratios; infinities of no values at all stay what they are."""
        return {
            f"{name}_max:max": torch.where(self.top == -math.inf, self.top, clamp_log_ratio(self.top).exp()),
            f"{name}_min:min": torch.where(self.bottom == math.inf, self.bottom, clamp_log_ratio(self.bottom).exp()),
        }


def _token_metrics(name: str, log_ratio_N: Tensor, span: Span, packing: Packing | None) -> summable.Summable:
    """Figures of single tokens; with `packing` those of a row's excess of squares too."""
    limit = math.log(HIGH_RATIO)
    far, wide = span.beyond(LOG_RATIO_LIMIT), span.beyond(limit)
    sums = torch.zeros(4, dtype=torch.float64, device=log_ratio_N.device)
    num_high, num_low = sums.new_zeros(()), sums.new_zeros(())
    excess_N = torch.empty_like(log_ratio_N)
    for block, excess in zip(torch.split(log_ratio_N, BLOCK), torch.split(excess_N, BLOCK), strict=True):
        x = clamp_log_ratio(block) if far else block
        less = x.expm1()
        torch.mul(less, less + 2, out=excess)  # e^{2x} - 1
        sums += torch.stack([_sum(x), _sum(x.abs()), _sum(less), _sum(excess)])
        if wide:
            num_high, num_low = num_high + summable.count(x > limit), num_low + summable.count(x < -limit)
    sum_x, sum_abs, sum_expm1, sum_expm1_twice = sums.unbind()
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
    if packing is not None:
        of_rows = packing.row_sums(excess_N)[packing.lengths > 0] / packing.lengths[packing.lengths > 0]
        metrics |= summable.histogram(f"{name}/chi2_token", summable.bins(of_rows, CHI2_TOP))
    return metrics | span.ratios(f"{name}/rollout_is")


def _row_metrics(name: str, log_ratio: Tensor, moved: Tensor, lengths: Tensor, span: Span) -> summable.Summable:
    rows, total = lengths > 0, clamp_log_ratio(moved)
    # A second pass over all tokens only where a clamp would change one of them.
    far = span.beyond(LOG_RATIO_LIMIT)
    drop = -(clamp_log_ratio(log_ratio).sum(dim=1) if far else moved) / lengths.clamp(min=1)
    return {
        **summable.mean(f"{name}/chi2_seq", (2 * total).expm1(), rows),
        **summable.mean(f"{name}/log_ppl_diff", drop, rows),
        f"{name}/log_ppl_diff_max:max": summable.highest(drop[rows]),
        f"{name}/log_ppl_diff_min:min": summable.lowest(drop[rows]),
        **summable.mean(f"{name}/log_ppl_abs_diff", drop.abs(), rows),
        **summable.mean(f"{name}/ppl_ratio", drop.exp(), rows),
        **summable.moments(f"{name}/rollout_is_seq", total.exp(), rows),
        **Span.of(total[rows]).ratios(f"{name}/rollout_is_seq"),
    }


def _policy_metrics(name: str, rollout_N: Tensor, log_ratio_N: Tensor) -> summable.Summable:
    sums = torch.zeros(7, dtype=torch.float64, device=rollout_N.device)
    widest = summable.maximum(f"{name}/probs_diff_max", rollout_N[:0])
    counts = summable.bins(rollout_N[:0], PROBABILITY_TOP)
    for rollout, log_ratio in zip(torch.split(rollout_N, BLOCK), torch.split(log_ratio_N, BLOCK), strict=True):
        p = rollout.exp()
        q = (rollout + log_ratio).exp()
        gap = (p - q).abs_()
        widest = summable.add([widest, summable.maximum(f"{name}/probs_diff_max", gap)])
        counts += summable.bins(gap, PROBABILITY_TOP)
        # Variances are differences of sums: products need the full 53 bits.
        p, q, gap = p.double(), q.double(), gap.double()
        sums += torch.stack([p.sum(), q.sum(), p @ p, q @ q, p @ q, gap.sum(), gap @ gap])
    roles = dict(zip(("x", "y", "xx", "yy", "xy"), sums, strict=False))
    tokens = torch.tensor(float(len(rollout_N)), dtype=torch.float64, device=rollout_N.device)
    return {
        **{f"{name}/probs_pearson:{role}": value for role, value in roles.items()},
        f"{name}/probs_pearson:count": tokens,
        f"{name}/probs_diff:sum": sums[5],
        f"{name}/probs_diff:squared": sums[6],
        f"{name}/probs_diff:count": tokens,
        **widest,
        **summable.histogram(f"{name}/probs_diff", counts),
    }


def _perplexities(name: str, surprise: Tensor, moved: Tensor, lengths: Tensor) -> summable.Summable:
    rows, count = lengths > 0, lengths.clamp(min=1)
    return {
        **summable.mean(f"{name}/rollout_log_ppl", surprise / count, rows),
        **summable.mean(f"{name}/training_log_ppl", (surprise - moved) / count, rows),
        **summable.mean(f"{name}/rollout_ppl", (surprise / count).exp(), rows),
        **summable.mean(f"{name}/training_ppl", ((surprise - moved) / count).exp(), rows),
    }


def _sum(values: Tensor) -> Tensor:
    return values.double().sum()  # twice as fast as a sum that converts as it goes
