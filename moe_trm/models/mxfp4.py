"""Weights as 4-bit floats, of which 32 in a row share a power of two: `w = q 2^(e - 127)`.

On disk the experts of a layer are `[E, O, G, 16]` bytes with two numbers each, the lower half first, and `[E, O, G]`
exponents. The model's matrices are `[E, I, O]`, I = 32 G.

Source: OCP Microscaling Formats 1.0; gpt-oss; transformers' `convert_moe_packed_tensors`.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share an exponent."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers by their 4 bits (E2M1)."""
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between one magnitude and the next; True: the middle itself rounds up, to the one whose last bit is 0."""


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., O, G, 16]` bytes and `[..., O, G]` exponents -> `[..., I, O]`; exact in bfloat16 and float32."""
    if blocks.dim() > 3:  # one expert at a time: indices and float32 are wide
        return torch.stack([dequantize(*expert_parts, dtype) for expert_parts in zip(blocks, scales, strict=True)])
    values = torch.tensor(VALUES, dtype=dtype)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], -1).flatten(-2)
    decoded = torch.ldexp(values[halves.int()], (scales.int() - 127).unsqueeze(-1)).to(dtype)
    return decoded.flatten(-2).mT.contiguous()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., I, O]` -> bytes and exponents.

    The exponent is the smallest with which the largest of the 32 does not exceed 6, and each number the nearest of
    `VALUES`. `downcast_to_mxfp` of triton_kernels, gpt-oss's own, chooses the same exponent.
    """
    if weight.dim() > 2:
        return _stacked([quantize(expert) for expert in weight])
    rows = weight.float().mT
    groups = rows.reshape(len(rows), -1, GROUP)
    largest = groups.abs().amax(-1)
    exponents = torch.where(largest > 0, (largest / 6.0).log2().ceil(), 0.0).clamp(-127, 127)
    scales = (exponents + 127).to(torch.uint8)
    return nearest(groups, scales), scales


def nearest(groups: Tensor, scales: Tensor) -> Tensor:
    """`[O, G, 32]` -> bytes: the nearest numbers at these exponents, at most 6 of them, the even one of two."""
    magnitudes = torch.ldexp(groups.abs(), 127 - scales.int().unsqueeze(-1))
    codes = torch.zeros_like(groups, dtype=torch.uint8)
    for middle, up in _MIDDLES:
        codes += (magnitudes >= middle) if up else (magnitudes > middle)
    codes += (groups < 0).to(torch.uint8) * 8
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def requantize(new: Tensor, old: Tensor, stored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The nearest numbers at new exponents or at those that are `stored`: for each group the nearer to `new`.

    Groups without a change from `old` keep their bits. No group is further from `new` than `old` was.
    """
    if new.dim() > 2:
        rows = zip(new, old, *stored, strict=True)
        return _stacked(
            [requantize(expert, old_expert, (bits, exponents)) for expert, old_expert, bits, exponents in rows]
        )
    blocks, scales = quantize(new)
    groups = new.float().mT.reshape(*scales.shape, GROUP)
    kept = nearest(groups, stored[1])
    better = ~(_error(groups, kept, stored[1]) <= _error(groups, blocks, scales))
    changed = (new != old).mT.reshape(*scales.shape, GROUP).any(-1)
    values = torch.where(better.unsqueeze(-1), blocks, kept)
    return (
        torch.where(changed.unsqueeze(-1), values, stored[0]),
        torch.where(changed & better, scales, stored[1]),
    )


def _error(groups: Tensor, blocks: Tensor, scales: Tensor) -> Tensor:
    """Squared distance of each group from `groups`, `[O, G]`."""
    back = dequantize(blocks, scales, torch.float32).mT.reshape(groups.shape)
    return (back - groups).square().sum(-1)


def _stacked(experts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([blocks for blocks, _ in experts]), torch.stack([scales for _, scales in experts])
