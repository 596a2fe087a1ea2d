"""Weights out of Megatron in Hugging Face form: each rank yields what it owns, and no rank gathers the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.model import global_parameters, heads
from moe_trm.learner.megatron.policy import PolicyModel


@torch.no_grad()
def owned_tensors(policy: PolicyModel, hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors under their Hugging Face names, one at a time; `hf` is config.json of the checkpoint.

    Experts are owned by the first of the ranks that share them, all other tensors by data rank 0.
    """
    shape = heads(hf)
    owns_experts = int(parallel_state.get_expert_data_parallel_rank()) == 0
    owns_shared = int(parallel_state.get_data_parallel_rank()) == 0
    for name, parameter in global_parameters(policy):
        if not (owns_experts if convert.is_expert(name) else owns_shared):
            continue
        found = convert.link(name)
        yield from zip(found.hf_names, convert.unpack(found.packing, parameter.detach(), shape), strict=True)
