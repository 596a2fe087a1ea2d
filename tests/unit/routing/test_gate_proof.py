"""Counts of gates between reports, of a replayer that is asked again and again."""

from __future__ import annotations

import torch

from routing.replay.gate_proof import GateProof

CPU = torch.device("cpu")


def answer(gates: GateProof, layer: int, *, gradient: float) -> None:
    """A backward through the gate weights of `layer`, in which its router gets `gradient`."""
    weights = torch.ones(2, requires_grad=True) * 2
    gates.asks(layer, weights)
    weights.sum().backward()
    gates.answered(layer, torch.tensor([gradient]))


def test_what_is_told_after_a_report_of_nothing_is_in_the_next_one() -> None:
    gates = GateProof([0, 1], 2, CPU)
    assert gates.take().tolist() == [[0, 0], [0, 0]]
    gates.compare(1, torch.ones(3, 2), torch.tensor([[1.0, 1], [2, 1], [3, 1]]), torch.tensor([True, True, False]))
    assert gates.take().tolist() == [[0, 0], [1, 0]]
    assert gates.take().tolist() == [[0, 0], [0, 0]]
    answer(gates, 0, gradient=0.0)
    assert gates.take().tolist() == [[0, 1], [0, 0]]
    assert gates.take().tolist() == [[0, 0], [0, 0]]
    assert gates.watches(0)
    answer(gates, 0, gradient=1.0)
    assert gates.take().tolist() == [[0, 0], [0, 0]]
    assert not gates.watches(0)
    gates.asks(1, torch.ones(2))  # nothing below can get a gradient
    assert gates.take().tolist() == [[0, 0], [0, 1]]


def test_right_weights_at_other_experts_are_wrong() -> None:
    gates = GateProof([0], 1, CPU)
    formula = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]])
    gates.compare(0, formula[:, [0, 2, 1]], formula, torch.tensor([True, True]))
    assert gates.take().tolist() == [[2, 0]]
    gates.compare(0, formula * 1.001, formula, torch.tensor([True, True]))
    assert gates.take().tolist() == [[0, 0]], "rounding"
