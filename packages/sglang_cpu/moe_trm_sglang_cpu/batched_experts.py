"""Experts of a small batch in two batched products, for SGLang's torch-native mixture of experts.

SGLang's own loops over the experts in Python, which costs more than the products when an expert has a few tokens.
Imported by SGLang's scheduler only.

Shape letters: N tokens, K experts per token, E experts, C places per expert, D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MOST_PADDING = 8
"""Places per token and expert up to which the batched products are faster than the loop."""
MOST_MARKS = 1 << 14
"""Pairs of a choice and an expert up to which counting with a table is faster than sorting."""


def places(ids_NK: Tensor, num_experts: int) -> tuple[Tensor, int]:
    """The place of each token at each of its experts, `[N * K]`, and C. Expert e has the places from e * C on.

    The tokens of an expert keep their order.
    """
    ids = ids_NK.reshape(-1).to(torch.int64)
    if len(ids) * num_experts <= MOST_MARKS:
        counted = (ids[:, None] == _numbers(num_experts)).cumsum(0)
        capacity = int(counted[-1].max())
        return counted.gather(1, ids[:, None]).squeeze(1).add_(ids, alpha=capacity).sub_(1), capacity
    sorted_ids, order = ids.sort(stable=True)
    counts_E = torch.bincount(ids, minlength=num_experts)
    capacity = int(counts_E.max())
    firsts_E = counts_E.cumsum(0) - counts_E
    found = torch.empty_like(ids)
    found[order] = sorted_ids * capacity + torch.arange(len(ids)) - firsts_E[sorted_ids]
    return found, capacity


@lru_cache(maxsize=8)
def _numbers(count: int) -> Tensor:
    return torch.arange(count)


@lru_cache(maxsize=128)
def _owners(num_tokens: int, top_k: int) -> Tensor:
    """The token of each choice, `[N * K]`."""
    return torch.arange(num_tokens).repeat_interleave(top_k)


def batched(x_ND: Tensor, weights_NK: Tensor, w13_EFD: Tensor, w2_EDF: Tensor, found: Tensor, capacity: int) -> Tensor:
    """sum_k w_k * W2 (silu(W1 x) * W3 x) over the experts of each token, `[N, D]`, in the precision of SGLang's loop.

    Args:
        x_ND: tokens.
        weights_NK: gate weights.
        w13_EFD: W1 above W3, `[E, 2 F, D]`.
        w2_EDF: W2, `[E, D, F]`.
        found: of `places`.
        capacity: of `places`.
    """
    num_experts = len(w13_EFD)
    # What is computed at a place that nobody has is the first token's, and is not read.
    tokens = torch.zeros(num_experts * capacity, dtype=torch.int64).scatter_(0, found, _owners(*weights_NK.shape))
    chosen = x_ND.index_select(0, tokens).view(num_experts, capacity, -1)
    gate, up = torch.bmm(chosen, w13_EFD.transpose(1, 2)).chunk(2, -1)
    out = torch.bmm(functional.silu(gate).mul_(up), w2_EDF.transpose(1, 2)).flatten(0, 1)
    out_NKD = out.index_select(0, found).view(*weights_NK.shape, -1).to(weights_NK.dtype)
    return out_NKD.mul_(weights_NK.unsqueeze(-1)).sum(1).to(x_ND.dtype)


def wrap(loop: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SGLang's `moe_forward_native`, which is `loop`, with plain SwiGLU experts of small batches batched."""

    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
        weights, ids, _ = topk_output
        plain = (
            moe_runner_config.activation == "silu"
            and moe_runner_config.gemm1_alpha is None
            and not moe_runner_config.apply_router_weight_on_input
            and getattr(layer, "w13_weight_bias", None) is None
            and getattr(layer, "w2_weight_bias", None) is None
        )
        if plain and ids.numel():
            found, capacity = places(ids, layer.num_experts)
            if capacity * layer.num_experts <= MOST_PADDING * ids.numel():
                return batched(x, weights, layer.w13_weight, layer.w2_weight, found, capacity)
        return loop(layer, x, topk_output, moe_runner_config)

    return moe_forward_native
