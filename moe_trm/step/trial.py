"""Corrections and losses of the user's own on made-up rows, before a run starts: what would train nothing is refused.

The rows have every kind of token that a run has: stale ones, dropped ones, a row of one token, and places where nothing
was sampled.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.rule import BoundRule
from moe_trm.errors import ConfigError
from moe_trm.losses.inputs import LossInputs
from moe_trm.losses.loss import BoundLoss
from moe_trm.ratios import LogRatios

_ROWS, _TOKENS = 6, 8


def try_rule(bound: BoundRule) -> None:
    """Refuse a correction whose weights are no finite numbers from 0 up.

    Raises:
        ConfigError: such weights, or a function that fails.
    """
    ratios, _, advantages = _rows()
    extras = _extras(ratios.mask)
    evidence = Evidence(
        ratios,
        advantages=advantages,
        exact_kl=extras["entropy"] / 100,
        turn_ids=extras["turns"].int(),
        rewards=advantages[:, 0],
        group_ids=torch.arange(_ROWS) // 2,
    )
    where = f"correction {bound.rule.name}"
    try:
        weights = bound(evidence).weights[ratios.mask]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "the correction fails on made-up rows",
            where=where,
            got=f"{type(error).__name__}: {error}",
            expected="a Correction of every row",
        ) from error
    if not weights.isfinite().all() or (weights < 0).any():
        raise ConfigError(
            "the correction's weights would train nothing, or against the advantage",
            where=where,
            got=f"weights from {weights.min():.3g} to {weights.max():.3g} on made-up rows",
            expected="finite weights from 0 up, on every sampled token",
            fix="look for a logarithm or a division of 0, and for an exponential without a bound",
        )


def try_loss(bound: BoundLoss) -> None:
    """Refuse a loss without a gradient, or one that is no finite number.

    Raises:
        ConfigError: such a loss, or a function that fails.
    """
    ratios, current, advantages = _rows()
    extras = _extras(ratios.mask)
    keep = ratios.mask.clone()
    keep[3, 2:4] = False
    inputs = replace(
        LossInputs.uncorrected(ratios, current, advantages),
        keep=keep,
        draw=(1, 1),
        turn_ids=extras["turns"].long(),
        rewards=advantages[:, 0],
        group_ids=torch.arange(_ROWS) // 2,
        entropy=extras["entropy"],
        router_shift=torch.ones(_ROWS, _TOKENS),
        reference_logprobs=current.detach() - 0.05,
    )
    where = f"loss {bound.loss.name}"
    try:
        values = bound(inputs).values[keep]
        gradient: Tensor | None = None
        if values.requires_grad:
            gradient = torch.autograd.grad(values.sum(), current, allow_unused=True)[0]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "the loss fails on made-up rows",
            where=where,
            got=f"{type(error).__name__}: {error}",
            expected="a TokenLoss of every token",
        ) from error
    if gradient is None or not gradient.any():
        raise ConfigError(
            "the loss has no gradient, so nothing would be trained",
            where=where,
            got="values that do not depend on the policy in training",
            expected="a gradient to the log-ratio, or to inputs.current_logprobs",
            fix="do not detach what the policy is trained by",
        )
    if not values.isfinite().all() or not gradient.isfinite().all():
        raise ConfigError(
            "the loss is no finite number, or its gradient is none",
            where=where,
            got=f"{int((~values.isfinite()).sum())} of {values.numel()} made-up tokens without a finite loss, and "
            f"{int((~gradient.isfinite()).sum())} places without a finite gradient",
            expected="finite values on every token that is kept",
            fix="look for a logarithm or a division of 0, and for an exponential without a bound",
        )


def _rows() -> tuple[LogRatios, Tensor, Tensor]:
    """Ratios `[B, T]`, the policy's log-probs `[B, T]` with gradient, and advantages `[B, T]`, one for each row."""
    draw = torch.Generator().manual_seed(0)
    shape = (_ROWS, _TOKENS)
    current = (-torch.rand(shape, generator=draw) - 0.1).requires_grad_()
    proximal = current.detach() + 0.02 * torch.randn(shape, generator=draw)
    behavior = proximal.clone()
    behavior[2] += 0.3 * torch.randn(_TOKENS, generator=draw)
    rollout = behavior + 0.02 * torch.randn(shape, generator=draw)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, 2:] = False
    rollout, behavior = rollout.masked_fill(~mask, float("nan")), behavior.masked_fill(~mask, float("nan"))
    advantages = torch.randn(_ROWS, 1, generator=draw).expand(shape).contiguous()
    return LogRatios(rollout, behavior, current, mask, proximal), current, advantages


def _extras(mask: Tensor) -> dict[str, Tensor]:
    """Fields that some methods read: turns of two halves, and entropies."""
    turns = (torch.arange(mask.shape[1]) >= mask.shape[1] // 2).expand(mask.shape)
    return {"turns": turns, "entropy": torch.full(mask.shape, 0.7)}
