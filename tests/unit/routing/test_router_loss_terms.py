"""Losses of routers: worked numbers, a plain loop, the libraries' own functions, and the gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from routing.replay.router_losses import RouterLosses, RouterTerms

ROWS = torch.tensor([0, 0, 0, -1, 1, 1, -1, 1, 1])
LENGTHS = torch.tensor([3, 4])
NUM_EXPERTS, TOP_K = 5, 2


ONES = RouterTerms(1.0, 1.0)


def losses(terms: RouterTerms = ONES, **options: Any) -> RouterLosses:
    return RouterLosses(terms, ROWS, LENGTHS, torch.device("cpu"), **options)


def drawn(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(ROWS), NUM_EXPERTS, generator=generator, dtype=torch.float64).requires_grad_()


def by_loop(logits: Tensor, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Balance and z, row by row and expert by expert."""
    balance = z = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS.tolist()):
        tokens = [logits[n] for n in range(len(ROWS)) if ROWS[n] == row]
        scores = [t.sigmoid() / t.sigmoid().sum() if sigmoid else t.softmax(0) for t in tokens]
        for expert in range(NUM_EXPERTS):
            chosen = sum(expert in s.topk(TOP_K).indices.tolist() for s in scores)
            mean = sum((s[expert] for s in scores), torch.zeros(())) / length
            balance = balance + NUM_EXPERTS * chosen / (length * TOP_K) * mean
        z = z + sum((t.exp().sum().log() ** 2 for t in tokens), torch.zeros(())) / length
    return balance, z


def test_worked_numbers() -> None:
    """Two tokens, two experts, one choice: f = (1, 0), P = ((3/4 + 2/3) / 2, ...), so E sum f P = 2 * 17/24."""
    logits = torch.tensor([[math.log(3.0), 0.0], [math.log(2.0), 0.0]], dtype=torch.float64)
    both = RouterLosses(RouterTerms(), torch.tensor([0, 0]), torch.tensor([2]), torch.device("cpu"))
    both.attach(0, torch.ones(2, 1), logits, 1, sigmoid=False)
    expected = [17 / 12, (math.log(4.0) ** 2 + math.log(3.0) ** 2) / 2]
    assert both.sums.tolist() == pytest.approx(expected, rel=1e-12)


def test_an_even_load_has_a_balance_of_one_in_each_row_and_layer() -> None:
    logits = torch.eye(NUM_EXPERTS, dtype=torch.float64) * 3
    even = RouterLosses(RouterTerms(), torch.zeros(5, dtype=torch.int64), torch.tensor([5]), torch.device("cpu"))
    for layer in range(3):
        even.attach(layer, torch.ones(5, 1), logits, 1, sigmoid=layer == 1)
    assert float(even.sums[0]) == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_value_and_gradient_are_those_of_a_plain_loop(sigmoid: bool) -> None:
    logits, weights = drawn(), torch.ones(len(ROWS), TOP_K, dtype=torch.float64, requires_grad=True)
    ours = losses(RouterTerms(0.3, 0.07), scale=8.0)
    attached = ours.attach(0, weights, logits, TOP_K, sigmoid=sigmoid)
    assert torch.equal(attached, weights)
    (attached * 5).sum().backward()
    assert weights.grad is not None
    assert weights.grad.eq(5).all()

    plain = drawn()
    balance, z = by_loop(plain, sigmoid=sigmoid)
    (8.0 * (0.3 * balance + 0.07 * z)).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-12, atol=1e-14)
    assert not logits.grad[ROWS < 0].any()
    assert ours.sums.tolist() == pytest.approx([float(balance.detach()), float(z.detach())], rel=1e-12)


def test_gradients_of_the_loss_are_those_of_finite_differences() -> None:
    """At fixed choices, which small steps do not change."""

    def value(logits: Tensor) -> Tensor:
        balance, z = by_loop(logits, sigmoid=False)
        return 0.3 * balance + 0.07 * z

    start = drawn()
    assert torch.autograd.gradcheck(value, (start,))


def test_the_balance_of_one_row_is_that_of_transformers_by_the_number_of_choices() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = drawn(3).detach()
    one = RouterLosses(RouterTerms(), torch.zeros(9, dtype=torch.int64), torch.tensor([9]), torch.device("cpu"))
    one.attach(0, torch.ones(9, 1), logits, TOP_K, sigmoid=False)
    by_hf = load_balancing_loss_func((logits,), NUM_EXPERTS, TOP_K)
    # transformers adds up over the K choices what Megatron-Core averages.
    assert float(one.sums[0]) == pytest.approx(float(by_hf) / TOP_K, rel=1e-6)


def test_ranks_with_parts_of_the_rows_add_up_to_the_whole() -> None:
    whole_logits, parts = drawn(5), [ROWS.clone(), ROWS.clone()]
    parts[0][5:], parts[1][:5] = -1, -1
    counts: list[Tensor] = []

    def keep(part: Tensor) -> Tensor:
        counts.append(part)
        return part

    for rows in parts:
        first = RouterLosses(RouterTerms(), rows, LENGTHS, torch.device("cpu"), over_ranks=keep)
        first.attach(0, torch.ones(1), whole_logits.detach(), TOP_K, sigmoid=False)
    summed, gradient = counts[0] + counts[1], torch.zeros_like(whole_logits)
    sums = torch.zeros(2, dtype=torch.float64)
    for rows in parts:
        logits = whole_logits.detach().clone().requires_grad_()
        part = RouterLosses(RouterTerms(0.3, 0.1), rows, LENGTHS, torch.device("cpu"), over_ranks=lambda _: summed)
        part.attach(0, torch.ones(1), logits, TOP_K, sigmoid=False).sum().backward()
        assert logits.grad is not None
        gradient += logits.grad
        sums += part.sums
    alone = losses(RouterTerms(0.3, 0.1))
    alone.attach(0, torch.ones(1), whole_logits, TOP_K, sigmoid=False).sum().backward()
    torch.testing.assert_close(gradient, whole_logits.grad)
    torch.testing.assert_close(sums, alone.sums)


def test_recomputation_counts_nothing_twice_and_asks_no_other_rank() -> None:
    asked: list[Tensor] = []

    def ask(counts: Tensor) -> Tensor:
        asked.append(counts)
        return counts

    ours = losses(over_ranks=ask)
    logits = drawn()
    with torch.no_grad():
        ours.attach(0, torch.ones(1), logits, TOP_K, sigmoid=False)
    before = ours.sums.clone()
    ours.attach(0, torch.ones(1), logits, TOP_K, sigmoid=False).sum().backward()
    assert torch.equal(ours.sums, before)
    assert len(asked) == 1
    assert logits.grad is not None


def test_padding_that_is_not_a_number_does_not_spread() -> None:
    logits = drawn().detach().clone()
    logits[ROWS < 0] = math.nan
    logits.requires_grad_()
    ours = losses()
    ours.attach(0, torch.ones(1), logits, TOP_K, sigmoid=False).sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert bool(ours.sums.isfinite().all())
