"""The sockets of gloo process groups: which interface they are on, and one thread that watches all of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from torch.distributed import distributed_c10d

LOOPBACK: Mapping[str, str] = MappingProxyType({"GLOO_SOCKET_IFNAME": "lo"})
"""Environment of processes that have no peers elsewhere: nobody else's machine reaches the sockets of their groups."""

_Gloo: Any = distributed_c10d.ProcessGroupGloo


def share_gloo_device() -> None:
    """Let all gloo groups that this process makes from now on share their devices. Safe to call twice.

    By default each group has a device of its own, with a thread that wakes a hundred times a second. Megatron-Core
    makes about twenty groups, also for a single rank: together they cost a core several percent of its time.
    """
    if distributed_c10d.ProcessGroupGloo is _Gloo:
        distributed_c10d.ProcessGroupGloo = _SharingGroup  # type: ignore[misc]


class _SharingGroup(_Gloo):  # type: ignore[misc]
    """A group as torch makes it, over the devices of the groups before it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._timeout = timeout
        options._devices = list(_devices(os.getpid()))
        options._threads = 2 * len(options._devices)
        super().__init__(store, rank, size, options)


@lru_cache(maxsize=1)
def _devices(_process: int) -> tuple[Any, ...]:
    """Devices of this process, chosen as torch chooses them; a fork needs its own, because threads do not fork."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        return tuple(_Gloo.create_device(interface=name) for name in interfaces.split(","))
    return (_Gloo.create_default_device(),)
