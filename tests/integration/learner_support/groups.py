"""The end of Megatron-Core's process groups between two learners of one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from megatron.core import parallel_state


def leave_groups() -> None:
    """Destroy the groups of Megatron-Core, if there are any; those of DeepSpeed, which it goes on using, stay.

    Megatron-Core forgets them and leaves them open. Each holds threads and sockets, and looks at them a hundred times a
    second.
    """
    if not parallel_state.is_initialized():
        return
    known = set(groups_of_megatron())
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group in known and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def groups_of_megatron() -> Iterator[dist.ProcessGroup]:
    """Every group that it holds, alone or in a list or table."""
    for held in vars(parallel_state).values():
        each = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else (held,)
        yield from (group for group in each if isinstance(group, dist.ProcessGroup))
