"""Products with small matrices in float32, rounded to the dtype of their inputs.

Without AMX, torch's products in bfloat16 take several times as long as those in float32, all conversions included. Both
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


def is_faster_wide(x: Tensor, matrix: Tensor) -> bool:
    """True for half-precision inputs of a small matrix."""
    half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == matrix.dtype
    return half and matrix.numel() <= SMALL_MATRIX


def around(native: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Hook around SGLang's `UnquantizedLinearMethod.apply`, which is `native`: small matrices in float32."""
    if bias is not None or not is_faster_wide(x, layer.weight):
        return native(method, layer, x, bias)
    return functional.linear(x.float(), layer.weight.float()).to(x.dtype)
