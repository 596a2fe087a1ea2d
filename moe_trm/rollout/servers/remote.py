"""One rollout server as the controller sees it: its open requests, and the version of its weights."""

from __future__ import annotations

import time
from collections.abc import Callable

from moe_trm.errors import EngineError, EngineLost
from moe_trm.rollout.servers.arrival import ANSWER_S, Arrival
from moe_trm.rollout.servers.backend import ServerBackend
from moe_trm.rollout.servers.endpoint import Endpoint, Post, T
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.loan import Loan
from moe_trm.rollout.servers.ownership import label_of, refuse_foreign
from moe_trm.runtime.patience import patient
from moe_trm.types import ServerState

MEMORY_TAGS = ("weights", "kv_cache")
"""Memory that a server can release, in the order in which it is taken back: weights first, then the cache."""
ABORT_PAUSE_S = 0.2
"""Pause between two requests to abort: one that was on its way at the first is met by the second."""


class RemoteServer:
    """Requests to one server. `http` is its own connection; samples are asked for at `endpoint`, if that is another.

    `loan`: of its memory. `run` is the name of the run in the labels of its weights; empty: they are bare versions.

    Attributes:
        version: of the weights it was proved to serve; None before the first push.
        updating: it is being given weights, and takes no new samples.
        keeping: it is paused meanwhile, and keeps samples until the weights are proved.
        fenced: it was lost, and takes no samples until it has been proved again; `why` says for what.
        released: its device memory is the learner's until it is given weights.
    """

    def __init__(
        self,
        http: EngineHttp,
        backend: ServerBackend,
        endpoint: Endpoint | None = None,
        *,
        run: str = "",
        loan: Loan | None = None,
    ) -> None:
        self.http, self.backend, self._endpoint, self._run = http, backend, endpoint or Endpoint(http), run
        self._loan = loan or Loan(http.url, None)
        self.version: int | None = None
        self.updating = self.keeping = self.fenced = self.released = False
        self.why, self._fenced_at = "", 0.0
        self._arrival: Arrival | None = None

    @property
    def in_flight(self) -> int:
        """Samples that its endpoint was asked for and has not answered."""
        return self._endpoint.in_flight

    @property
    def silent_s(self) -> float:
        """Seconds since its endpoint last answered a sample, or first got a request; 0 while none is in flight."""
        return self._endpoint.silent_s

    async def ask(self, post: Post[T]) -> T:
        """See `Endpoint.ask`."""
        return await self._endpoint.ask(post)

    async def drained(self) -> None:
        """Return when nothing is in flight."""
        while self._endpoint.in_flight:
            await self._endpoint.wait()

    async def abort(self) -> None:
        """End what is in flight: each request is answered with as much as was sampled.

        Returns when nothing is in flight.
        """
        while self._endpoint.in_flight:
            await self.backend.abort(self.http)
            await self._endpoint.wait(ABORT_PAUSE_S)

    @property
    def state(self) -> ServerState:
        """Figures for the run's log and panel."""
        if self.fenced:
            return ServerState(self.http.url, time.monotonic() - self._fenced_at, self.why)
        return ServerState(self.http.url) if self._arrival is None else self._arrival.state

    def fence(self, why: str) -> None:
        """Take it out of service and drop its requests in flight."""
        self._fenced_at = self._fenced_at if self.fenced else time.monotonic()
        self.fenced, self.why = True, why
        self.end_loan()  # one that comes back was started anew
        self.give_up()

    def give_up(self) -> None:
        """Drop its requests in flight."""
        self._endpoint.give_up()

    async def close(self) -> None:
        """Give up what is in flight and release the connections."""
        await self._endpoint.close()
        await self.http.close()
        self.end_loan()

    @property
    def is_released(self) -> bool:
        """True while its memory is the learner's. Nobody asks it anything then, and it is not started again."""
        return self._loan.held

    async def lend(self, lost: Callable[[EngineLost], None]) -> None:
        """Lend its memory to the learner. One that is out of service is not started again before it is given back.

        `lost` is called where the server is lost in this.
        """
        if not self.fenced:
            try:
                await self.release_memory()
            except EngineLost as error:
                lost(error)
            else:
                return
        await self._loan.take()

    def end_loan(self) -> None:
        """Let others ask the server again. Safe to call twice."""
        self.released = False
        self._loan.release()

    async def release_memory(self) -> None:
        """Release the device memory of weights and cache, once nothing is in flight; their contents are lost."""
        await self.drained()
        await self._loan.take()
        await self.backend.release_memory(self.http, MEMORY_TAGS)
        self.released = True

    async def resume_memory(self) -> None:
        """Take the memory back, if it was released. The server does not generate before it is given weights."""
        if self.released:
            for tag in MEMORY_TAGS:
                await self.backend.resume_memory(self.http, tag)
        self.end_loan()

    async def alive(self, timeout_s: float) -> bool:
        """True when its process answers.

        It says nothing of the engine behind it, so it holds during a weight update too.
        """
        try:
            await self.http.request("GET", self.backend.alive_path, timeout_s=timeout_s, attempts=1)
        except EngineError:
            return False
        return True

    async def serves_proved(self, timeout_s: float) -> bool:
        """True when it has the label of its last proved version: it has not been restarted since.

        Raises `EngineError`, and `SyncError` where another run has given it weights.
        """
        label = await self.backend.version(self.http, timeout_s=timeout_s)
        refuse_foreign(label, self._run, self.http.url)
        return self.version is not None and label == label_of(self.version, self._run)

    async def started(self, limit_s: float) -> None:
        """Return when it generates; it may be loading for `limit_s`. Raises `EngineError`."""
        self._arrival = Arrival(self.http.url, limit_s)
        path = self.backend.health_path
        await self._arrival.of(lambda: self.http.request("GET", path, timeout_s=patient(ANSWER_S), attempts=1))
        self._arrival = None

    async def generates(self, timeout_s: float) -> bool:
        """True when the engine behind the process makes tokens."""
        try:
            await self.http.request("GET", self.backend.health_path, timeout_s=timeout_s, attempts=1)
        except EngineError:
            return False
        return True
