"""Inputs of an objective, and its answer. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Correction
from moe_trm.errors import ConfigError
from moe_trm.methods.row_fields import RowFields
from moe_trm.ratios import LogRatios


@dataclass(frozen=True)
class LossInputs(RowFields):
    """One micro-batch as an objective sees it. `[B, T]` values are read only where `keep` is True, or `counted` for
    statistics of rows.

    Attributes:
        ratios: log-ratios; `update`, `staleness` and `total` carry the gradient.
        current_logprobs: `[B, T]` log-probs of the policy in training, with gradient.
        advantages: `[B, T]` advantage of each token.
        weights: `[B, T]` correction weights, detached: they multiply the policy term.
        keep: `[B, T]` bool, tokens that train.
        draw: the run's seed and the version of the weights, for objectives that choose at random.
    """

    ratios: LogRatios
    current_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    keep: Tensor
    draw: tuple[int, int] = (0, 0)

    @classmethod
    def corrected(
        cls, ratios: LogRatios, current_logprobs: Tensor, advantages: Tensor, correction: Correction
    ) -> LossInputs:
        """Inputs under a correction's weights and keep mask."""
        return cls(ratios, current_logprobs, advantages, correction.weights, correction.keep)

    @classmethod
    def uncorrected(cls, ratios: LogRatios, current_logprobs: Tensor, advantages: Tensor) -> LossInputs:
        """Inputs with weight 1 on every sampled token."""
        weights = torch.where(ratios.mask, torch.ones_like(ratios.update.detach()), 0.0)
        return cls(ratios, current_logprobs, advantages, weights, ratios.mask)

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, every sampled token, kept or not."""
        return self.ratios.mask

    @cached_property
    def counted(self) -> Tensor:
        """`[B, T]` bool, the tokens that statistics of rows are over: every sampled one, kept or not.

        A token that was dropped because it has no finite log-prob cannot count; one that is kept always does.
        """
        return self.keep | (self.mask & self.ratios.total.detach().isfinite())

    def log_ratio(self, name: str, *, by_row: bool) -> Tensor:
        """The ratio `name`, `[B, T]`, with gradient on tokens that train.

        `by_row`: with its values, without gradient, on the others that are `counted`, for statistics of rows; else 0.
        """
        values = self.ratios.get(name)
        statistics = torch.where(self.counted, values.detach(), 0.0) if by_row else torch.zeros_like(values)
        return torch.where(self.keep, values, statistics)

    def kept(self) -> LossInputs:
        """The same inputs with harmless zeros on tokens that do not count: neither values nor gradients can leak from
        there.
        """
        advantages = torch.where(self.counted, self.advantages.detach(), 0.0)
        current = torch.where(self.keep, self.current_logprobs, 0.0)
        return replace(self, advantages=advantages, current_logprobs=current.to(self.ratios.update.dtype))


def grouped(inputs: LossInputs, name: str) -> Tensor:
    """The prompt of each row, `[B]`, for the loss `name`. Raises `ConfigError` where it is unknown."""
    if inputs.group_ids is None:
        raise ConfigError(
            f"{name} compares the samples of a prompt",
            where=f"loss {name}",
            got="no group ids",
            expected="group_ids of shape [B]",
        )
    return inputs.group_ids


@dataclass(frozen=True)
class TokenLoss:
    """Answer of an objective on a micro-batch.

    Attributes:
        values: `[B, T]` loss of each token, to be minimised, already multiplied by the correction weights; read where
            `keep` is True.
        metrics: summable metrics (see `moe_trm.methods.summable`).
    """

    values: Tensor
    metrics: Mapping[str, Tensor]
