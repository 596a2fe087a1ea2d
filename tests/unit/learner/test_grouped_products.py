"""The products of several experts against one linear layer for each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trm.learner.grouped_products import grouped_products

INPUTS, OUTPUTS = 5, 3


def tensors(counts: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(counts), INPUTS, generator=generator, requires_grad=True)
    weights = [torch.randn(OUTPUTS, INPUTS, generator=generator, requires_grad=True) for _ in counts]
    return inputs, weights


def one_by_one(inputs: Tensor, counts: tuple[int, ...], weights: list[Tensor]) -> Tensor:
    return torch.cat([F.linear(part, weight) for part, weight in zip(inputs.split(counts), weights, strict=True)])


@pytest.mark.parametrize("counts", [(4, 1, 7), (0, 3, 0), (6,), (0, 0)], ids=str)
def test_products_and_gradients_are_those_of_single_layers(counts: tuple[int, ...]) -> None:
    ours, theirs = tensors(counts), tensors(counts)
    got, expected = grouped_products(ours[0], counts, ours[1]), one_by_one(theirs[0], counts, theirs[1])
    torch.testing.assert_close(got, expected)
    pull = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * pull).sum().backward()
    (expected * pull).sum().backward()
    for one, other in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_an_expert_without_places_gets_zeros() -> None:
    inputs, weights = tensors((0, 2))
    grouped_products(inputs, (0, 2), weights).sum().backward()
    assert weights[0].grad is not None
    assert not weights[0].grad.any()


@pytest.mark.parametrize("frozen", ["inputs", "a weight", "all weights"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    inputs, weights = tensors((2, 3))
    still = {"inputs": [inputs], "a weight": weights[:1], "all weights": weights}[frozen]
    for each in still:
        each.requires_grad_(False)
    grouped_products(inputs, (2, 3), weights).sum().backward()
    for each in (inputs, *weights):
        assert (each.grad is None) == any(each is one for one in still)


def test_bfloat16_rounds_once() -> None:
    inputs, weights = tensors((3, 2))
    narrow = [weight.detach().bfloat16() for weight in weights]
    got = grouped_products(inputs.detach().bfloat16(), (3, 2), narrow)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, one_by_one(inputs.detach().bfloat16(), (3, 2), narrow))


def test_gradients_are_added_to_sums_where_there_are_any() -> None:
    """One weight has a sum, one has none, one is frozen; two passes add up."""
    counts, (inputs, weights), (others, plain) = (2, 3, 1), tensors((2, 3, 1)), tensors((2, 3, 1))
    weights[2].requires_grad_(False)
    sums = [torch.ones(OUTPUTS, INPUTS), None, torch.ones(OUTPUTS, INPUTS)]
    for _ in range(2):
        grouped_products(inputs, counts, weights, sums).square().sum().backward()
        grouped_products(others, counts, plain).square().sum().backward()
    assert sums[0] is not None
    assert plain[0].grad is not None
    torch.testing.assert_close(sums[0], plain[0].grad + 1)
    torch.testing.assert_close(weights[1].grad, plain[1].grad)
    torch.testing.assert_close(sums[2], torch.ones(OUTPUTS, INPUTS))
    assert (weights[0].grad, weights[2].grad) == (None, None)
    torch.testing.assert_close(inputs.grad, others.grad)


@pytest.mark.parametrize("trained", [0, 1])
def test_inputs_are_kept_only_where_a_matrix_trains(trained: int) -> None:
    """As torch's own product does; adapters of attention leave all experts frozen."""
    inputs, weights = tensors((2, 3))
    for weight in weights[trained:]:
        weight.requires_grad_(False)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = grouped_products(inputs, (2, 3), weights)
    assert (inputs.data_ptr() in kept) == bool(trained)
    out.sum().backward()
    expected = torch.cat([weight.sum(0).expand(count, INPUTS) for weight, count in zip(weights, (2, 3), strict=True)])
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, expected)
