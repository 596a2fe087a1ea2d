"""One rollout server as the controller sees it: what it was asked, and which weights it is known to serve."""

from __future__ import annotations

from collections.abc import Mapping

from moe_trm.errors import EngineError
from moe_trm.rollout.sglang.endpoint import Door
from moe_trm.rollout.sglang.http import EngineHttp

MEMORY_TAGS = ("weights", "kv_cache")
"""What a server can lend, in the order in which it is taken back: weights are loaded before there is a cache."""
ABORT_PAUSE_S = 0.2
"""Pause between two requests to abort: one that was on its way at the first is met by the second."""


class RemoteServer:
    """Requests to one server.

    Args:
        http: its own connection, for everything but samples.
        door: where its samples are asked for, if that is not the server itself.

    Attributes:
        http: see above.
        version: of the weights it was proved to serve; None before the first push.
        updating: it is being given weights, and takes no new samples.
        fenced: it was lost, and takes no samples until it has been proved again.
        lent: its device memory is the learner's until it is given weights.
    """

    def __init__(self, http: EngineHttp, door: Door | None = None) -> None:
        self.http, self._door = http, door or Door(http)
        self.version: int | None = None
        self.updating = self.fenced = self.lent = False

    @property
    def in_flight(self) -> int:
        """Samples that its door was asked for and has not answered."""
        return self._door.in_flight

    @property
    def silent_s(self) -> float:
        """Seconds since its door last answered a sample, or was first asked for one; 0 while it owes none."""
        return self._door.silent_s

    async def ask(self, request: Mapping[str, object]) -> bytes:
        """See `Door.ask`."""
        return await self._door.ask(request)

    async def drained(self) -> None:
        """Return when nothing is in flight."""
        while self._door.in_flight:
            await self._door.wait()

    async def abort(self) -> None:
        """End what is in flight: each request is answered with as much as was sampled. Returns when nothing is in flight."""
        while self._door.in_flight:
            await self.http.request("POST", "/abort_request", {"rid": "", "abort_all": True})
            await self._door.wait(ABORT_PAUSE_S)

    def fence(self) -> None:
        """Take it out of service and give up what is in flight."""
        self.fenced = True
        self.lent = False  # one that comes back was started anew
        self._door.give_up()

    async def close(self) -> None:
        """Give up what is in flight and release the connections."""
        await self._door.close()
        await self.http.close()

    async def lend_memory(self) -> None:
        """Release the device memory of weights and cache, once nothing is in flight; their contents are lost."""
        await self.drained()
        await self.http.post("/release_memory_occupation", {"tags": [*MEMORY_TAGS]})
        self.lent = True

    async def reclaim_memory(self, tag: str) -> None:
        """Take the memory of `weights` or `kv_cache` back, if it was lent."""
        if self.lent:
            await self.http.post("/resume_memory_occupation", {"tags": [tag]})
            self.lent = tag != MEMORY_TAGS[-1]

    async def alive(self, timeout_s: float) -> bool:
        """Whether its front door answers; says nothing of the engine behind it, and so holds during a weight update too."""
        try:
            await self.http.request("GET", "/model_info", timeout_s=timeout_s, attempts=1)
        except EngineError:
            return False
        return True

    async def generates(self, timeout_s: float) -> bool:
        """Whether the engine behind the door makes tokens (SGLang's `/health`)."""
        try:
            await self.http.request("GET", "/health", timeout_s=timeout_s, attempts=1)
        except EngineError:
            return False
        return True
