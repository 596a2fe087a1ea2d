"""Guarantees of trust-region masking: bounds on the error of the surrogate, for rewards in [0, 1], and their estimates.

E = J(pi) - J(mu) - E_mu[R sum_t (w_t - 1)] for answers of T tokens. delta bounds the KL of every context, D_seq is the
KL of a whole answer, Dbar_t the mean total variation at position t. KL is in nats. The theorems hold for the *maximum
over all contexts*. A batch has sampled contexts only, so figures computed from it are estimates of a certificate, not a
certificate. Source: Trust Region Masking (arXiv 2512.23075), checked here by enumeration.

Shape letters: B rows, T tokens, N sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from moe_trm import summable
from moe_trm.corrections.evidence import Evidence
from moe_trm.diagnostics.strata import LENGTH_EDGES
from moe_trm.ratios import clamp_log_ratio

STARTS = (1, *(edge + 1 for edge in LENGTH_EDGES))
"""First positions of the stretches of an answer in which total variation is summed."""


def divergences(evidence: Evidence) -> summable.Summable:
    """Inputs of the bounds, summable, on the total ratio w:

    | name | definition |
    |---|---|
    | `trm/horizon` | T, tokens of the longest row |
    | `trm/max_kl` | delta, the largest KL(mu, pi_theta) of a sampled context, nats |
    | `trm/sequence_kl` | D_seq, mean over rows of the sum of these KL, nats |
    | `trm/tv_from_P` | mean over rows of the sum of abs(w - 1) / 2 over tokens from position P to the next P |

    The KL is exact on the recorded support where the evidence has it. Else it is w - 1 - log w of the sampled token,
    whose maximum is mostly noise. E_mu abs(w - 1) / 2 is the total variation of a context.
    """
    ratios, packing = evidence.ratios, evidence.ratios.packing
    log_ratio_N = clamp_log_ratio(packing.pack(ratios.total.detach())).double()
    less_N = log_ratio_N.expm1()
    sampled = evidence.exact_kl is None
    kl_N = less_N - log_ratio_N if evidence.exact_kl is None else packing.pack(evidence.exact_kl.detach()).double()
    ends = packing.lengths.cumsum(0)
    before = torch.repeat_interleave(ends - packing.lengths, packing.lengths)
    position_N = torch.arange(1, len(kl_N) + 1, device=kl_N.device) - before
    starts = torch.tensor(STARTS, device=kl_N.device)
    stretch_N = torch.bucketize(position_N, starts, right=True) - 1
    tv = kl_N.new_zeros(len(STARTS)).index_add_(0, stretch_N, less_N.abs() / 2)
    num_rows = summable.count(packing.lengths > 0)
    means = {"trm/sequence_kl": kl_N.clamp(min=0.0).sum() if sampled else kl_N.sum()}
    means |= {f"trm/tv_from_{start}": value for start, value in zip(STARTS, tv, strict=True)}
    return {
        **summable.maximum("trm/horizon", packing.lengths),
        **summable.maximum("trm/max_kl", kl_N),
        **{f"{name}:sum": value for name, value in means.items()},
        **{f"{name}:count": num_rows for name in means},
    }


def certificate_estimate(metrics: Mapping[str, float]) -> dict[str, float]:
    """Estimated error bounds of the surrogate: `trm/bound_{classical,linear,pinsker_marginal,mixed,adaptive,tightest}`.

    Computed from the finished metrics of `divergences`; empty where there are none. The unit is a reward between 0 and
    1: a bound of 1 or more says nothing. Total variation is counted at the start of its stretch, where it weighs most.
    Source: Trust Region Masking (arXiv 2512.23075).
    """
    if "trm/horizon" not in metrics:
        return {}
    horizon = max(1, int(metrics["trm/horizon"]))
    delta, sequence_kl = (max(0.0, metrics[f"trm/{name}"]) for name in ("max_kl", "sequence_kl"))
    mean_tv = [0.0] * horizon
    for start in STARTS:
        if start <= horizon:
            mean_tv[start - 1] = metrics[f"trm/tv_from_{start}"]
    bounds = certificate(horizon, delta, sequence_kl, mean_tv)
    return {f"trm/bound_{name}": value for name, value in bounds.items()}


def classical(horizon: int, delta: float) -> float:
    """T (T - 1) delta: the usual quadratic bound, without caps."""
    return horizon * (horizon - 1) * delta


def linear(horizon: int, delta: float) -> float:
    """4 T min(1, sqrt(delta / 2))."""
    return 4 * horizon * _tv(delta)


def pinsker_marginal(horizon: int, delta: float) -> float:
    """4 min(1, sqrt(delta / 2)) sum_t min(1, sqrt((t - 1) delta / 2)); about (4/3) T^1.5 delta while T delta <= 2."""
    return 4 * _tv(delta) * math.fsum(_tv(t * delta) for t in range(horizon))


def mixed(horizon: int, delta: float, sequence_kl: float) -> float:
    """4 T min(1, sqrt(D_seq / 2)) min(1, sqrt(delta / 2)); about 2 T sqrt(delta D_seq) when both are small."""
    return 4 * horizon * _tv(sequence_kl) * _tv(delta)


def adaptive(mean_tv: Sequence[float], delta: float) -> float:
    """4 sum_t Dbar_t min(1, sqrt((T - t) delta / 2)): late deviations cost little. `mean_tv` is Dbar_1..Dbar_T."""
    horizon = len(mean_tv)
    return 4 * math.fsum(tv * _tv((horizon - t) * delta) for t, tv in enumerate(mean_tv, start=1))


def certificate(horizon: int, delta: float, sequence_kl: float, mean_tv: Sequence[float]) -> dict[str, float]:
    """All five bounds, and `tightest`: the least of the last three. A surrogate above it proves an improvement."""
    bounds = {
        "classical": classical(horizon, delta),
        "linear": linear(horizon, delta),
        "pinsker_marginal": pinsker_marginal(horizon, delta),
        "mixed": mixed(horizon, delta, sequence_kl),
        "adaptive": adaptive(mean_tv, delta),
    }
    return bounds | {"tightest": min(bounds["pinsker_marginal"], bounds["mixed"], bounds["adaptive"])}


def acceptance_probability(horizon: int, violation_probability: float) -> float:
    """(1 - p)^T: the probability that no token of an answer violates a per-token threshold.

    Thresholds that are neutral per token therefore still reject long answers.
    """
    return (1 - violation_probability) ** horizon


def _tv(kl: float) -> float:
    """Pinsker: total variation is at most min(1, sqrt(KL / 2))."""
    return min(1.0, math.sqrt(kl / 2))
