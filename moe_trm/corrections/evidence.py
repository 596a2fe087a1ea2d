"""Evidence that a correction reads, and its decision. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trm.methods.row_fields import RowFields
from moe_trm.ratios import LogRatios


@dataclass(frozen=True)
class Evidence(RowFields):
    """Everything a rule may look at; `[B, T]` values are read only where `ratios.mask` is True.

    Attributes:
        ratios: the decomposed log-ratios; rules detach what they read.
        advantages: advantage of each token.
    """

    ratios: LogRatios
    advantages: Tensor

    @property
    def mask(self) -> Tensor:
        return self.ratios.mask


@dataclass(frozen=True)
class Correction:
    """A rule's decision.

    Attributes:
        weights: `[B, T]` float32, detached, 0 off-mask: multiplies the policy term of the loss.
        keep: `[B, T]` bool: False removes the token from the gradient. Denominators never change.
        metrics: scalars (0-d tensors, not synchronised with the host).
        score: `[B]` or `[B, T]` statistic that the rule thresholds from above, or None.
        statistics: what calibration takes quantiles of where that is not the score: `[B]`, `[B, T]`, or `[B, D]` for a
            rule on rows with D thresholds.
        judged: rows or tokens, shaped as `score`, that the threshold can reject; None: all.
    """

    weights: Tensor
    keep: Tensor
    metrics: Mapping[str, Tensor]
    score: Tensor | None = None
    judged: Tensor | None = None
    statistics: Tensor | None = None


@dataclass(frozen=True)
class RowDecision:
    """A decision that treats all tokens of a row alike: a `Correction` before it is spread over the tokens.

    Attributes:
        keep: `[B]` bool, rows that stay.
        weights: `[B]` detached weight of each row; None: 1.
        metrics, score, judged, statistics: as in `Correction`.
    """

    keep: Tensor
    weights: Tensor | None
    metrics: Mapping[str, Tensor]
    score: Tensor | None = None
    judged: Tensor | None = None
    statistics: Tensor | None = None

    def spread(self, mask: Tensor, dtype: torch.dtype) -> Correction:
        """The same over the tokens of `mask` `[B, T]`."""
        keep = mask & self.keep[:, None]
        ones = torch.ones((), dtype=dtype, device=mask.device)
        weights = torch.where(keep, ones if self.weights is None else self.weights[:, None], 0.0)
        return Correction(weights, keep, self.metrics, self.score, self.judged, self.statistics)
