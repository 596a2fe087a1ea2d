"""The ranks that hold different rows of one batch: sums over them, and values of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm import summable


class DataGroup:
    """Collectives of the data-parallel ranks.

    Args:
        group: the process group.
        device: where its collectives work.

    Attributes:
        device: likewise.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """See `Learner.reduce`."""
        values = dict[str, float]()
        for role, operation in ((None, dist.ReduceOp.SUM), (":max", dist.ReduceOp.MAX), (":min", dist.ReduceOp.MIN)):
            names = [name for name in sums if (name.endswith(role) if role else not summable.compared(name))]
            if names:
                total = torch.stack([sums[name].detach().double().to(self.device) for name in names])
                dist.all_reduce(total, operation, group=self._group)
                values.update(zip(names, total.tolist(), strict=True))
        return {name: values[name] for name in sums}

    def gather(self, values: Tensor) -> Tensor:
        """See `Learner.gather`."""
        values = values.detach().to(self.device).contiguous()
        size = torch.tensor([len(values)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self._group)
        longest = max(int(other) for other in sizes)
        padded = torch.cat([values, values.new_zeros(longest - len(values))])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[: int(length)] for part, length in zip(parts, sizes, strict=True)])
