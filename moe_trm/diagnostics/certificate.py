"""The bounds of trust-region masking, estimated from the samples of a step.

Shape letters: B rows, T tokens, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moe_trm.corrections.evidence import Evidence
from moe_trm.diagnostics.bounds import certificate
from moe_trm.diagnostics.strata import LENGTH_EDGES
from moe_trm.methods import summable
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
    start_N = torch.repeat_interleave(ends - packing.lengths, packing.lengths)
    position_N = torch.arange(1, len(kl_N) + 1, device=kl_N.device) - start_N
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
