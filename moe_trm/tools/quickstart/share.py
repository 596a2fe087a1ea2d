"""Processes that share the work of the warm-up: each computes its part of every batch, all make the same steps.

Shape letters: N numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.runtime.lifeline import end_with_parent

T = TypeVar("T")


class BatchShare:
    """The part of one process; by itself it has all of the work.

    Attributes:
        rank: of this process; only the first speaks and writes.
        size: processes.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """The items that this process computes."""
        return items[self.rank :: self.size]

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all processes, in one message."""
        if self.size == 1:
            return list(tensors)
        flat_N = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat_N)
        parts = torch.split(flat_N, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)]

    def total(self, number: float) -> float:
        """The sum of the numbers of all processes."""
        [value] = self.sums([torch.tensor(number, dtype=torch.float64)])
        return float(value)


def forked(size: int) -> BatchShare:
    """Fork this process into `size` that go on from here, each with one thread, and end with the first.

    Call it before torch has computed anything with several threads.
    """
    torch.set_num_threads(1)
    if size == 1:
        return BatchShare()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    rank = 0
    sys.stdout.flush()
    for child_rank in range(1, size):
        if os.fork() == 0:
            rank = child_rank
            end_with_parent()
            store = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
            break
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return BatchShare(rank, size)
