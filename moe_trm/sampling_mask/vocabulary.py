"""Token ids of the rows of an output weight, and reductions over the ranks that hold the other ids.

Under tensor parallelism each rank owns a range of the vocabulary. Log-sum-exps, log-probs of single ids and gradients
of the hidden states are then summed over the group. Hidden states, targets and kept ids are the same on all its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Row `r` of the weight is id `first + r`.

    Attributes:
        first: the smallest id held here.
        num_ids: rows that are real ids; those after them pad the weight and take no part. None: every row is real.
        group: ranks that together hold the whole vocabulary, each its own range; None: this rank holds it all.
    """

    first: int = 0
    num_ids: int | None = None
    group: dist.ProcessGroup | None = None

    def real_rows(self, weight_VH: Tensor) -> Tensor:
        """`weight_VH` without its padding, as a view."""
        return weight_VH if self.num_ids is None else weight_VH[: self.num_ids]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranges, in place where there is more than one."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Largest over the ranges, in place where there is more than one."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values_NK: Tensor) -> Tensor:
        """`[N, K * ranks]`: the columns of every range, in the order of the ranks."""
        if self.group is None:
            return values_NK
        parts = [torch.empty_like(values_NK) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values_NK.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


WHOLE = Vocabulary()
"""One rank, no padding."""
