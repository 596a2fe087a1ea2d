"""Groups of a broadcast push that refuse at once what NCCL would answer with a hang, a crash or wrong bytes.

Bytes travel by gloo, through host memory. All else of such a push keeps NCCL's rules:

- tensors are contiguous, not empty, and of types that NCCL has;
- every rank of a group makes the same broadcasts in the same order: as many elements, the same type and root;
- a rank that is in several groups makes their broadcasts in the same order as every other rank that is in them, because
  a device executes one after the other;
- nothing but broadcasts is asked of a group, so no objects are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from torch import Tensor

from tests.unit.other_device import NCCL_TYPES


class NcclRules:
    """What the ranks of all groups did so far."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._made: dict[tuple[str, int], tuple[int, str, int, int]] = {}
        self._orders: dict[int, list[str]] = {}

    def joining(self, join: Callable[..., Any]) -> Callable[..., Group]:
        """`join_group`, whose groups keep the rules."""
        return lambda store, group, rank, size, timeout: Group(
            self, join(store, group, rank, size, timeout), group, rank
        )

    def check(self, group: str, rank: int, number: int, tensors: Sequence[Tensor], options: Any) -> None:
        """Raise `AssertionError` where the broadcast `number` of this group breaks a rule."""
        (tensor,) = tensors
        assert tensor.is_contiguous(), f"NCCL takes no tensor that is not contiguous: {tuple(tensor.shape)}"
        assert tensor.numel(), "NCCL has nothing to send"
        assert tensor.dtype in NCCL_TYPES, f"NCCL has no {tensor.dtype}"
        call = (tensor.numel(), str(tensor.dtype), options.rootRank, options.rootTensor)
        with self._lock:
            first = self._made.setdefault((group, number), call)
            assert call == first, f"{group}, broadcast {number}: rank {rank} makes {call}, another rank {first}"
            if rank:
                self._check_order(group, rank)

    def _check_order(self, group: str, rank: int) -> None:
        """Rank 0 is the sender, which is in one group."""
        order = self._orders.setdefault(rank, [])
        order.append(group)
        for peer, peer_order in self._orders.items():
            together = min(len(order), len(peer_order))
            assert order[:together] == peer_order[:together], f"ranks {rank} and {peer} take groups in different orders"


class Group:
    """One rank's end of a group."""

    def __init__(self, rules: NcclRules, group: Any, name: str, rank: int) -> None:
        self._rules, self._group, self._name, self._rank, self._number = rules, group, name, rank, 0

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        self._rules.check(self._name, self._rank, self._number, tensors, options)
        self._number += 1
        return self._group.broadcast(tensors, options)
