"""The machine of this rank, from torchrun's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from moe_trm.config.schema import SyncConfig
from moe_trm.errors import ConfigError

if TYPE_CHECKING:  # the launcher imports no torch
    from torch.distributed import Store  # type: ignore[attr-defined]

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
        """From torchrun's environment. The address is the one this machine reaches the first rank's machine from.

        To itself a machine may be at loopback by its own name, as Debian writes it in /etc/hosts; see `seen_by_others`.
        """
        if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
            return cls(alone=True, address="127.0.0.1")
        return cls(alone=False, address=_address_towards(os.environ["MASTER_ADDR"]))

    def seen_by_others(self, store: Store) -> Host:
        """This machine with the address at which the other machines reach it. `store` is shared by all ranks."""
        if self.alone:
            return self
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        if local_rank == 0:
            store.set(f"address-{rank}", self.address)
        if not ip_address(self.address).is_loopback:
            return self
        # The ranks of a machine have numbers in a row: this is the first one of the next machine.
        next_rank = (rank - local_rank + int(os.environ["LOCAL_WORLD_SIZE"])) % int(os.environ["WORLD_SIZE"])
        return replace(self, address=_address_towards(store.get(f"address-{next_rank}").decode()))

    @property
    def interface(self) -> str:
        """Name of the network interface with this address. Raises `ConfigError` where none has it."""
        for name, addresses in psutil.net_if_addrs().items():
            if self.address in (entry.address.split("%")[0] for entry in addresses):
                return str(name)
        raise ConfigError(
            "no network interface has the address of this machine",
            got=self.address,
            expected=sorted(psutil.net_if_addrs()),
            fix="Name the interface towards the other machines in GLOO_SOCKET_IFNAME.",
        )


def push_place(sync: SyncConfig, run_dir: Path, *, on_one_host: bool) -> Path:
    """The folder in which the weight pushes' folder is made: `sync.dir`, or shared memory where there is one.

    Ranks on several machines share the run's folder; `on_one_host` as in `Host`.
    """
    if sync.dir:
        return Path(sync.dir)
    return SHARED_MEMORY if on_one_host and SHARED_MEMORY.is_dir() else run_dir


def _address_towards(host: str) -> str:
    """No packet is sent: connecting a datagram socket only asks the routing table."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return str(ip_address(address.split("%")[0]))
