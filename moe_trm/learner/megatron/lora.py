"""Adapters in Megatron-Core's layers, on every layout.

A parameter that ranks cut in rows has a factor B cut in the same rows, and the whole A; one that is cut in columns has
A cut, and the whole B. The gradient of a whole factor of a cut matrix is a sum over these ranks. Megatron-Core makes
that sum for parameters with `sequence_parallel` set, as for norms. Factors of a matrix that is whole on each rank get
their gradients as it would: its flags are theirs.

Megatron-Core 0.16 has no adapters of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_trm.errors import ConfigError
from moe_trm.learner.lora.adapter import A, Adapter, B, Factors, factor_name, merge_in_passes
from moe_trm.learner.lora.requested import WantedAdapters
from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.model import global_parameters, tensor_group
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.models.family import Link


@dataclass(frozen=True)
class Factor:
    """One factor of one matrix: `name` is the `factor_name` of the whole, `parameter` this rank's part of it.

    `base`: Megatron's global name of the parameter that it changes. `dim`: dimension in which tensor-parallel ranks cut
    it; None: each has all of it.
    """

    name: str
    base: str
    parameter: nn.Parameter
    dim: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole factor."""
        shape = list(self.parameter.shape)
        if self.dim is not None:
            shape[self.dim] *= tensor_group(self.base).size()
        return tuple(shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Place of this rank's part in the whole factor."""
        first = [0] * self.parameter.dim()
        if self.dim is not None:
            first[self.dim] = self.parameter.shape[self.dim] * tensor_group(self.base).rank()
        return tuple(first)


class MegatronAdapters:
    """The adapters of one rank's model; none of a model without.

    Attributes:
        factors: this rank's, in the order of the model.
    """

    def __init__(self) -> None:
        self.factors: list[Factor] = []
        self._adapters: dict[Tensor, tuple[nn.Module, str, Adapter]] = {}

    def add(self, parameter: Tensor, module: nn.Module, name: str, adapter: Adapter, factors: Sequence[Factor]) -> None:
        """Take the adapter of `parameter`, which is `name` of `module`."""
        module.add_module(f"lora_{name}", adapter)
        self._adapters[parameter] = (module, name, adapter)
        self.factors += factors

    def merged(self, parameter: Tensor) -> Tensor:
        """The parameter as passes have it, without a gradient."""
        entry = self._adapters.get(parameter)
        return (parameter if entry is None else entry[2].value(parameter)).detach()

    def merge_in_passes(self) -> None:
        """Let every forward from now on compute with merged weights. Call it when all other hooks are there."""
        merge_in_passes(self._adapters.values())


def add_adapters(chunks: Sequence[PolicyModel], hf: Mapping[str, Any], settings: WantedAdapters) -> MegatronAdapters:
    """Give matrices adapters, and freeze everything else, once the weights are loaded and before `wrap_model`.

    Raises `ConfigError` for a matrix that Megatron-Core's layers hold in a form that has no adapters.
    """
    adapters = MegatronAdapters()
    owners = {
        parameter: (module, name)
        for chunk in chunks
        for module in chunk.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    for name, parameter in list(global_parameters(chunks)):
        parameter.requires_grad_(False)
        link = chunks[0].names.link(name)
        if any(_module(hf_name) in settings.modules for hf_name in link.hf_names):
            adapter, factors = _adapter(name, parameter, link, hf, settings)
            adapters.add(parameter, *owners[parameter], adapter, factors)
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_with_gradient)
    return adapters


def _adapter(
    name: str, parameter: Tensor, link: Link, hf: Mapping[str, Any], settings: WantedAdapters
) -> tuple[Adapter, list[Factor]]:
    if link.row is not None or link.packing not in ("copy", "qkv", "gated"):
        raise ConfigError(
            "the matrices of this parameter have no adapters: the checkpoint has those of several experts in one",
            where="learner.lora.targets",
            got=name,
            expected="matrices with a tensor of their own",
            fix="Take the experts out of learner.lora.targets.",
        )
    dim, group = convert.split_dim(name), tensor_group(name)
    dim = dim if group.size() > 1 else None
    all_heads = convert.heads(hf)
    heads = all_heads if dim is None else replace(all_heads, groups=all_heads.groups // group.size())
    # A rank has its groups' rows of queries, keys and values, so that parts pack as the whole does.
    alike = torch.empty_like(parameter, device="meta")
    shapes = [tuple(part.shape) for part in convert.unpack(link.packing, alike, heads)]
    parts: list[Factors | tuple[int, ...]] = []
    factors: list[Factor] = []
    for hf_name, shape in zip(link.hf_names, shapes, strict=True):
        module = _module(hf_name)
        if module not in settings.modules:
            parts.append(shape)
            continue
        outputs, inputs = (size * (group.size() if axis == dim else 1) for axis, size in enumerate(shape))
        a_RI, b_OR = settings.start.factors(module, outputs, inputs)
        if dim == 0:
            b_OR = b_OR.chunk(group.size())[group.rank()]
        elif dim == 1:
            a_RI = a_RI.chunk(group.size(), 1)[group.rank()]
        local_factors = Factors(*(factor_start.to(parameter, copy=True) for factor_start in (a_RI, b_OR)))
        parts.append(local_factors)
        cuts = ((A, local_factors.A, 1 if dim == 1 else None), (B, local_factors.B, 0 if dim == 0 else None))
        for factor, values, cut in cuts:
            _mark(values, parameter, cut, is_expert=convert.is_expert(name), is_part=dim is not None)
            factors.append(Factor(factor_name(module, factor), name, values, cut))
    return Adapter(parts, settings.lora.scale, partial(convert.pack, link.packing, heads=heads)), factors


def _mark(factor: Any, base: Tensor, cut: int | None, *, is_expert: bool, is_part: bool) -> None:
    """Tell Megatron who holds a factor and who sums its gradient; see the top of this file."""
    for flag in ("allreduce", "sequence_parallel"):
        if hasattr(base, flag):
            setattr(factor, flag, getattr(base, flag))
    factor.tensor_model_parallel = is_expert or cut is not None
    factor.partition_dim, factor.partition_stride = -1 if cut is None else cut, 1
    if is_part and cut is None:
        factor.sequence_parallel = True


def _module(hf_name: str) -> str:
    return hf_name.removesuffix(".weight")


def _with_gradient(_embedding: Any, _inputs: Any, output: Tensor) -> Tensor | None:
    """The embedding's output with a gradient of its own.

    Nothing below the first adapter has one, and recomputed layers take none from inputs that have none: they would
    train nothing, silently.
    """
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else None
