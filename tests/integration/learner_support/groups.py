"""The end of Megatron-Core's process groups between two learners of one process."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state


def leave_groups() -> None:
    """Destroy all groups but the world, if there are any.

    Megatron-Core forgets them and leaves them open. Each holds threads and sockets, and looks at them a hundred times a
    second.
    """
    if not parallel_state.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
