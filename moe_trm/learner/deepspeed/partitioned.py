"""A model that is partitioned while it is loaded (ZeRO-3): no rank ever holds the whole of it.

The model is made without values first (`hf_model.empty_model`). Then its parameters come one after the other: the first
rank reads one from the checkpoint, DeepSpeed sends it to all ranks, and each keeps its part. A rank holds its own share
of the model, one whole parameter, and one tensor of the checkpoint.

transformers holds the experts of a layer in stacks. Where a tensor of the checkpoint lies in them is not assumed, see
`matrices_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trm.errors import CheckpointError
from moe_trm.learner.deepspeed.runtime import load_deepspeed
from moe_trm.learner.deepspeed.weights import checkpoint_form, is_factor, matrices_of
from moe_trm.learner.hf_checkpoint import HfCheckpoint


def partition(policy: nn.Module, causal: Any, checkpoint: HfCheckpoint, settings: Mapping[str, Any]) -> None:
    """Give every parameter of `policy` to DeepSpeed, those of the checkpoint with their values. Collective.

    Args:
        policy: with `causal` in it.
        causal: of `empty_model`; it may have adapters, whose factors have values already.
        checkpoint: of the weights.
        settings: DeepSpeed's configuration.

    Raises:
        CheckpointError: tensors of other shapes than config.json announces, before any is read.
    """
    check_shapes(causal, checkpoint)
    zero = load_deepspeed().zero
    for name, parameter in parameters(causal).items():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
        if dist.get_rank() == 0:
            read_into(parameter.data, causal, name, checkpoint)
        zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=settings)
    zero.Init(module=policy, config_dict_or_path=settings)


def parameters(causal: Any) -> dict[str, nn.Parameter]:
    """Those of the checkpoint, without factors of adapters."""
    return {name: parameter for name, parameter in causal.named_parameters() if not is_factor(name)}


@torch.no_grad()
def read_into(tensor: Tensor, causal: Any, name: str, checkpoint: HfCheckpoint) -> None:
    """Read the values of the parameter `name` into `tensor`, one tensor of the checkpoint at a time."""
    for hf_name, part in parts(causal, name, tensor):
        part.copy_(checkpoint.read(hf_name))


def parts(causal: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the checkpoint in the parameter `name`, and their places in `tensor`."""
    matrices = matrices_of(causal, name, tensor) if tensor.dim() == 3 else ()
    if not matrices:
        (hf_name,) = checkpoint_form(causal, name, torch.zeros((1,) * tensor.dim()))
        yield hf_name, tensor
    for rows, modules in zip(tensor.chunk(len(matrices), 1) if matrices else (), matrices, strict=True):
        yield from ((f"{module}.weight", rows[expert]) for expert, module in enumerate(modules))


def check_shapes(causal: Any, checkpoint: HfCheckpoint) -> None:
    """Raise `CheckpointError` where a tensor of the checkpoint is missing, or has not the shape of its place."""
    places = (place for name, parameter in parameters(causal).items() for place in parts(causal, name, parameter))
    for hf_name, part in places:
        if checkpoint.shape(hf_name) != tuple(part.shape):
            raise CheckpointError(
                "the checkpoint does not fit its config.json: mismatched tensors",
                where=f"{checkpoint.folder}, {hf_name}",
                got=list(checkpoint.shape(hf_name)),
                expected=list(part.shape),
                fix="Copy or download the checkpoint again, completely.",
            )
