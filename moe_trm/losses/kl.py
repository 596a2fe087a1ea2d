"""Estimators of KL(pi_theta || pi_ref) from sampled tokens, and what sets their coefficient. Shape letters: B
sequences, T tokens.

x = log pi_theta - log pi_ref on tokens sampled from pi_theta. Which estimator may be differentiated is not obvious: the
gradient of the mean of k1 is zero, that of k3 belongs to KL(pi_ref || pi_theta), that of k2 is right.
Source: KL estimators k1, k2, k3 (J. Schulman, Approximating KL Divergence).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_trm.methods.parameters import unknown
from moe_trm.ratios import LogRatios, clamp_log_ratio

ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
CORRECTED = "k3_is"
"""The name of `importance_corrected_k3` beside the estimators, in `kl.estimator`."""


def kl_estimate(name: str, current_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate of each token's KL, `[B, T]` nats, 0 off-mask, differentiable in `current_logprobs`.

    | name | value | gradient of its mean under on-policy sampling |
    |---|---|---|
    | `k1` | x | 0: for reward shaping, not for a loss |
    | `abs` | abs(x) | biased |
    | `k2` | x^2 / 2 | of KL(pi_theta, pi_ref); the value is biased |
    | `k3` | e^-x - 1 + x | of KL(pi_ref, pi_theta); the value is unbiased and never negative |
    | `k1+`, `k3+` | of k1, k3 | of k2, straight through |

    Raises:
        ConfigError: an unknown estimator.
    """
    x = clamp_log_ratio(_masked_log_ratio(current_logprobs, reference_logprobs, mask))
    k2 = x**2 / 2
    if name in ("k1+", "k3+"):
        value = _value(name[:2], x, k2)
        return k2 - k2.detach() + value.detach()
    if name not in ESTIMATORS:
        raise unknown("KL estimator", name, ESTIMATORS, "kl.estimator")
    return _value(name, x, k2)


def importance_corrected_k3(
    log_ratio: Tensor,
    current_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
) -> Tensor:
    """k3 weighted by the *differentiated* ratio to the policy that sampled: w k3, `[B, T]`.

    With tokens from another policy its mean has the exact gradient of KL(pi_theta || pi_ref); with a detached ratio it
    has not. `log_ratio` `[B, T]` carries the gradient: total, or update if the proximal policy stands for the one that
    sampled, as slime and miles take it (`kl.ratio`).

    With `clip` c it is min(w k3, clip(w, 1 - c, 1 + c) k3) = min(w, 1 + c) k3, because k3 is never negative: over
    several updates of a step a token whose ratio has grown beyond the clip pulls by its k3 alone. The gradient is then
    no longer exact.
    Source of the clip: the decoupled KL loss over epochs needs a ratio of its own, clipped as PPO's.
    """
    k3 = kl_estimate("k3", current_logprobs, reference_logprobs, mask)
    ratio = clamp_log_ratio(torch.where(mask, log_ratio, 0.0)).exp()
    return torch.where(mask, (ratio if clip is None else ratio.clamp(max=1 + clip)) * k3, 0.0)


def rollout_kl(ratios: LogRatios) -> tuple[Tensor, Tensor]:
    """Soft KL to the policy that sampled: each token's k2 = (log w)^2 / 2, `[B, T]` nats, and the tokens it is of.

    A pull towards the rollout on every sampled token, whatever corrections reject, where masks act on outliers alone.
    Its gradient is that of KL(pi_theta || mu) under on-policy sampling, and stays a pull when it is not. Tokens without
    a finite log-ratio are left out. Beyond +-20 nats it no longer pulls. `kl_tau` of prime-rl is half of the
    coefficient here, and its loss, `ipo_tv`, has such a term already.
    Source: prime-rl's squared log-ratio, after Kimi K2.5.

    When: the policy drifts from the engine between pushes, and masking alone lets it.
    """
    total = ratios.total
    mask = ratios.mask & total.detach().isfinite()
    return clamp_log_ratio(torch.where(mask, total, 0.0)) ** 2 / 2, mask


def kl_term(
    name: str,
    ratios: LogRatios,
    current_logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    ratio: str = "total",
    clip: float | None = None,
) -> Tensor:
    """Each token's KL to the reference as a term of the loss, `[B, T]`: an estimator by name, or `k3_is` weighted by
    `ratio`, clipped at `clip`.
    """
    if name == CORRECTED:
        return importance_corrected_k3(ratios.get(ratio), current_logprobs, reference_logprobs, ratios.mask, clip=clip)
    return kl_estimate(name, current_logprobs, reference_logprobs, ratios.mask)


@dataclass(frozen=True)
class AdaptiveKL:
    """Coefficient that steers the measured KL to a target: beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n /
    horizon).

    A fixed coefficient is `horizon = inf`. Values, not state: `next` returns the controller of the next step.
    """

    beta: float
    target: float
    horizon: float

    def next(self, measured_kl: float, num_samples: int) -> AdaptiveKL:
        """The controller after a step of `num_samples` samples with mean KL `measured_kl` per sample."""
        error = min(max(measured_kl / self.target - 1, -0.2), 0.2)
        return replace(self, beta=self.beta * (1 + error * num_samples / self.horizon))


def _masked_log_ratio(current: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    dtype = torch.promote_types(current.dtype, torch.float32)
    return torch.where(mask, current, 0.0).to(dtype) - torch.where(mask, reference.detach(), 0.0).to(dtype)


def _value(name: str, x: Tensor, k2: Tensor) -> Tensor:
    if name == "k1":
        return x
    if name == "abs":
        return x.abs()
    return k2 if name == "k2" else (-x).expm1() + x
