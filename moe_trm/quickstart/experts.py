"""Experts for the warm-up: transformers' `grouped_mm`, with gradients that are copies of rows, as the forward pass is.

torch adds the gradient of `rows[index]` element by element into zeros, since an index may come twice. Here each pair of
token and expert has a place of its own, so rows can be copied back. Values and gradients keep their bits, for up to two
experts a token: a sum of two has no order.
Shape letters: N tokens, K experts of a token, P = N * K pairs of token and expert, E experts, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "moe_trm_copied_rows"


def _to_pairs(rows_NH: Tensor, pair_of_place_P: Tensor, num_copies: int) -> Tensor:
    """`[P, H]`: at each place, in the order of experts, the row of its pair's token."""
    return rows_NH.index_select(0, pair_of_place_P // num_copies)


def _to_tokens(rows_PH: Tensor, place_of_pair_P: Tensor, num_copies: int) -> Tensor:
    """`[N, H]`: for each token the sum over its pairs."""
    return rows_PH.index_select(0, place_of_pair_P).view(-1, num_copies, rows_PH.shape[1]).sum(1)


class ToPairs(torch.autograd.Function):
    """`_to_pairs`; its gradient is `_to_tokens`."""

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, pair_of_place_P: Tensor, place_of_pair_P: Tensor, num_copies: int) -> Tensor:
        ctx.save_for_backward(place_of_pair_P)
        ctx.num_copies = num_copies
        return _to_pairs(rows_NH, pair_of_place_P, num_copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        [place_of_pair_P] = ctx.saved_tensors
        return _to_tokens(grads[0], place_of_pair_P, ctx.num_copies), None, None, None


class ToTokens(torch.autograd.Function):
    """`_to_tokens`; its gradient is `_to_pairs`."""

    @staticmethod
    def forward(ctx: Any, rows_PH: Tensor, pair_of_place_P: Tensor, place_of_pair_P: Tensor, num_copies: int) -> Tensor:
        ctx.save_for_backward(pair_of_place_P)
        ctx.num_copies = num_copies
        return _to_tokens(rows_PH, place_of_pair_P, num_copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        [pair_of_place_P] = ctx.saved_tensors
        return _to_pairs(grads[0], pair_of_place_P, ctx.num_copies), None, None, None


def experts_forward(module: Any, hidden_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The experts' output, `[N, H]`.

    Args:
        module: transformers' experts, with `gate_up_proj`, `down_proj` and the gate's function.
        hidden_NH: input.
        chosen_NK: expert of each pair.
        weights_NK: weight of each pair.
    """
    num_copies = chosen_NK.shape[1]
    expert_of_place_P, pair_of_place_P = torch.sort(chosen_NK.flatten())
    place_of_pair_P = torch.empty_like(pair_of_place_P)
    place_of_pair_P[pair_of_place_P] = torch.arange(len(pair_of_place_P))
    ends_E = torch.bincount(expert_of_place_P, minlength=module.num_experts).cumsum(0, dtype=torch.int32)
    order = pair_of_place_P, place_of_pair_P
    rows_PH: Tensor = ToPairs.apply(hidden_NH, *order, num_copies)  # type: ignore[no-untyped-call]
    inner = module._apply_gate(grouped_mm(rows_PH, module.gate_up_proj.transpose(1, 2), offs=ends_E))
    outer_PH = grouped_mm(inner, module.down_proj.transpose(1, 2), offs=ends_E)
    weights_P1: Tensor = ToPairs.apply(weights_NK.reshape(-1, 1), *order, 1)  # type: ignore[no-untyped-call]
    out_NH: Tensor = ToTokens.apply(outer_PH * weights_P1, *order, num_copies)  # type: ignore[no-untyped-call]
    return out_NH


def use_copied_rows(model: nn.Module) -> None:
    """Let a model of transformers compute its experts like this, by transformers' own registry."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    model.set_experts_implementation(NAME)  # type: ignore[operator]
