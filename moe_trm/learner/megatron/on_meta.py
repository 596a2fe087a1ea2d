"""The model of one rank of a layout, built without memory and without the other ranks.

Tensors are on torch's meta device. Process groups are torch's fake ones: they have the real sizes, and exchange
nothing. `torch.testing._internal.distributed.fake_pg`, the one module of torch that is private and imported here,
registers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_trm.config.schema import LearnerConfig
from moe_trm.learner.megatron.build import start_parallel_groups
from moe_trm.learner.megatron.layers import Layers
from moe_trm.learner.megatron.model import build_model, transformer_config


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of many that are not there. It must be in no process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def num_parameters(
    hf: Mapping[str, Any], learner: LearnerConfig, layers: Layers, rank: int, world_size: int, *, exact: bool = False
) -> int:
    """Elements of the parameters that Megatron-Core gives this rank of the layout. Raises what it raises."""
    with fake_rank(rank, world_size), torch.random.fork_rng(devices=[]):
        start_parallel_groups(learner.parallel, seed=0, with_gloo=False)
        config = transformer_config(hf, learner, layers, exact=exact)
        with torch.device("meta"):
            chunks = build_model(hf, config, layers)
        return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
