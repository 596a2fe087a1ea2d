"""The model's tensors under ZeRO: whole, in Hugging Face form, for export; and per rank, for snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trm.learner.deepspeed.runtime import load_deepspeed
from moe_trm.learner.snapshots import Snapshots


@torch.no_grad()
def owned_tensors(causal: Any, *, partitioned: bool) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors, under the names and in the pieces of the checkpoint, one at a time.

    Collective where `partitioned` (ZeRO-3). Whole weights are divided evenly over the ranks. The first rank owns all
    partitioned ones. They are gathered one after the other, so ranks that each wait for a receiver of their own would
    wait for each other.
    """
    zero, rank, size = load_deepspeed().zero, dist.get_rank(), dist.get_world_size()
    for index, (name, tensor) in enumerate(_distinct(causal)):
        owner = 0 if partitioned else index % size
        with zero.GatheredParameters([tensor], enabled=partitioned and isinstance(tensor, nn.Parameter)):
            if owner == rank:
                yield from checkpoint_form(causal, name, tensor).items()


def checkpoint_form(causal: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of the checkpoint in the model's whole `tensor` called `name`; transformers fuses a layer's experts."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(causal, {name: tensor.detach()})
    return found


def _distinct(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; tied ones once."""
    seen = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
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
