"""Consecutive gradients of an optimizer: the cosine between them, and a bound on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Inner = Callable[[Sequence[Tensor], Sequence[Tensor]], float]
"""Inner product of two gradients of the whole model, of which this rank passes its parts. Collective."""


class GradientAlignment:
    """Gradient alignment control (GAC): keeps small what repeats the gradient before.

    c = <g, p> / (|g| |p|), g this update's gradient and p the previous one's, both before clipping. Where
    c > limit, g <- g - (1 - limit / c) <g, p> / |p|^2 p. The part of g along p is then limit / c of what it was, and
    what is orthogonal to p stays. The cosine becomes limit / sqrt(1 - c^2 + limit^2): near the limit where c is small,
    and far above it where c is near 1 (at a limit of 0.1, 0.9 becomes 0.224 and 0.999 becomes 0.913). p is always a
    gradient as it came, never a corrected one. A limit of 1 measures alone.

    In synchronous training consecutive gradients are nearly orthogonal. Stale samples make them point the same way
    again and again, which ratios do not show. The paper's thresholds are not known to us, so there is one limit, in (0,
    1], and no update is skipped. Costs a copy of the gradient (`previous`, flat, kept in checkpoints) and three inner
    products for each update; of this rank's share, where the optimizer is sharded. Source: GAC (arXiv 2603.01501).
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._square: float | None = None
        self.previous: Tensor | None = None

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor], inner: Inner) -> float | None:
        """Correct `gradients` in place, and remember them as they came. Collective.

        Returns the cosine before the correction; None for the first gradient, and where a norm is 0 or not finite. Such
        a gradient is not remembered.
        """
        square = inner(gradients, gradients)
        if self.previous is None:
            if math.isfinite(square) and square:
                self.previous, self._square = torch.cat([gradient.flatten() for gradient in gradients]), square
            return None
        sizes = [gradient.numel() for gradient in gradients]
        previous_parts = [
            flat.view_as(tensor) for flat, tensor in zip(torch.split(self.previous, sizes), gradients, strict=True)
        ]
        if self._square is None:
            self._square = inner(previous_parts, previous_parts)
        if not math.isfinite(square) or square == 0:
            return None
        product = inner(gradients, previous_parts)
        cosine = product / math.sqrt(square * self._square)
        share = (1 - self._limit / cosine) * product / self._square if cosine > self._limit else 0.0
        for gradient, previous in zip(gradients, previous_parts, strict=True):
            came = gradient.clone()
            if share:
                gradient.sub_(previous, alpha=share)
            previous.copy_(came)
        self._square = square
        return cosine

    def restore(self, previous: Tensor) -> None:
        """Go on after a gradient, as `previous` had it."""
        self.previous, self._square = previous, None


def alignment_of(limit: float | None) -> GradientAlignment | None:
    """The control with this limit; None where none is asked for."""
    return None if limit is None else GradientAlignment(limit)
