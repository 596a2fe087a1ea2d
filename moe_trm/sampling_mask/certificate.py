"""Bounds of the KL and the total variation of two policies when only the likeliest ids of one were recorded.

Shape letters: N tokens, M recorded ids in all, V vocabulary. A recorded support is compressed sparse rows, as in
`sampling_mask.logprobs`. Source: ours, for the exact divergence of Trust Region Masking (arXiv 2512.23075).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """`low <= value <= high` for each token, both `[N]`."""

    low: Tensor
    high: Tensor

    def accept(self, threshold: float, *, undecided: bool = False) -> Tensor:
        """`[N]` bool: True where surely at most `threshold`, False where surely above it, `undecided` in between."""
        return (self.high <= threshold) | ((self.low <= threshold) & undecided)

    def undecided(self, threshold: float) -> Tensor:
        """`[N]` bool: tokens whose interval contains `threshold`, to be counted."""
        return (self.low <= threshold) & (self.high > threshold)


@torch.no_grad()
def kl_bounds(mu_logprobs: Tensor, offsets: Tensor, ids: Tensor, pi_logprobs_NV: Tensor) -> Bounds:
    """Bounds of KL(mu || pi) in nats, from `[M]` full-vocabulary log-probs of mu's most likely ids and all of pi.

    head = sum_{v in K} mu_v (log mu_v - log pi_v), rest = 1 - sum_K mu.
    low  = head + rest log(rest / (1 - sum_K pi))                    merging the tail into one id loses information
    high = head + the most the tail can add when no tail id exceeds m = min_K mu: mass m on each of pi's least likely
           floor(rest / m) tail ids and the remainder on the next.
    With the whole vocabulary recorded both are the KL itself. Ids must be the top ones, or `high` is not a bound.
    """
    rows = [_kl_row(*row) for row in _rows(mu_logprobs, offsets, ids, pi_logprobs_NV)]
    return _stack(rows, mu_logprobs.device)


@torch.no_grad()
def tv_bounds(mu_logprobs: Tensor, offsets: Tensor, ids: Tensor, pi_logprobs_NV: Tensor) -> Bounds:
    """Bounds of the total variation.

    (sum_K |mu - pi| + |rest - p_rest|) / 2 and (sum_K |mu - pi| + rest + p_rest) / 2.
    """
    rows = []
    for mu, kept, pi in _rows(mu_logprobs, offsets, ids, pi_logprobs_NV):
        gap = (mu.exp() - pi[kept].exp()).abs().sum()
        rest, pi_rest = _rest(mu), _rest(pi[kept])
        rows.append((float(gap + abs(rest - pi_rest)) / 2, float(gap + rest + pi_rest) / 2))
    return _stack(rows, mu_logprobs.device)


def _rows(mu: Tensor, offsets: Tensor, ids: Tensor, pi_NV: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    bounds = offsets.tolist()
    return [
        (mu[first:last].double(), ids[first:last], pi.double())
        for first, last, pi in zip(bounds[:-1], bounds[1:], pi_NV, strict=True)
    ]


def _kl_row(mu: Tensor, kept: Tensor, pi: Tensor) -> tuple[float, float]:
    head = float((mu.exp() * (mu - pi[kept])).sum())
    rest = _rest(mu)
    if rest < 1e-12:
        return head, head
    low = head + rest * (math.log(rest) - math.log(max(_rest(pi[kept]), 1e-300)))
    in_tail = torch.ones_like(pi, dtype=torch.bool)
    in_tail[kept] = False
    tail = pi[in_tail].sort().values
    largest = float(mu.min().exp())
    full = min(int(rest / largest), len(tail))
    remainder = rest - full * largest
    high = head + float((largest * (math.log(largest) - tail[:full])).sum())
    if remainder > 1e-12 and full < len(tail):
        high += remainder * (math.log(remainder) - float(tail[full]))
    return low, max(high, low)


def _rest(logprobs: Tensor) -> float:
    return max(0.0, 1.0 - float(logprobs.exp().sum()))


def _stack(rows: list[tuple[float, float]], device: torch.device) -> Bounds:
    low, high = torch.tensor(rows, dtype=torch.float64, device=device).reshape(-1, 2).unbind(dim=1)
    return Bounds(low, high)
