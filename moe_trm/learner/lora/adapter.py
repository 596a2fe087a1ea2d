"""Factors of adapters, and weights merged with them: the one place of the formula.

W' = round(W + (alpha / rank) B A). B A, its product with the scale and the sum are float32, whatever the learner's
dtype is, and the sum is rounded once, to that dtype. Every pass of the learner computes with W', and a push sends W':
the policy that trains is the policy that samples, bit for bit as without adapters. The gradient at W' goes on to A and
B by the chain rule, and through the rounding as it is.

A and B are in the learner's dtype, as all weights of passes are. The optimizer has float32 masters of them.

Source: LoRA, https://arxiv.org/abs/2106.09685; peft computes adapters of experts' tensors merged, too.

Shape letters: R rank, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

A, B = "lora_A", "lora_B"


def factor_name(module: str, factor: str) -> str:
    """Name of a factor of the matrix of `module`, as in peft's files but for their prefix.

    >>> factor_name("model.layers.0.self_attn.q_proj", A)
    'model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{module}.{factor}.weight"


class AdapterStart:
    """Factors to start from, in float32 on the CPU, the same on every layout.

    A is uniform within 1 / sqrt(I), as in peft, and B is zero; or both are `start`, by `factor_name`.
    """

    def __init__(self, rank: int, seed: int, start: Mapping[str, Tensor] | None = None) -> None:
        self._rank, self._seed, self._given = rank, seed, start

    def factors(self, module: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """A `[R, I]` and B `[O, R]` of the matrix of `module`."""
        if self._given is not None:
            a_RI, b_OR = (self._given[factor_name(module, factor)].float() for factor in (A, B))
            return a_RI, b_OR
        digest = hashlib.sha256(f"{self._seed}/{module}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        a_RI = torch.rand((self._rank, inputs), generator=generator) * 2 - 1
        return a_RI / math.sqrt(inputs), torch.zeros((outputs, self._rank))


class Factors(nn.Module):
    """A and B of one matrix, or of the same matrix of every expert of a layer.

    Args:
        a: `[R, I]`, or `[E, R, I]`; this rank's columns of it.
        b: `[O, R]`, or `[E, O, R]`; this rank's rows of it.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)

    def forward(self) -> Tensor:
        """B A, `[O, I]` or `[E, O, I]`, at least float32."""
        return self.product()

    def product(self) -> Tensor:
        """The same without hooks, for factors that are whole."""
        precise = torch.promote_types(self.A.dtype, torch.float32)
        return self.B.to(precise) @ self.A.to(precise)


class Adapter(nn.Module):
    """Change of one parameter of the model.

    `parts` has, for each matrix that the parameter is made of, its factors, or the shape of one without. `pack` makes
    the parameter of the matrices. `scale` is alpha / rank.
    """

    def __init__(
        self,
        parts: Sequence[Factors | tuple[int, ...]],
        scale: float,
        pack: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        super().__init__()
        self._shapes = [None if isinstance(part, Factors) else part for part in parts]
        self._scale, self._pack = scale, pack
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, Factors))

    def forward(self, base: Tensor) -> Tensor:
        """`base` merged with the change, in its dtype."""
        return self._merge(base, [part() for part in self.parts])

    @torch.no_grad()
    def value(self, base: Tensor) -> Tensor:
        """The same outside of passes: no hook gathers or frees anything."""
        return self._merge(base.detach(), [cast(Factors, part).product() for part in self.parts])

    def _merge(self, base: Tensor, products: Sequence[Tensor]) -> Tensor:
        remaining, precise = iter(products), torch.promote_types(base.dtype, torch.float32)
        changes = [
            next(remaining) if shape is None else torch.zeros(shape, dtype=precise, device=base.device)
            for shape in self._shapes
        ]
        return merged(base, self._pack(changes), self._scale)


def merged(base: Tensor, product: Tensor, scale: float) -> Tensor:
    """W + scale * product, in the dtype of W; see the top of this file."""
    precise = torch.promote_types(base.dtype, torch.float32)
    return (base.to(precise) + scale * product.to(precise)).to(base.dtype)


def merge_in_passes(owners: Iterable[tuple[nn.Module, str, Adapter]]) -> None:
    """Give modules their merged weights while they are forwarded: `owners` are module, parameter's name, and adapter.

    The weight is made before each forward, also before one that recomputes activations, and is gone after it. Call it
    last: what other hooks of the same modules read is then the merged weight.
    """
    for module, name, adapter in owners:
        module.register_forward_pre_hook(partial(_put, name, adapter))
        module.register_forward_hook(partial(_remove, name), always_call=True)


def _put(name: str, adapter: Adapter, module: nn.Module, _args: object) -> None:
    weight = adapter(module._parameters[name])
    # A plain attribute hides the parameter of the same name, which stays registered and as it is. As a parameter does,
    # it says that it trains in passes without gradients too: Megatron-Core's layers choose their product by that.
    module.__dict__[name] = weight if weight.requires_grad else weight.requires_grad_()


def _remove(name: str, module: nn.Module, _args: object, _output: object) -> None:
    module.__dict__.pop(name, None)
