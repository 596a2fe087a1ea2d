"""The ranks that hold different rows of one batch: sums over them, and values of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.methods import summable


class DataGroup:
    """Collectives of the data-parallel ranks, on tensors of `device`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """See `Learner.reduce`."""
        if not sums:
            return {}
        values = torch.stack([value.detach().double() for value in sums.values()]).to(self.device)
        # A minimum is the largest of values with the other sign.
        signs = values.new_tensor([-1.0 if name.endswith(":min") else 1.0 for name in sums])
        compared = torch.tensor([summable.compared(name) for name in sums], device=self.device)
        largest = values * signs
        if not bool(compared.all()):
            dist.all_reduce(values, group=self._group)
        if bool(compared.any()):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return dict(zip(sums, torch.where(compared, signs * largest, values).tolist(), strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """See `Learner.gather`."""
        values = values.detach().to(self.device).contiguous()
        size = torch.tensor([len(values)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self._group)
        longest = max(int(num_values) for num_values in sizes)
        padded = torch.cat([values, values.new_zeros(longest - len(values))])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[: int(length)] for part, length in zip(parts, sizes, strict=True)])
