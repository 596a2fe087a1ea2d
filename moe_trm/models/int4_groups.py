"""Weights as 4-bit integers, of which the group of `G` in a row share a scale: `w = s q`, q from -8 to 7.

On disk a matrix `[O, I]` is `weight_packed` `[O, I / 8]` int32, which holds eight `q + 8` with the first in the lowest
bits, `weight_scale` `[O, I / G]`, and `weight_shape`, O and I. Kimi-K2.5's experts have this form with G = 32.

Source: compressed-tensors, format `pack-quantized`.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_WORD = 8
"""Numbers in an int32."""
_MIDDLE, _HALF_RANGE = 8, 7.5
"""Added to each number; and half of the range from -8 to 7, which the largest number of a group becomes."""


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`[O, I / 8]` words and `[O, I / G]` scales -> `[O, I]`, multiplied in the dtype of the scales."""
    numbers = _numbers(packed).to(scale.dtype).reshape(*scale.shape, -1)
    return (numbers * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def quantize(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[O, I]` -> words and scales in `dtype`: the largest of each `group` over 7.5; a group of zeros has the scale 1.

    compressed-tensors chooses the same scale.
    """
    groups = weight.float().reshape(len(weight), -1, group)
    largest = groups.abs().amax(-1)
    scale = torch.where(largest > 0, largest / _HALF_RANGE, 1.0).to(dtype)
    return _nearest(groups, scale), scale


def requantize(new: Tensor, old: Tensor, stored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The nearest numbers at new scales or at those that are `stored`: for each group the nearer to `new`.

    Groups without a change from `old` keep their bits.
    """
    packed, scale = stored
    group = new.shape[-1] // scale.shape[-1]
    groups = new.float().reshape(*scale.shape, group)
    changed = (new != old).reshape(groups.shape).any(-1)
    fresh_packed, fresh_scale = quantize(new, group, scale.dtype)
    kept_packed = _nearest(groups, scale)
    better = ~(_error(groups, kept_packed, scale) <= _error(groups, fresh_packed, fresh_scale))
    words = _by_group(packed, scale)
    written = torch.where(better.unsqueeze(-1), _by_group(fresh_packed, scale), _by_group(kept_packed, scale))
    return (
        torch.where(changed.unsqueeze(-1), written, words).flatten(-2),
        torch.where(changed & better, fresh_scale, scale),
    )


def _numbers(packed: Tensor) -> Tensor:
    """`[O, I / 8]` words -> `[O, I]` numbers from -8 to 7."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32)
    return (((packed.unsqueeze(-1) >> shifts) & 0xF) - _MIDDLE).flatten(-2)


def _nearest(groups: Tensor, scale: Tensor) -> Tensor:
    """`[O, I / G, G]` -> words `[O, I / 8]` of the nearest numbers at these scales."""
    numbers = (groups / scale.float().unsqueeze(-1)).round().clamp(-_MIDDLE, _MIDDLE - 1).flatten(-2).long() + _MIDDLE
    shifts = torch.arange(0, 4 * PER_WORD, 4)
    # A sum of 32 bits without a sign becomes the int32 with these bits.
    return (numbers.reshape(len(numbers), -1, PER_WORD) << shifts).sum(-1).to(torch.int32)


def _by_group(packed: Tensor, scale: Tensor) -> Tensor:
    return packed.reshape(*scale.shape, -1)


def _error(groups: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Squared distance of each group from `groups`, `[O, I / G]`."""
    back = dequantize(packed, scale, torch.float32).reshape(groups.shape)
    return (back - groups).square().sum(-1)
