"""Weights out of Megatron in Hugging Face form: each rank yields what it owns, and no rank gathers the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.model import EMBEDDING, OUTPUT, global_tensors, heads, tensor_group
from moe_trm.learner.megatron.policy import PolicyModel


@torch.no_grad()
def owned_tensors(chunks: Sequence[PolicyModel], hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors under their Hugging Face names; `hf` is config.json of the checkpoint. Collective.

    Experts are owned by the first of the ranks that share them, all other tensors by the first data-parallel rank that has them. Where
    tensor-parallel ranks hold parts, the first of them owns the whole, which is put together one tensor at a time in host memory and before
    the first one is yielded: a receiver that takes the ranks in turn must not keep the others from sending their parts.
    """
    tensors = _owned(chunks, hf)
    is_cut = any(tensor_group(name).size() > 1 for name, _ in global_tensors(chunks))
    yield from (list(tensors) if is_cut else tensors)


def _owned(chunks: Sequence[PolicyModel], hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    shape, tied, names = heads(hf), bool(hf.get("tie_word_embeddings", False)), convert.Names(hf)
    owns_experts = int(parallel_state.get_expert_data_parallel_rank()) == 0
    owns_shared = int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
    for name, parameter in global_tensors(chunks):
        is_copy = tied and name == OUTPUT
        if is_copy or not (owns_experts if convert.is_expert(name) else owns_shared):
            continue
        found, group = names.link(name), tensor_group(name)
        whole = _whole(name, parameter.detach(), found.packing)
        if group.rank() == 0:
            if name in (EMBEDDING, OUTPUT):
                whole = whole[: int(hf["vocab_size"])]
            yield from zip(found.hf_names, convert.unpack(found.packing, whole, shape), strict=True)


def _whole(name: str, own: Tensor, packing: str) -> Tensor:
    """The parameter `name` with the parts of all ranks that share it."""
    dim, group = convert.split_dim(name), tensor_group(name)
    if dim is None or group.size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(own.contiguous(), parts, group=group, group_dst=0)
    return own if parts is None else convert.join(packing, [part.cpu() for part in parts], dim)
