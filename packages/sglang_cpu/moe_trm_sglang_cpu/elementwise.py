"""Norms and gates in torch whose only forms in SGLang are kernels of triton. Imported by SGLang's scheduler only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


def over_all_heads(native: Callable[..., Any], norms: Any, q: Tensor, k: Tensor) -> Any:
    """MiniMax-M2: hook around `MiniMaxM2QKRMSNorm._forward_naive`, which is `native`, of a server of one process.

    `x / sqrt(mean(x^2) + eps) * w` in float32, rounded once, for `[tokens, heads * D]` of each.
    """
    if norms._world_size > 1:
        return native(norms, q, k)
    weights = norms._q_norm.weight, norms._k_norm.weight
    return tuple(
        _float32(tensor, weight, norms._eps).to(tensor.dtype) for tensor, weight in zip((q, k), weights, strict=True)
    )


def gated(native: Callable[..., Any], norm: Any, x: Tensor, g: Tensor) -> Tensor:
    """The gated delta rule's output: hook around `FusedRMSNormGated.forward`.

    The norm of `x`, times `silu` or `sigmoid` of the gate `g`, in float32, rounded once.
    """
    gate = torch.sigmoid(g.float()) if norm.activation == "sigmoid" else silu(g.float())
    return (_float32(x, norm.weight, norm.eps) * gate).to(x.dtype)


def shared_gate(
    native: Callable[..., Any], x: Tensor, weight: Tensor, shared: Tensor, out: Tensor, *, do_add: bool
) -> None:
    """The gate of Qwen's shared expert: hook around `_launch_fused_gate_sigmoid_mul`, which writes to `out`.

    `sigmoid(x w) * shared`, for `[tokens, hidden]`, in float32, rounded once; with `do_add`, added to `out`.
    """
    gate = torch.sigmoid(x.float() @ weight.float())[:, None] * shared.float()
    out.copy_(out + gate if do_add else gate)


def _float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), weight.shape, weight.float(), eps)
