"""Addresses, by who can reach them."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True where only processes of this machine reach `host`, a name or an address. No name is looked up."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def in_the_clear(addresses: Iterable[str]) -> tuple[str, ...]:
    """Those to which a key would be sent over a network without encryption."""
    asked = [urlsplit(address) for address in addresses]
    return tuple(url.geturl() for url in asked if url.scheme != "https" and not is_loopback(url.hostname or ""))
