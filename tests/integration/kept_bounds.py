"""Ids that any engine keeps of a distribution, and ids that some engine may, when two add in another order."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_bounds(logprobs_V: Tensor, top_p: float, *, mass: float, each: float) -> tuple[set[int], set[int]]:
    """Ids that are surely kept, and ids that are possibly kept.

    An id is kept when the mass of the more probable ids is at most `top_p`. That mass is uncertain by `mass`. Ids whose
    log-probs differ by less than `each` may stand in either order.
    """
    probs_V, gaps_VV = logprobs_V.exp(), logprobs_V[None, :] - logprobs_V[:, None]
    above, close = gaps_VV > 0, gaps_VV.abs() < each
    close.fill_diagonal_(False)
    least, most = ((probs_V[None, :] * chosen).sum(1) for chosen in (above & ~close, above | close))
    return _ids(most <= top_p - mass), _ids(least <= top_p + mass)


def _ids(chosen_V: Tensor) -> set[int]:
    return set(torch.nonzero(chosen_V)[:, 0].tolist())
