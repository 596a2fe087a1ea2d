"""Rows that count as right are those of the reward's own scale."""

from __future__ import annotations

import pytest
import torch

from moe_trm.diagnostics.strata import _right


@pytest.mark.parametrize(
    ("rewards", "right"),
    [
        ([0.0, 1.0, 1.0], [False, True, True]),
        ([1.0, 1.0], [True, True]),
        ([0.0, 0.0], [False, False]),
        ([-1.0, 1.0], [False, True]),
        ([0.2, 1.2, 0.2], [False, True, False]),
        ([], []),
    ],
)
def test_right_rows(rewards: list[float], right: list[bool]) -> None:
    values = torch.tensor(rewards)
    assert _right(values, torch.ones_like(values).bool()).tolist() == right


def test_rows_without_tokens_do_not_set_the_scale() -> None:
    rewards, counted = torch.tensor([0.2, 1.2, 9.0]), torch.tensor([True, True, False])
    assert _right(rewards, counted).tolist()[:2] == [False, True]
