"""The port of a rollout server, held while the server starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from moe_trm.errors import EngineError


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port itself when it is free (any free one for 0), kept from others until the block ends.

    A server imports for many seconds before it listens. Meanwhile the system would give the port to anyone who asks for
    a free one, or use it for an outgoing connection. A socket that is bound and does not listen prevents both, and lets
    a server that sets SO_REUSEADDR have the port.

    Raises:
        EngineError: the address is not available. Another server there would answer our health check.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise EngineError(
                "the rollout server's address is not available",
                where="config keys rollout.server.host and rollout.server.port",
                got=f"{host}:{port} ({error.strerror})",
                expected="a free port of this machine",
                fix="Stop what uses it, choose another port, or set rollout.url to attach to a running server.",
            ) from error
        yield int(holder.getsockname()[1])
