"""Agreements between ranks outside of training, over a separate process group.

A thread can therefore make them while other threads train.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Peers:
    """All ranks of the run, or one process alone.

    Make it on every rank at the same point; use each object from one thread only.
    """

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        # Releases of torch declare other types of groups.
        self._group: Any = dist.new_group(backend="gloo") if several else None
        self.rank = dist.get_rank() if self._group is not None else 0
        self.size = dist.get_world_size() if self._group is not None else 1

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, by rank."""
        if self._group is None:
            return [message]
        length = torch.tensor([len(message)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        longest = max(1, *(int(num_bytes) for num_bytes in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, lengths, strict=True)]

    def any(self, flag: bool) -> bool:
        """True when the value is true on at least one rank."""
        if self._group is None:
            return flag
        flags = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags)

    def all(self, flag: bool) -> bool:
        """True when the value is true on every rank."""
        return not self.any(not flag)
