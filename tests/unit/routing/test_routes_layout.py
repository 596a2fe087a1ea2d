"""The layout against hand-worked cuts, its inverse, and the independent arithmetic of the proof."""

from __future__ import annotations

import pytest
import torch

from routing import RouteError
from routing.layout.padded import Layout, padding_multiple
from routing.replay.proof import due_tokens, locate

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2)]


def test_padding_is_for_two_pieces_of_each_context_rank() -> None:
    assert [padding_multiple(cp, sp) for cp, sp in ((1, 1), (1, 2), (2, 1), (2, 2))] == [1, 2, 4, 8]


def ranks(batch: int, length: int, cp: int, sp: int) -> list[Layout]:
    return [Layout(batch, length, cp, c, sp, s) for c in range(cp) for s in range(sp)]


def test_router_order_is_sequence_major() -> None:
    values = torch.tensor([[10, 11, 12], [20, 21, 22]])
    assert Layout(2, 3).to_router(values).tolist() == [10, 20, 11, 21, 12, 22]


def test_context_parallel_zigzag_by_hand() -> None:
    values = torch.arange(8)[None]
    assert Layout(1, 8, 2, 0).cut_tokens(values).tolist() == [[0, 1, 6, 7]]
    assert Layout(1, 8, 2, 1).cut_tokens(values).tolist() == [[2, 3, 4, 5]]


def test_context_then_sequence_parallel_by_hand() -> None:
    values = torch.stack([torch.arange(8), 100 + torch.arange(8)])
    assert Layout(2, 8, 2, 0, 2, 1).to_router(values).tolist() == [6, 106, 7, 107]


@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_ranks_partition_the_micro_batch_and_inverses_restore_it(cp: int, sp: int) -> None:
    length = 3 * padding_multiple(cp, sp)
    values = 1 + torch.arange(2 * length).view(2, length)
    assert sum(layout.from_router(layout.to_router(values)) for layout in ranks(2, length, cp, sp)).equal(values)
    assert sum(layout.uncut_tokens(layout.cut_tokens(values)) for layout in ranks(2, length, cp, 1)).equal(values)


@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_the_proof_arithmetic_agrees_with_the_map(cp: int, sp: int) -> None:
    length = 2 * padding_multiple(cp, sp)
    lengths = [length, length - 3, 0] if length > 3 else [length, 1, 0]
    valid = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    for layout in ranks(3, length, cp, sp):
        sequence, column = locate(layout)
        assert (sequence * length + column).tolist() == layout.router_index().tolist()
        assert due_tokens(lengths, layout).equal(layout.to_router(valid))


def test_a_map_that_inference_asked_for_first_serves_a_backward() -> None:
    layout = Layout(2, 6)
    with torch.inference_mode():
        layout.to_router(torch.arange(12).view(2, 6))
    local = torch.ones(12, dtype=torch.float64, requires_grad=True)
    Layout(2, 6).from_router(local).mul(torch.arange(12).view(2, 6)).sum().backward()
    assert local.grad is not None
    assert local.grad.tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]


def test_uncut_is_differentiable() -> None:
    local = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    Layout(1, 8, 2, 1).uncut_tokens(local).mul(torch.arange(8)).sum().backward()
    assert local.grad is not None
    assert local.grad.tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize(
    "sizes",
    [(0, 4), (2, 0), (2, 6, 2, 0), (2, 8, 2, 2), (2, 8, 1, 0, 3, 0), (2, 8, 1, 0, 2, -1), (1, 4, 2, 0, 4, 0)],
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(RouteError) as error:
        Layout(*sizes)
    assert error.value.reason == "shape"


def test_tensors_that_do_not_fit_are_refused() -> None:
    layout = Layout(2, 4)
    for call in (layout.cut_tokens, layout.to_router, layout.uncut_tokens):
        with pytest.raises(RouteError) as error:
            call(torch.zeros(4, 2))
        assert error.value.reason == "shape"
    with pytest.raises(RouteError):
        layout.from_router(torch.zeros(7, 3))
