"""Names that one process of a machine holds at a time. The kernel frees them when their holder ends, however it ends.

They are in Linux's abstract namespace, so they are names within the network namespace of the servers' addresses.
"""

from __future__ import annotations

import socket


def hold(name: str) -> socket.socket | None:
    """A socket that holds `name` until it is closed; None where another process holds it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(name)
        holder.listen()
    except OSError:
        holder.close()
        return None
    return holder
