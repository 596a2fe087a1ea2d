"""Who can reach an address."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """True where only processes of this machine reach `host`, a name or an address. No name is looked up."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
