"""Rotary embedding of a pack against the formula of Megatron, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_trm.learner.megatron.rotation import Rotation

T, N, D = 9, 3, 8


POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2])


def angles() -> Tensor:
    """`[S, 1, D]`, whose halves are the same, as Megatron makes them."""
    half = torch.arange(4)[:, None] * 0.3 ** torch.arange(D // 2)
    return torch.cat([half, half], -1)[:, None]


def by_formula(values: Tensor, angles_T1D: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    cosines, sines = angles_T1D.cos().to(values.dtype), angles_T1D.sin().to(values.dtype)
    return values * cosines + torch.cat([-second, first], -1) * sines


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotates_as_megatron_does(dtype: torch.dtype) -> None:
    ours, theirs = (torch.randn(T, N, D, dtype=dtype, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    ours.requires_grad_()
    theirs.requires_grad_()
    got, expected = Rotation.by(angles(), POSITIONS, dtype).apply(ours), by_formula(theirs, angles()[POSITIONS])
    torch.testing.assert_close(got, expected)
    weights = torch.randn(T, N, D, dtype=dtype, generator=torch.Generator().manual_seed(1))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_first_token_of_every_sequence_is_not_turned() -> None:
    values = torch.randn(T, N, D, generator=torch.Generator().manual_seed(2))
    rotated = Rotation.by(angles(), POSITIONS, torch.float32).apply(values)
    same = (rotated == values).all(-1).all(-1)
    assert same.tolist() == [True, False, False, False, True, False, True, False, False]
