"""The products of several experts in one operation, in plain torch.

Places are ordered by their experts. Each expert has one matrix product forward and two backward, and nothing besides:
no module, no node of the autograd graph and no concatenation of its own. On small models these cost more than what is
computed.

Shape letters: P places, E experts, I inputs and O outputs of an expert's matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_products(
    inputs_PI: Tensor, counts: Sequence[int], weights: Sequence[Tensor], sums: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Each place times the transposed matrix of its expert, `[P, O]`.

    y_p = W_e x_p for the places p of expert e. An expert without places gets a gradient of zeros.

    Args:
        inputs_PI: the places of the first expert, then those of the second, and so on.
        counts: places of each of the E experts, P in all.
        weights: `[O, I]` of each expert, of the dtype of the inputs.
        sums: `[O, I]` to which the gradient of each weight is added, which then has no other; None: it is the weight's.
    """
    sums = [None] * len(weights) if sums is None else list(sums)
    outputs: Tensor = _Products.apply(inputs_PI, list(counts), sums, *weights)  # type: ignore[no-untyped-call]
    return outputs


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs_PI: Tensor, counts: list[int], sums: list[Tensor | None], *weights: Tensor) -> Tensor:
        ctx.counts, ctx.sums = counts, sums
        # Only gradients of matrices need the inputs.
        ctx.save_for_backward(inputs_PI if any(ctx.needs_input_grad[3:]) else None, *weights)
        outputs_PO = inputs_PI.new_empty(len(inputs_PI), len(weights[0]))
        for inputs, weight, outputs in zip(
            torch.split(inputs_PI, counts), weights, torch.split(outputs_PO, counts), strict=True
        ):
            torch.mm(inputs, weight.t(), out=outputs)
        return outputs_PO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_PO: Tensor) -> tuple[Tensor | None, ...]:
        inputs_PI, *weights = ctx.saved_tensors
        wants_inputs, _, _, *wants = ctx.needs_input_grad
        gradients = torch.split(gradient_PO, ctx.counts)
        found: list[Tensor | None] = [None] * len(weights)
        if inputs_PI is not None:
            inputs = torch.split(inputs_PI, ctx.counts)
            for number, (gradient, own, total) in enumerate(zip(gradients, inputs, ctx.sums, strict=True)):
                if wants[number] and total is not None:
                    total.addmm_(gradient.t(), own)
                elif wants[number]:
                    found[number] = gradient.t().mm(own)
        if not wants_inputs:
            return (None, None, None, *found)
        to_inputs_PI = gradient_PO.new_empty(len(gradient_PO), weights[0].shape[1])
        for gradient, weight, part in zip(gradients, weights, torch.split(to_inputs_PI, ctx.counts), strict=True):
            torch.mm(gradient, weight, out=part)
        return (to_inputs_PI, None, None, *found)
