"""The memory of a server on loan to the learner. While it lasts, no process of the machine asks the server anything.

SGLang makes a token for a health check, also where its weights are unmapped, and its scheduler dies of that. So the
process that watches the server holds the loan while it asks, and the controller holds it from the release of the
memory to its return. The kernel ends a loan whose holder has died.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sys
import time
import urllib.parse

from moe_trm.errors import EngineError
from moe_trm.runtime.held_name import hold
from moe_trm.runtime.patience import patient

WAIT_S = 60.0
"""Longest wait for a process that asks the server whether it is well; SGLang answers within 20 s."""
POLL_S = 0.05


class Loan:
    """The loan of the server at `url`.

    It is known by the key and the port. The host is left out: whoever watches a server may reach it by another name.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        digest = hashlib.blake2b(str(port).encode(), key=hashlib.blake2b((api_key or "").encode()).digest())
        self._name, self._url = "\0moe-trm-loan-" + digest.hexdigest()[:32], url
        self._held: socket.socket | None = None

    @property
    def held(self) -> bool:
        """True while this object holds the loan."""
        return self._held is not None

    def try_take(self) -> bool:
        """Hold it, unless another process does."""
        if sys.platform == "linux" and self._held is None:
            self._held = hold(self._name)
            return self._held is not None
        return True

    async def take(self) -> None:
        """Hold it once no process asks the server anything. Raises `EngineError` when that does not end."""
        until = time.monotonic() + patient(WAIT_S)
        while not self.try_take():
            if time.monotonic() > until:
                raise EngineError(
                    "another process goes on asking a rollout server that is to lend its memory",
                    where=self._url,
                    got=f"no end within {WAIT_S:g} s",
                    expected="python -m launch.rollout, which asks for some seconds at a time",
                    fix="Look for a second process that holds this server's key.",
                )
            await asyncio.sleep(POLL_S)

    def release(self) -> None:
        """End it. Safe to call twice."""
        if self._held is not None:
            self._held.close()
            self._held = None
