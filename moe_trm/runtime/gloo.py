"""The network interface of gloo process groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LOOPBACK: Mapping[str, str] = MappingProxyType({"GLOO_SOCKET_IFNAME": "lo"})
"""Environment of processes that have no peers elsewhere: nobody else's machine reaches the sockets of their groups."""
