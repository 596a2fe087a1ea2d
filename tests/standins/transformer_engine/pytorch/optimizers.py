"""Adam, which counts its steps by group, and products over lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW in float32."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert bias_correction
        assert adam_w_mode
        assert not any((capturable, master_weights, use_decoupled_grad))
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        """One step of every group, an empty one included."""
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            for values in group["params"]:
                if values.grad is None:
                    continue
                state = self.state[values]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(values))
                (first, second), gradient = group["betas"], values.grad
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                mean, square = state["exp_avg"] / (1 - first**step), state["exp_avg_sq"] / (1 - second**step)
                values.mul_(1 - group["lr"] * group["weight_decay"])
                values.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


FusedSGD = torch.optim.SGD


def multi_tensor_applier(op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any) -> Any:
    """`op` in chunks of a size."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Any) -> None:
    """The second list is the first, scaled."""
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale
"""The same by a scale that is on the device."""


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The norm of all."""
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in tensor_lists[0]]).norm()[None], None
