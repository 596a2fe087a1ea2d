"""Adapters in models of transformers.

transformers holds the experts of a layer in two stacked tensors. A stack gets stacked factors, one for each expert and
each matrix of the checkpoint in it (`matrices_of`), so that the adapters equal the other learner's.

Shape letters: E experts, M matrices of one expert that lie in one stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_trm.errors import ConfigError
from moe_trm.learner.deepspeed.weights import matrices_of
from moe_trm.learner.lora.adapter import A, Adapter, AdapterStart, B, Factors, factor_name, merge_in_passes
from moe_trm.learner.lora.requested import WantedAdapters


@dataclass(frozen=True)
class FactorPlace:
    """A parameter of the model with adapters.

    Attributes:
        owner, leaf: its module and its name there.
        matrices: for each matrix of the checkpoint in it, in order: its Hugging Face modules, one, or one for each
            expert; None where it has no adapter.
    """

    owner: str
    leaf: str
    matrices: tuple[tuple[str, ...] | None, ...]

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.owner}.{self.leaf}"

    def factors(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Names of the factors' modules in the model, and their Hugging Face modules."""
        adapted = [modules for modules in self.matrices if modules is not None]
        for number, modules in enumerate(adapted):
            yield f"{self.owner}.lora_{self.leaf}.parts.{number}", modules


class DeepSpeedAdapters:
    """The adapters of a model; none of a model without.

    Attributes:
        factors: by the name of each factor in the model, its names by `factor_name`.
    """

    def __init__(self) -> None:
        self.factors: dict[str, tuple[str, ...]] = {}
        self._adapters: dict[str, tuple[nn.Module, str, Adapter]] = {}

    def add(self, place: FactorPlace, module: nn.Module, adapter: Adapter) -> None:
        """Take the adapter of the parameter at `place` in `module`."""
        module.add_module(f"lora_{place.leaf}", adapter)
        for owner, modules in place.factors():
            for kind, factor in (("A", A), ("B", B)):
                self.factors[f"{owner}.{kind}"] = tuple(factor_name(module_name, factor) for module_name in modules)
        self._adapters[place.name] = (module, place.leaf, adapter)

    def of(self, name: str) -> Adapter | None:
        """The adapter of the parameter `name`."""
        entry = self._adapters.get(name)
        return None if entry is None else entry[2]

    def merge_in_passes(self) -> None:
        """Let every forward from now on compute with merged weights.

        Call it when DeepSpeed has the model: its hooks, which gather partitioned weights, come first.
        """
        merge_in_passes(self._adapters.values())


def add_adapters(causal: Any, settings: WantedAdapters) -> DeepSpeedAdapters:
    """Give matrices adapters, and freeze everything else. Call it before DeepSpeed takes the model.

    Raises:
        ConfigError: a matrix that has no adapter here.
    """
    adapters, parameters = DeepSpeedAdapters(), dict(causal.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for place in places(causal, settings.modules):
        base = parameters[place.name]
        shape = (*base.shape[:-2], base.shape[-2] // len(place.matrices), base.shape[-1])
        parts = [
            shape if modules is None else _factors(modules, shape, base, settings.start) for modules in place.matrices
        ]
        adapters.add(place, causal.get_submodule(place.owner), Adapter(parts, settings.lora.scale, _rows_together))
    # ZeRO-3 takes a block of experts as one, and gathers it for the backward pass by the gradients of its inputs. Below
    # the first adapter there would be none.
    causal.enable_input_require_grads()
    return adapters


def places(causal: Any, modules: frozenset[str]) -> list[FactorPlace]:
    """The parameters of the model, which may be without values, that hold matrices of `modules`.

    Raises:
        ConfigError: experts of which only some would have adapters, or a form that has none.
    """
    factor_places: list[FactorPlace] = []
    covered: set[str] = set()
    for name, parameter in causal.named_parameters():
        matrices = matrices_of(causal, name, parameter)
        selection = [[module_name in modules for module_name in group] for group in matrices]
        if any(any(group) != all(group) for group in selection):
            raise _refused(name, "adapters of some experts of a layer, whose matrices are in one tensor here")
        if any(any(group) for group in selection):
            owner, _, leaf = name.rpartition(".")
            kept = tuple(group if any(on) else None for group, on in zip(matrices, selection, strict=True))
            factor_places.append(FactorPlace(owner, leaf, kept))
            covered |= {module for group in kept if group is not None for module in group}
    if missing := modules - covered:
        raise _refused(min(missing), "a matrix that transformers holds in a form without adapters")
    return factor_places


def canonical(place: FactorPlace, factor: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A saved factor `factor` of the model as tensors by `factor_name`."""
    owner, _, kind = factor.rpartition(".")
    modules = dict(place.factors())[owner]
    for number, module in enumerate(modules):
        yield factor_name(module, {"A": A, "B": B}[kind]), values[number] if values.dim() == 3 else values


def _factors(modules: tuple[str, ...], shape: tuple[int, ...], base: Tensor, start: AdapterStart) -> Factors:
    pairs = [start.factors(module, *shape[-2:]) for module in modules]
    a, b = (torch.stack(factors) if len(shape) == 3 else factors[0] for factors in zip(*pairs, strict=True))
    return Factors(a.to(base, copy=True), b.to(base, copy=True))


def _rows_together(matrices: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(matrices), dim=-2)


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(
        "these adapters cannot be trained with learner.backend=deepspeed",
        where="learner.lora.targets",
        got=f"{what}: {name}",
        expected="matrices with a tensor of their own in the checkpoint, of all experts of a layer",
        fix="Change learner.lora.targets, or set learner.backend=megatron.",
    )
