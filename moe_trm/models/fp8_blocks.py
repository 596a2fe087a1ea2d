"""Weights as 8-bit floats with a scale for each block: `w = q s`.

Shape letters: O outputs, I inputs, M x N the size of a block, R = ceil(O / M) and C = ceil(I / N) blocks. Blocks at the
ends may be smaller: DeepSeek-V3's `kv_a_proj_with_mqa` has 4.5 blocks of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""


def scales_of(stored: Tensor) -> Tensor:
    """Scales as float32. They are kept as floats, or as exponents in bytes (`float8_e8m0fnu`, `uint8`)."""
    if stored.dtype == torch.uint8:
        return (stored.float() - 127.0).exp2()
    return stored.float()


def dequantize(weight_OI: Tensor, scale_RC: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`q s` in float32, rounded to `dtype`.

    One row of blocks at a time, so that no second copy in float32 exists.

    Source: `weight_dequant` of DeepSeek-V3's inference code; transformers' `Fp8Dequantize`.
    """
    rows, columns = weight_OI.shape
    values = torch.empty(rows, columns, dtype=dtype)
    for index, scale_C in enumerate(scales_of(scale_RC)):
        strip = slice(index * block[0], (index + 1) * block[0])
        values[strip] = (weight_OI[strip].float() * scale_C.repeat_interleave(block[1])[:columns]).to(dtype)
    return values


def quantize(
    weight_OI: Tensor, block: tuple[int, int], scale_dtype: torch.dtype, *, powers: bool = False
) -> tuple[Tensor, Tensor]:
    """The nearest `q` and `s`: `s = max|w| / 448` of the block, as its dtype can hold it, and `q = w / s`.

    A block of zeros has the scale 1.

    Args:
        weight_OI: finite.
        block: see the module.
        scale_dtype: in which scales are kept.
        powers: scales are rounded up to powers of two.
    """
    scales = list[Tensor]()
    for strip in torch.split(weight_OI, block[0]):
        largest_C = torch.stack([part.float().abs().amax() for part in torch.split(strip, block[1], 1)])
        scale_C = torch.where(largest_C > 0, largest_C / LARGEST, 1.0)
        if powers:
            scale_C = scale_C.log2().ceil().exp2()
        scales.append(_stored(scale_C, scale_dtype))
    scale_RC = torch.stack(scales)
    return nearest(weight_OI, scale_RC, block), scale_RC


def nearest(weight_OI: Tensor, scale_RC: Tensor, block: tuple[int, int]) -> Tensor:
    """The nearest `q` at these scales; what they cannot hold becomes the largest number."""
    rows, columns = weight_OI.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for index, scale_C in enumerate(scales_of(scale_RC)):
        strip = slice(index * block[0], (index + 1) * block[0])
        ratio = weight_OI[strip].float() / scale_C.repeat_interleave(block[1])[:columns]
        values[strip] = ratio.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (scale.log2().ceil() + 127.0).to(dtype) if dtype == torch.uint8 else scale.to(dtype)


def requantize(
    new_OI: Tensor,
    old_OI: Tensor,
    stored: tuple[Tensor, Tensor],
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    powers: bool = False,
) -> tuple[Tensor, Tensor]:
    """The nearest `q` at new scales or at those that are `stored`: for each block the nearer to `new`.

    Blocks without a change from `old` keep their bits. No block is further from `new` than `old` was: at its own scale
    a weight that changed too little keeps its bits, and a new scale rounds every weight anew.

    Args:
        new_OI: the trained weights.
        old_OI: weights of the start, which `stored` means.
        stored: values and scales.
        block: see the module.
        dtype: in which the weights are read again; distances are of what is read.
        powers: see `quantize`.
    """
    fresh, scale_RC = quantize(new_OI, block, stored[1].dtype, powers=powers)
    kept = nearest(new_OI, stored[1], block)
    # Not a number where a stored scale is 0.
    better_RC = ~(_error(new_OI, kept, stored[1], block, dtype) <= _error(new_OI, fresh, scale_RC, block, dtype))
    strips = torch.split(new_OI != old_OI, block[0])
    changed_RC = torch.stack(
        [torch.stack([part.any() for part in torch.split(strip, block[1], 1)]) for strip in strips]
    )

    def wide(blocks_RC: Tensor) -> Tensor:
        rows = blocks_RC.repeat_interleave(block[0], 0)[: len(fresh)]
        return rows.repeat_interleave(block[1], 1)[:, : fresh.shape[1]]

    values = _chosen(wide(changed_RC), _chosen(wide(better_RC), fresh, kept), stored[0])
    return values, _chosen(changed_RC & better_RC, scale_RC, stored[1])


def _error(weight_OI: Tensor, values: Tensor, scale_RC: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Squared distance of each block from `weight`, `[R, C]`."""
    errors = list[Tensor]()
    back_OI = dequantize(values, scale_RC, block, dtype)
    for strip, back in zip(torch.split(weight_OI, block[0]), torch.split(back_OI, block[0]), strict=True):
        off = back.float() - strip.float()
        errors.append(torch.stack([block_part.square().sum() for block_part in torch.split(off, block[1], 1)]))
    return torch.stack(errors)


def _chosen(where: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """torch.where, also of 8-bit floats."""
    if yes.dtype.itemsize > 1:
        return torch.where(where, yes, no)
    return torch.where(where, yes.view(torch.uint8), no.view(torch.uint8)).view(yes.dtype)
