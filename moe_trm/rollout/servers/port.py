"""The port of a rollout server, held while the server starts."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moe_trm.errors import EngineError


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port itself when it is free (any free one for 0), kept from others until the block ends.

    A server imports for many seconds before it listens. Meanwhile the system would give the port to anyone who asks for
    a free one. A bound socket that does not listen prevents that, and lets a server that sets SO_REUSEADDR have the
    port. A name in Linux's abstract namespace, which one process of this network has at a time, keeps other holders
    away.

    Raises `EngineError` where the address is not available, or another job starts its server there, which would answer
    our health check.
    """
    with (
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim,
    ):
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise _taken(host, port, error.strerror or "") from error
        number = int(holder.getsockname()[1])
        if sys.platform == "linux":
            try:
                claim.bind(f"\0moe-trm-port-{host}-{number}")
            except OSError as error:
                raise _taken(host, number, "another job starts its server there") from error
        yield number


def _taken(host: str, port: int, why: str) -> EngineError:
    return EngineError(
        "the rollout server's address is not available",
        where="config keys rollout.server.host and rollout.server.port",
        got=f"{host}:{port} ({why})",
        expected="a free port of this machine",
        fix="Stop what uses it, choose another port (0: any), or set rollout.url to attach to a running server.",
    )
