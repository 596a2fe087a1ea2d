"""Export of Megatron's weights in Hugging Face form: each rank yields its own tensors, none gathers the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.model import EMBEDDING, OUTPUT, global_tensors, tensor_group
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.models.hf_config import num_experts


@torch.no_grad()
def owned_tensors(
    chunks: Sequence[PolicyModel], hf: Mapping[str, Any], value: Callable[[Tensor], Tensor] = torch.detach
) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors under their Hugging Face names; `hf` is config.json of the checkpoint. Collective.

    `value` of a parameter is what passes compute with: merged with its adapter, where it has one.

    The first of the ranks that share an expert owns it. The first data-parallel rank that has any other tensor owns it.
    Where tensor-parallel ranks hold parts, or expert-parallel ranks rows of one tensor, the first of them owns the
    whole. Whole tensors are assembled one at a time in host memory, all of them before the first is yielded: a receiver
    that takes the ranks in turn must not keep the others from sending their parts.
    """
    names = convert.Names(hf)
    is_cut = any(_holders(name, names).size() > 1 for name, _ in global_tensors(chunks))
    tensors = _rows_together(_owned(chunks, hf, names, value), num_experts(hf))
    yield from (list(tensors) if is_cut else tensors)


def _holders(name: str, names: convert.Names) -> dist.ProcessGroup:
    """Ranks that together hold the Hugging Face tensors of the parameter `name`."""
    return tensor_group(name) if names.link(name).row is None else parallel_state.get_expert_model_parallel_group()


def _owned(
    chunks: Sequence[PolicyModel], hf: Mapping[str, Any], names: convert.Names, value: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor, bool]]:
    """Name and tensor, and whether it is only one expert's row of the tensor of that name."""
    shape, tied = convert.heads(hf), bool(hf.get("tie_word_embeddings", False))
    owns_experts = int(parallel_state.get_expert_data_parallel_rank()) == 0
    owns_shared = int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
    for name, parameter in global_tensors(chunks):
        is_copy = tied and name == OUTPUT
        if is_copy or not (owns_experts if convert.is_expert(name) else owns_shared):
            continue
        found, group = names.link(name), tensor_group(name)
        whole = _whole(name, value(parameter))
        if group.rank() == 0:
            if name in (EMBEDDING, OUTPUT):
                whole = whole[: int(hf["vocab_size"])]
            for hf_name, tensor in zip(found.hf_names, convert.unpack(found.packing, whole, shape), strict=True):
                yield hf_name, tensor, found.row is not None


def _rows_together(tensors: Iterator[tuple[str, Tensor, bool]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors.

    Tensors whose rows are experts are on the first of the expert-parallel ranks, once every rank has its rows.
    """
    waiting: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor, is_row in tensors:
        if not is_row:
            yield name, tensor
            continue
        waiting[name].append(tensor)
        group = parallel_state.get_expert_model_parallel_group()
        if len(waiting[name]) == num_experts // group.size():
            parts = _gathered(torch.stack(waiting.pop(name)), group)
            if parts is not None:
                yield name, torch.cat(parts)


def _whole(name: str, own: Tensor) -> Tensor:
    """The parameter `name` with the parts of all ranks that share it."""
    dim, group = convert.split_dim(name), tensor_group(name)
    if dim is None or group.size() == 1:
        return own
    parts = _gathered(own, group)
    return own if parts is None else convert.join(name, parts, dim)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """The tensors of all ranks of `group` in host memory, on the first of them; None on the others."""
    if group.size() == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(own.contiguous(), parts, group=group, group_dst=0)
    return None if parts is None else [part.cpu() for part in parts]
