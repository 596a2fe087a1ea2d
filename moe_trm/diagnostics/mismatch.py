"""Mismatch of two policies on the sampled tokens, ratio by ratio.

Shape letters: B sequences, T tokens, N sampled tokens, packed: padding is dropped before any computation on single
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Evidence
from moe_trm.methods import summable
from moe_trm.methods.packing import Packing
from moe_trm.ratios import clamp_log_ratio

HIGH_RATIO = 2.0
PARTS = ("lag", "update")
"""Parts of staleness: where it is known, they are measured by tokens alone."""
ODDS = 6.0
"""Log-odds beyond which a probability is too near 0 or 1 to compare temperatures by."""
PROBABILITY_TOP, CHI2_TOP = 0, 20
"""Powers of two that end the histograms: differences of probabilities are at most 1."""


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
    | `tv` | mean abs(e^x - 1) / 2: the total variation, which bounds the bias of token ratios |
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
    | `log_odds` | correlation of their log-odds within +-6 |
    | `log_odds_slope`, `log_odds_slope_error` | slope of q's by p's, and the standard error of its logarithm |
    | `chi2_token_p95` | 95th percentile over rows of mean_t(e^{2x}) - 1 |

    Percentiles are of histograms (`moe_trm.methods.summable`). When the rollout's distribution on its kept support is
    recorded,
    `total/exact_kl` is the exact mean KL(rollout || current) on it. Rows without sampled tokens are not counted.
    Log-ratios are clamped to +-20 nats before any exponential.
    Source: verl's rollout correction, whose names are kept.
    """
    ratios = evidence.ratios
    all_names, parts = ratios.known, PARTS if ratios.split else ()
    selected = [name for name in all_names if names is None or name in names]
    ratio_names = [name for name in selected if name not in parts]
    compared = [name for name in ratio_names if name in (all_names[0], "total")]
    packing, rollout_N = ratios.packing, ratios.packed_rollout_logprobs().double()
    sums: summable.Summable = {}
    for name in selected:
        log_ratio_N = packing.pack(ratios.get(name).detach()).double()
        figures = _of_tokens(log_ratio_N)
        if name in ratio_names:
            figures |= _of_rows(log_ratio_N, packing)
        if name in compared:
            figures |= _of_policies(rollout_N, log_ratio_N, packing)
        sums |= {f"{name}/{key}": value for key, value in figures.items()}
    if evidence.exact_kl is not None and (names is None or "total" in names):
        sums |= summable.mean("total/exact_kl", evidence.exact_kl, ratios.mask)
    return sums


def _of_tokens(log_ratio_N: Tensor) -> summable.Summable:
    """Figures of single tokens."""
    x, limit = clamp_log_ratio(log_ratio_N), math.log(HIGH_RATIO)
    less = x.expm1()
    means = {
        "kl": -x,
        "k3_kl": less - x,
        "abs_log_ratio": x.abs(),
        "tv": less.abs() / 2,
        "chi2_token": less * (less + 2),
        "rollout_is_high_fraction": x > limit,
        "rollout_is_low_fraction": x < -limit,
    }
    return _means(means) | _weights("rollout_is", x)


def _of_rows(log_ratio_N: Tensor, packing: Packing) -> summable.Summable:
    """Figures of rows with sampled tokens, b of them."""
    length_b = packing.lengths[packing.some]
    total_b = clamp_log_ratio(packing.row_sums(log_ratio_N)[packing.some])
    drop_b = -packing.row_sums(clamp_log_ratio(log_ratio_N))[packing.some] / length_b
    means = {
        "chi2_seq": (2 * total_b).expm1(),
        "log_ppl_diff": drop_b,
        "log_ppl_abs_diff": drop_b.abs(),
        "ppl_ratio": drop_b.exp(),
    }
    extremes = {
        "log_ppl_diff_max:max": summable.highest(drop_b),
        "log_ppl_diff_min:min": summable.lowest(drop_b),
    }
    return _means(means) | extremes | _weights("rollout_is_seq", total_b)


def _of_policies(rollout_N: Tensor, log_ratio_N: Tensor, packing: Packing) -> summable.Summable:
    """The policy that sampled, with probabilities p, beside the other one, q: perplexities, and how far p is from q."""
    length_b = packing.lengths[packing.some]

    def of_rows(values_N: Tensor) -> Tensor:
        return packing.row_sums(values_N)[packing.some] / length_b

    rollout_b, training_b = of_rows(-rollout_N), of_rows(-rollout_N - log_ratio_N)
    excess_b = of_rows((2 * clamp_log_ratio(log_ratio_N)).expm1())
    p, q = rollout_N.exp(), (rollout_N + log_ratio_N).exp()
    gap = (p - q).abs()
    means = {
        "rollout_log_ppl": rollout_b,
        "training_log_ppl": training_b,
        "rollout_ppl": rollout_b.exp(),
        "training_ppl": training_b.exp(),
        "probs_diff": gap,
    }
    known = (p.logit().abs() < ODDS) & (q.logit().abs() < ODDS)
    correlated = {"probs_pearson": _correlated(p, q), "log_odds": _correlated(p[known].logit(), q[known].logit())}
    correlated["log_odds"]["slope"] = p.new_zeros(())
    return {
        **_means(means),
        **{f"{name}:{role}": value for name, roles in correlated.items() for role, value in roles.items()},
        "probs_diff:squared": gap @ gap,
        "probs_diff_max:max": summable.highest(gap),
        **summable.histogram("probs_diff", summable.bins(gap, PROBABILITY_TOP)),
        **summable.histogram("chi2_token", summable.bins(excess_b, CHI2_TOP)),
    }


def _correlated(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The roles of a correlation."""
    return {"x": x.sum(), "xx": x @ x, "y": y.sum(), "yy": y @ y, "xy": y @ x, "count": x.new_tensor(len(x))}


def _means(values: Mapping[str, Tensor]) -> summable.Summable:
    """The mean of each."""
    sums: summable.Summable = {}
    for name, tensor in values.items():
        sums[f"{name}:sum"] = tensor.sum(dtype=torch.float64)
        sums[f"{name}:count"] = torch.tensor(float(len(tensor)), dtype=torch.float64, device=tensor.device)
    return sums


def _weights(name: str, log_weights: Tensor) -> summable.Summable:
    """Moments and extremes of e^x."""
    weights = log_weights.exp()
    return {
        **_means({name: weights}),
        f"{name}:square": weights @ weights,
        f"{name}_max:max": summable.highest(weights),
        f"{name}_min:min": summable.lowest(weights),
    }
