"""Products with small matrices in float32, rounded to the dtype of their inputs.

Without AMX, torch's products in bfloat16 take half as long again as those in float32, all conversions included. Both
add up in float32, so the results are the same but for the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SMALL_MATRIX = 1 << 18
"""Numbers of a matrix up to which float32 is faster: converted, it stays in a core's cache."""


def wrap(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SGLang's `UnquantizedLinearMethod.apply`, which is `native`, with small matrices in float32."""

    def apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = layer.weight
        half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
        if bias is not None or not half or weight.numel() > SMALL_MATRIX:
            return native(method, layer, x, bias)
        return functional.linear(x.float(), weight.float()).to(x.dtype)

    return apply
