"""Rotary embedding of a pack, whose every column has an angle of its own: sines once a pack, three operations a layer.

Megatron takes sines and cosines of its angles in every layer, for queries and keys, and makes nine operations of the
rotation. Rows share the angles of their columns; the sequences of a pack do not, so this costs a pack more.

Shape letters: T columns of a pack, S positions, N heads, D head dimension, H = D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Rotation:
    """Rotation of the columns of a pack.

    Attributes:
        cosines, sines: `[T, 1, D]` and `[T, 1, H]`.
    """

    cosines: Tensor
    sines: Tensor

    @classmethod
    def by(cls, angles_S1D: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """By the angles of all positions, of which the second half repeats the first, and each column's position."""
        half = angles_S1D.shape[-1] // 2
        cosines, sines = angles_S1D.cos().to(dtype), angles_S1D[..., :half].sin().to(dtype)
        return cls(cosines.index_select(0, positions_T), sines.index_select(0, positions_T))

    def apply(self, values_TND: Tensor) -> Tensor:
        """x_1 cos - x_2 sin and x_2 cos + x_1 sin, for the halves x_1 and x_2 of every head."""
        found: Tensor = _Rotated.apply(values_TND, self.cosines, self.sines)  # type: ignore[no-untyped-call]
        return found


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_TND: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.cosines, ctx.sines = cosines, sines
        return _rotated(values_TND, cosines, sines, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TND: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(gradient_TND, ctx.cosines, ctx.sines, -1.0), None, None


def _rotated(values_TND: Tensor, cosines: Tensor, sines: Tensor, direction: float) -> Tensor:
    rotated_TND = values_TND * cosines
    first, second = values_TND.chunk(2, -1)
    to_first, to_second = rotated_TND.chunk(2, -1)
    to_first.addcmul_(second, sines, value=-direction)
    to_second.addcmul_(first, sines, value=direction)
    return rotated_TND
