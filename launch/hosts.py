"""The machine of this rank, from torchrun's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from moe_trm.config.schema import SyncConfig

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Host:
    """This rank's machine.

    Attributes:
        alone: all ranks are on this machine.
        address: where the other ranks and the rollout server reach it; loopback when it is alone.
    """

    alone: bool
    address: str

    @classmethod
    def here(cls) -> Host:
        """From torchrun's environment. The address is the one this machine reaches the first rank's machine from."""
        if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
            return cls(alone=True, address="127.0.0.1")
        return cls(alone=False, address=_address_towards(os.environ["MASTER_ADDR"]))


def push_place(sync: SyncConfig, run_dir: Path, *, alone: bool) -> Path:
    """The folder in which that of the weight pushes is made: `sync.dir`, or shared memory where there is one.

    Ranks on several machines share the run's folder; `alone` as in `Host`.
    """
    if sync.dir:
        return Path(sync.dir)
    return SHARED_MEMORY if alone and SHARED_MEMORY.is_dir() else run_dir


def _address_towards(host: str) -> str:
    """No packet is sent: connecting a datagram socket only asks the routing table."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return str(ip_address(address.split("%")[0]))
