"""Export of Megatron's weights in Hugging Face form: each rank yields its own tensors, none gathers the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.model import EMBEDDING, OUTPUT, global_tensors, tensor_group
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.models.family import Link
from moe_trm.models.hf_config import num_experts


@dataclass(frozen=True)
class _Owned:
    """A parameter, of which this rank yields tensors once those that share it have brought their parts."""

    name: str
    tensor: Tensor
    link: Link
    group: dist.ProcessGroup


class OwnedTensors:
    """This rank's tensors under their Hugging Face names, in the order of its model.

    The first of the ranks that share an expert owns it. The first data-parallel rank that has any other tensor owns it.
    Where tensor-parallel ranks hold parts, or expert-parallel ranks rows of one tensor, the first of them owns the
    whole. Whole tensors are assembled one at a time in host memory, all of them before the first is yielded: a receiver
    that takes the ranks in turn must not keep the others from sending their parts.

    Parameters are found once: they keep their places as long as the model lives. `value` of a parameter is what passes
    compute with, merged with its adapter where it has one.
    """

    def __init__(
        self, chunks: Sequence[PolicyModel], hf: Mapping[str, Any], value: Callable[[Tensor], Tensor] = torch.detach
    ) -> None:
        names, tied = convert.Names(hf), bool(hf.get("tie_word_embeddings", False))
        owns_experts = int(parallel_state.get_expert_data_parallel_rank()) == 0
        owns_shared = int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
        candidates = [_Owned(name, held, names.link(name), tensor_group(name)) for name, held in global_tensors(chunks)]
        self._owned = [
            candidate
            for candidate in candidates
            if not (tied and candidate.name == OUTPUT)
            and (owns_experts if convert.is_expert(candidate.name) else owns_shared)
        ]
        self._is_cut = any(_holders(candidate).size() > 1 for candidate in candidates)
        self._shape, self._vocabulary, self._num_experts = convert.heads(hf), int(hf["vocab_size"]), num_experts(hf)
        self._value = value

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values. Collective."""
        tensors = _rows_together(self._parts(), self._num_experts)
        yield from (list(tensors) if self._is_cut else tensors)

    def _parts(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Name and tensor, and whether it is only one expert's row of the tensor of that name."""
        for tensor_place in self._owned:
            full_tensor = _whole(tensor_place, self._value(tensor_place.tensor))
            if tensor_place.group.rank() > 0:
                continue
            if tensor_place.name in (EMBEDDING, OUTPUT):
                full_tensor = full_tensor[: self._vocabulary]
            tensors = convert.unpack(tensor_place.link.packing, full_tensor, self._shape)
            for hf_name, tensor in zip(tensor_place.link.hf_names, tensors, strict=True):
                yield hf_name, tensor, tensor_place.link.row is not None


def _holders(owned: _Owned) -> dist.ProcessGroup:
    """Ranks that together hold the Hugging Face tensors of a parameter."""
    return owned.group if owned.link.row is None else parallel_state.get_expert_model_parallel_group()


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


def _whole(owned: _Owned, local: Tensor) -> Tensor:
    """The parameter with the parts of all ranks that share it."""
    dim = convert.split_dim(owned.name) if owned.group.size() > 1 else None
    if dim is None:
        return local
    parts = _gathered(local, owned.group)
    return local if parts is None else convert.join(owned.name, parts, dim)


def _gathered(local: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """The tensors of all ranks of `group` in host memory, on the first of them; None on the others."""
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(local.contiguous(), parts, group=group, group_dst=0)
    return None if parts is None else [part.cpu() for part in parts]
