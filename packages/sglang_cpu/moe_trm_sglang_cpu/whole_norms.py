"""Norms over the queries of all heads and over all keys (MiniMax-M2) in torch: SGLang's own are kernels of triton.

Imported by SGLang's scheduler only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm


def around(native: Callable[..., Any], norms: Any, q: Tensor, k: Tensor) -> Any:
    """Hook around `MiniMaxM2QKRMSNorm._forward_naive`, which is `native`, of a server that is one process.

    `x / sqrt(mean(x^2) + eps) * w` in float32, rounded once, for `[tokens, heads * D]` of each.
    """
    if norms._world_size > 1:
        return native(norms, q, k)
    weights = norms._q_norm.weight, norms._k_norm.weight
    return tuple(
        rms_norm(each.float(), weight.shape, weight.float(), norms._eps).to(each.dtype)
        for each, weight in zip((q, k), weights, strict=True)
    )
