"""One run for one server: a lease on it, and labels of weights that name the run which gave them.

Two runs that push to one server would sample from each other's weights. On one machine the second is refused. Where
they are on different machines, an answer of weights that the other run gave is told by its label, and rejected.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import struct
import sys
import time
import urllib.parse
from contextlib import suppress

from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.runtime.held_name import hold
from moe_trm.runtime.patience import patient

LEASE_WAIT_S = 20.0
"""A run that was stopped or killed may take so long to end."""
POLL_S = 0.2
MAX_VERSION_DIGITS = 9
"""Keeps versions inside int32."""

_LABEL = re.compile(r"(\d+)(?:-([0-9a-f]+))?", re.ASCII)


class Lease:
    """Held names (`moe_trm.runtime.held_name`) of the servers that one run samples from.

    They are made of the server's key, so that nobody without it can foretell them.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    async def take(self, url: str, api_key: str | None) -> None:
        """Hold the server at `url`. Raises `EngineError` where another run of this machine does."""
        if sys.platform != "linux":
            return
        name = await asyncio.to_thread(_name, url, api_key or "")
        until = time.monotonic() + patient(LEASE_WAIT_S)
        while (holder := hold(name)) is None:
            if time.monotonic() > until:
                raise EngineError(
                    "another run samples from this rollout server",
                    where=url,
                    got=_holder(name),
                    expected="one run for one server: each gives it weights of its own",
                    fix="Stop that run, or start a server for this one (rollout.url=null, or another address).",
                )
            await asyncio.sleep(POLL_S)
        self._held.append(holder)

    def release(self) -> None:
        """Let others have the servers. Safe to call twice."""
        while self._held:
            self._held.pop().close()


def label_of(version: int, run: str) -> str:
    """The label of weights `version` of a run; the bare number where `run` is empty."""
    return f"{version}-{run}" if run else str(version)


def version_of(label: str, run: str) -> int:
    """The version that a label names. Raises `RecordRejected` for one that no push of `run`, or of any, gave."""
    match = _LABEL.fullmatch(label)
    if match is None or (run and match[2] != run) or len(match[1]) > MAX_VERSION_DIGITS:
        raise RecordRejected(
            "version_unknown",
            "the engine serves weights that no push of this run gave it",
            got=label,
            expected=label_of(0, run).replace("0", "VERSION", 1),
            fix="Push weights before the first sample, and let no other run push to this server.",
        )
    return int(match[1])


def refuse_foreign(label: str, run: str, url: str) -> None:
    """Raise `SyncError` for weights that another run gave this server."""
    match = _LABEL.fullmatch(label)
    if run and match is not None and match[2] not in (None, run):
        raise SyncError(
            "another run gives this rollout server its weights",
            where=url,
            got=f"weights labelled {label}",
            expected=f"those of this run, which end in -{run}",
            fix="Stop one of the two runs, or give each a server of its own, and start this one again. It has trained "
            "on no sample of the other.",
        )


def _name(url: str, api_key: str) -> str:
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError):
        host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return "\0moe-trm-server-" + hashlib.blake2b(f"{host} {port}".encode(), key=_digest(api_key)).hexdigest()[:32]


def _digest(api_key: str) -> bytes:
    return hashlib.blake2b(api_key.encode()).digest()


def _holder(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(name)
        process, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {process} of user {user}"
    return "a process that does not say who it is"
