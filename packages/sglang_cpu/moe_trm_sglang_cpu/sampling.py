"""Sampling from the most probable tokens, in a third of the time.

SGLang sorts probabilities with their places and draws a number for each of them. Here both are sorted as one integer,
and a request draws one number. What is kept, in which order, is the same bit for bit. The drawn tokens follow the same
distribution, not the same random numbers.

Shape letters: B requests, V vocabulary, in the order of the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def wrap(native: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `top_k_top_p_min_p_sampling_from_probs_torch`, which is `native`, without seeds of requests."""

    def sample(
        probs_BV: Tensor,
        top_ks_B: Tensor,
        top_ps_B: Tensor,
        min_ps_B: Tensor,
        need_min_p: bool,
        seeds_B: Tensor | None,
        positions_B: Tensor,
        *,
        return_filtered_probs: bool = False,
        max_top_k: int | None = None,
    ) -> Any:
        common = (probs_BV, top_ks_B, top_ps_B, min_ps_B, need_min_p, seeds_B, positions_B)
        options = {"return_filtered_probs": return_filtered_probs, "max_top_k": max_top_k}
        # Where no mask is recorded, SGLang sorts the largest `max_top_k` alone: of a large vocabulary that is faster.
        whole = return_filtered_probs or max_top_k is None or max_top_k >= probs_BV.shape[1]
        plain = seeds_B is None and whole and not need_min_p and probs_BV.dtype == torch.float32
        if not plain or probs_BV.device.type != "cpu" or sys.byteorder != "little":
            return native(*common, **options)
        weights_BV, ids_BV = in_order(probs_BV)
        sums_BV = weights_BV.cumsum(-1)
        dropped_BV = (sums_BV - weights_BV) > top_ps_B.view(-1, 1)
        dropped_BV |= torch.arange(weights_BV.shape[1]) >= top_ks_B.view(-1, 1)
        weights_BV.masked_fill_(dropped_BV, 0.0)
        places_B1 = drawn(weights_BV)
        if places_B1 is None:
            return native(*common, **options)
        tokens_B = ids_BV.gather(1, places_B1).view(-1)
        if not return_filtered_probs:
            return tokens_B
        return tokens_B, weights_BV, ids_BV, weights_BV.gather(1, places_B1).view(-1)

    return sample


def in_order(probs_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, the largest first, and their tokens as int32; of equal ones the first token comes first.

    The bits of floats that are not negative have the order of the floats.
    """
    keys = np.invert(probs_BV.numpy().view(np.int32)).astype(np.int64)
    keys <<= 32
    keys |= np.arange(keys.shape[1])
    keys.sort(-1)
    halves = keys.view(np.int32).reshape(*keys.shape, 2)
    probs = np.invert(halves[..., 1]).view(np.float32)
    return torch.from_numpy(probs), torch.from_numpy(np.ascontiguousarray(halves[..., 0]))


def drawn(weights_BV: Tensor) -> Tensor | None:
    """A place for each request, `[B, 1]`, in proportion to the weights; None if some weights have no positive sum.

    The first place whose sum of weights is above a part of the whole sum. That is below it, so the place has a weight.
    """
    sums_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    whole_B1 = sums_BV[:, -1:]
    if not bool((whole_B1 > 0).all()):
        return None
    parts_B1 = torch.rand(whole_B1.shape, dtype=torch.float64).mul_(whole_B1)
    return torch.searchsorted(sums_BV, parts_B1, right=True)
