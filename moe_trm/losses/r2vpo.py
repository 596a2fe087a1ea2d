"""R2VPO: the variance of the ratio bounded by a penalty, or by a clip range that follows it. Shape letter: B rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_sum
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss, grouped
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.methods.parameters import Parameter
from moe_trm.ratios import clamp_log_ratio


def next_penalty(parameters: Mapping[str, Parameter], measured: Mapping[str, float]) -> Mapping[str, Parameter]:
    """Dual step at the end of a training step: max(0, penalty + rate (variance - target)).

    The variance is `loss/ratio_variance`, the mean over the kept tokens of all its updates and ranks. Nothing changes
    without a target, or where no token was kept.
    """
    target, rate, penalty = (parameters[name] for name in ("target", "rate", "penalty"))
    if target is None or "loss/ratio_variance" not in measured:
        return {}
    variance = measured["loss/ratio_variance"]
    return {"penalty": max(0.0, float(penalty or 0.0) + float(rate or 0.0) * (variance - float(target)))}


@loss(aggregation="token-mean", experimental=True, adapt=next_penalty)
def r2vpo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    penalty: float = 0.5,
    target: float | None = None,
    rate: float | None = None,
) -> TokenLoss:
    """R2VPO: X = -W A r + penalty (r - 1)^2.

    With `target` and `rate` the penalty is the dual variable of mean (r - 1)^2 <= target: after each training step
    penalty <- max(0, penalty + rate (variance - target)), from the variance over all its updates. `loss/penalty` is
    what the step used; checkpoints keep it. A step of one update at its own weights has r = 1, and lets it fall.

    Target, rate and start are not established, and how often the dual step is taken. `r2vpo_clip` is another reading.
    Source: R2VPO (arXiv 2601.03320).

    When: a soft bound on ratios is wanted in place of a clip, with several updates in a step. Research.
    """
    require(penalty >= 0, "r2vpo", ">= 0", penalty=penalty)
    require((target is None) == (rate is None), "r2vpo", "target and rate, or neither", target=target, rate=rate)
    require((target is None or target > 0) and (rate is None or rate > 0), "r2vpo", "> 0", target=target, rate=rate)
    ratio = clamp_log_ratio(log_ratio).exp()
    deviation = (ratio - 1) ** 2
    values = -inputs.weights * inputs.advantages * ratio + penalty * deviation
    return TokenLoss(values, summable.mean("ratio_variance", deviation, inputs.keep))


@loss(aggregation="token-mean", scope="batch", needs=("groups",), experimental=True)
def r2vpo_clip(
    inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, variance: float = 0.01
) -> TokenLoss:
    """PPO's clip with a range for each prompt: eps_q = eps variance / (variance + Var_q(r)), for `clip_low` and
    `clip_high` alike.

    Var_q is the variance of the ratio over all sampled tokens of the prompt's samples, detached: where ratios are
    dispersed the range is tight, where they are not it is nearly eps. At `variance` it is half. The range is a reading
    of a description in words; its form and `variance` are not established. Metrics: `pg_clipfrac`, and
    `clip_range_share`, the mean over tokens of eps_q / eps.
    Source: R2VPO (arXiv 2601.03320), after its description as an adaptive clip.

    When: prompts differ much in how far the policy has moved on them. Research.

    Raises:
        ConfigError: a range or variance that cannot work, or rows without the ids of their prompts.
    """
    require(
        clip_low >= 0 and clip_high >= 0 and variance > 0,
        "r2vpo_clip",
        "clip range >= 0, variance > 0",
        clip_low=clip_low,
        clip_high=clip_high,
        variance=variance,
    )
    advantages, keep = inputs.advantages, inputs.keep
    ratio = clamp_log_ratio(log_ratio).exp()
    spread = group_variance(ratio.detach(), inputs.counted, grouped(inputs, "r2vpo_clip"))
    share = over_tokens((variance / (variance + spread)).to(ratio.dtype), keep)
    bounded = torch.minimum(torch.maximum(ratio, 1 - clip_low * share), 1 + clip_high * share)
    free, clipped = -advantages * ratio, -advantages * bounded
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep) | summable.mean("clip_range_share", share, keep)
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)


def group_variance(values: Tensor, counted: Tensor, group_ids: Tensor) -> Tensor:
    """Variance of `values` over the `counted` tokens of each row's prompt, `[B]` float64; 0 without tokens."""
    if not len(values):
        return values.new_zeros(0, dtype=torch.float64)
    same = (group_ids[:, None] == group_ids[None, :]).double()
    count = (same @ counted.sum(dim=1).double()).clamp(min=1)

    def mean(of: Tensor) -> Tensor:
        return same @ row_sum(of, counted) / count

    centered = values.double() - over_tokens(mean(values.double()), values)
    return mean(centered**2)
