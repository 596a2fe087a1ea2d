"""The network interface of gloo process groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Name of the variable in which gloo finds the interface of its groups."""
LOOPBACK: Mapping[str, str] = MappingProxyType({INTERFACE: "lo"})
"""Environment of processes that have no peers elsewhere: nobody else's machine reaches the sockets of their groups."""
