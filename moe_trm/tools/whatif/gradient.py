"""Effective weights of tokens in the gradient, under a correction and a loss, relative to the plain policy gradient.

The effective weight of token t is (dL / dlogp_t) / (dL_plain / dlogp_t), where L_plain is the aggregated REINFORCE loss
-A_t logp_t without any correction. 1 trains as if sampled on-policy, 0 does not train, 2 counts twice. It includes
rejection, importance weights and clipping alike. Tokens without advantage have none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_trm.ratios import clamp_log_ratio

EDGES = (-1e-6, 1e-6, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
LABELS = ("below 0", "0", "to 1/4", "to 1/2", "to 0.8", "to 1.25", "to 2", "to 4", "above 4")


@dataclass
class EffectiveWeights:
    """Collects effective weights of many micro-batches, and the ratios that they stand for."""

    parts: list[Tensor] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)

    def add(self, gradient: Tensor, plain: Tensor, log_ratio: Tensor) -> None:
        """Add one micro-batch: dL/dlogp with everything (`gradient`) and without (`plain`), and log w, each `[N]`.

        w is the ratio of the policy in training to the rollout. Tokens whose `plain` is 0 are left out.
        """
        nonzero = plain != 0
        self.parts.append((gradient[nonzero] / plain[nonzero]).double())
        self.ratios.append(clamp_log_ratio(log_ratio.detach()[nonzero].double()).exp())

    def histogram(self) -> dict[str, float]:
        """Share of tokens by effective weight; the shares sum to 1. Empty where no token had an advantage."""
        weights = torch.cat([torch.zeros(0, dtype=torch.float64), *self.parts])
        if not len(weights):
            return {}
        counts = torch.bincount(
            torch.bucketize(weights, torch.tensor(EDGES, dtype=torch.float64)), minlength=len(LABELS)
        )
        return {label: float(n) / len(weights) for label, n in zip(LABELS, counts, strict=True)}

    def summary(self) -> dict[str, float]:
        """`gradient/trained_fraction` (tokens with an advantage whose weight v is not 0), `gradient/weight_mean`, and
        `gradient/eff_sample_size` = (sum v)^2 / (n sum v^2), in (0, 1].

        Bias and variance apart: `gradient/bias_tv` = mean abs(v - w) / 2, the total variation from the policy in
        training that the weights leave (v = 1: all of it; v = w: none), and `gradient/variance_chi2` = mean v^2 /
        (mean v)^2 - 1, what they add to the variance. Source: stochastic gradient ascent view of off-policy correction
        (chrisliu298.ai, Off-policy drift in LLM RL); the figures are ours.
        """
        weights = torch.cat([torch.zeros(0, dtype=torch.float64), *self.parts])
        if not len(weights):
            return {}
        square, mean = float((weights**2).mean()), float(weights.mean())
        return {
            "gradient/trained_fraction": float((weights.abs() > EDGES[1]).double().mean()),
            "gradient/weight_mean": mean,
            "gradient/eff_sample_size": mean**2 / square if square else 0.0,
            "gradient/bias_tv": float((weights - torch.cat(self.ratios)).abs().mean()) / 2,
            "gradient/variance_chi2": square / mean**2 - 1 if mean else float("inf"),
        }
