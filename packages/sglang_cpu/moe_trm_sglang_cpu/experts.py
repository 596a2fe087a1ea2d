"""Plain SwiGLU experts for SGLang's torch-native mixture of experts, in a product per matrix.

SGLang's own makes two dozen calls for each expert, which cost more than the products of a few tokens. Imported by
SGLang's scheduler only.

Shape letters: N tokens, K experts per token, E experts, D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SMALL_MATRIX = 1 << 18
"""Numbers of a matrix up to which a product of half-precision inputs is faster in float32, all conversions included.

So it is without AMX: converted, the matrix stays in a core's cache. Both add up in float32.
"""


def experts(x_ND: Tensor, weights_NK: Tensor, w13_EFD: Tensor, w2_EDF: Tensor, ids_NK: Tensor) -> Tensor:
    """sum_k w_k * W2 (silu(W1 x) * W3 x) over the experts of each token, `[N, D]`, in the precision of SGLang's loop.

    Each product is rounded to the dtype of the tokens, whatever it was computed in.

    Args:
        x_ND: tokens.
        weights_NK: gate weights.
        w13_EFD: W1 above W3, `[E, 2 F, D]`.
        w2_EDF: W2, `[E, D, F]`.
        ids_NK: chosen experts.
    """
    ids = ids_NK.reshape(-1)
    order, sizes = ids.argsort(stable=True), torch.bincount(ids, minlength=len(w13_EFD)).tolist()
    half = x_ND.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half and w13_EFD[0].numel() <= SMALL_MATRIX else x_ND.dtype
    expert_rows = x_ND.to(dtype).index_select(0, order // weights_NK.shape[1])
    gate, up = products(expert_rows, sizes, w13_EFD).to(x_ND.dtype).chunk(2, -1)
    sorted_out = products(functional.silu(gate).mul_(up).to(dtype), sizes, w2_EDF).to(x_ND.dtype)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    out_NKD = out.view(*weights_NK.shape, -1).to(weights_NK.dtype)
    return out_NKD.mul_(weights_NK.unsqueeze(-1)).sum(1).to(x_ND.dtype)


def products(rows: Tensor, sizes: list[int], matrices: Tensor) -> Tensor:
    """The rows of each expert times its transposed matrix."""
    out = rows.new_empty(len(rows), matrices.shape[1])
    for expert_rows, matrix, into in zip(torch.split(rows, sizes), matrices, torch.split(out, sizes), strict=True):
        if len(expert_rows):
            torch.mm(expert_rows, matrix.to(rows.dtype).t(), out=into)
    return out


def around(native: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
    """Hook around SGLang's `moe_forward_native`, which is `native`: plain SwiGLU experts in fewer calls."""
    weights, ids, _ = topk_output
    plain = (
        moe_runner_config.activation == "silu"
        and moe_runner_config.gemm1_alpha is None
        and not moe_runner_config.apply_router_weight_on_input
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
    )
    if not (plain and ids.numel()):
        return native(layer, x, topk_output, moe_runner_config)
    return experts(x, weights, layer.w13_weight, layer.w2_weight, ids)
