"""The model's tensors under ZeRO: whole, in Hugging Face form, for export; and per rank, for snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trm.learner.deepspeed.runtime import load_deepspeed
from moe_trm.learner.lora.adapter import Adapter
from moe_trm.learner.snapshots import Snapshots
from moe_trm.models.multimodal import expert_stack, is_vision

_MOST = 2
"""Matrices of an expert in one stack, at most: gate and up."""


class Merging(Protocol):
    """Finds the adapter of a parameter; `learner.deepspeed.lora` has one."""

    def of(self, name: str) -> Adapter | None: ...


def is_factor(name: str) -> bool:
    """True for the name of an adapter's factor in the model."""
    return ".parts." in name and name.endswith((".A", ".B"))


@torch.no_grad()
def owned_tensors(
    causal: Any, adapters: Merging, *, partitioned: bool, vision: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors, under the names and in the pieces of the checkpoint, one at a time.

    Those with an adapter are merged with it, as passes have them. Without `vision`, those of a vision tower are left
    out: they are the checkpoint's.

    Collective where `partitioned` (ZeRO-3). Whole weights are divided evenly over the ranks. The first rank owns all
    partitioned ones. They are gathered one after the other, so ranks that each wait for a receiver of their own would
    wait for each other.
    """
    zero, rank, size = load_deepspeed().zero, dist.get_rank(), dist.get_world_size()
    named = ((name, tensor) for name, tensor in _distinct(causal) if vision or not is_vision(name))
    for index, (name, tensor) in enumerate(named):
        owner, adapter = 0 if partitioned else index % size, adapters.of(name)
        parameters = [tensor, *(adapter.parameters() if adapter is not None else ())]
        with zero.GatheredParameters(parameters, enabled=partitioned and isinstance(tensor, nn.Parameter)):
            if owner == rank:
                value = tensor if adapter is None else adapter.value(tensor)
                yield from checkpoint_form(causal, name, value).items()


def checkpoint_form(causal: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of the checkpoint in the model's whole `tensor` called `name`; transformers fuses a layer's experts."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(causal, {name: tensor.detach()})
    kind = causal.config.model_type
    return {
        hf_name: value.transpose(1, 2).contiguous() if expert_stack(hf_name, kind) else value
        for hf_name, value in tensors.items()
    }


def matrices_of(causal: Any, name: str, parameter: Tensor) -> tuple[tuple[str, ...], ...]:
    """Hugging Face modules of the matrices in a parameter, by matrix and expert; none of what is no matrix.

    Where a matrix of the checkpoint lies in a stack of experts is not assumed: a small stack of numbers goes the way
    that the weights go when they are saved. The values of `parameter` are not looked at.
    """
    if parameter.dim() == 2 and name.endswith(".weight"):
        form = checkpoint_form(causal, name, torch.zeros(1, 1))
        return tuple((hf_name.removesuffix(".weight"),) for hf_name in form) if len(form) == 1 else ()
    if parameter.dim() != 3:
        return ()
    experts = len(parameter)
    numbers = torch.arange(experts * _MOST, dtype=torch.float32).view(experts, _MOST, 1)
    form = checkpoint_form(causal, name, numbers)
    if len(form) not in (experts, experts * _MOST):
        return ()  # one tensor in the checkpoint, too
    per_expert = len(form) // experts
    grid = [[""] * experts for _ in range(per_expert)]
    for hf_name, values in form.items():
        expert, matrix = divmod(int(values.flatten()[0]), _MOST)
        grid[matrix][expert] = hf_name.removesuffix(".weight")
    assert all(all(row) for row in grid), f"{name} is not made of {per_expert} matrices of each expert"
    return tuple(tuple(row) for row in grid)


def _distinct(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers without factors of adapters; tied ones once."""
    seen = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not is_factor(name):
            seen.add(id(tensor))
            yield name, tensor


class PartitionSnapshots(Snapshots):
    """`Snapshots` of a ZeRO-3 model: each rank keeps its partition of every parameter."""

    def _parameters(self) -> Iterator[Tensor]:
        yield from map(own_partition, super()._parameters())


def own_partition(parameter: Any) -> Tensor:
    """This rank's part of the parameter: its flat partition under ZeRO-3, else the parameter itself.

    Write to it to change the weight.
    """
    if not hasattr(parameter, "ds_tensor"):
        return parameter  # type: ignore[no-any-return]
    # A whole copy left over from the last forward would outlive a change of the partition.
    if parameter.ds_status.name == "AVAILABLE":
        parameter.partition()
    return parameter.ds_tensor  # type: ignore[no-any-return]
