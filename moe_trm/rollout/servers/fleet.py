"""The rollout servers together: the least loaded one gets each request, and all get every push.

Where the next samples are known to come (`expect`), a server takes them once it is paused for the push, and computes
them once its weights are proved, or never. With rolling pushes, servers get it in turn, and the others go on with the
version before. A sample ends at the server that began it, so it has one version.

A lost server is fenced until its weights are proved again. Its samples are requested again, elsewhere or from it once
it is back; only the first answer is read. A server that computes with other weights than it was given is left out for
good, and so is one that three times in a row is given weights until the next ones are there. The last one stops the
run.

A router chooses among the servers in service. Since it is unknown which server has a sample, they all get their weights
at the same time, and the loss of one means that all samples in flight are requested again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from moe_trm.errors import EngineError, EngineLost, MoeTrmError, SyncError
from moe_trm.rollout.servers.given_up import failed_everywhere, none_came_back, too_slow
from moe_trm.rollout.servers.http import Body, EngineSlow, HttpStatusError, refused
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.router import Router
from moe_trm.rollout.servers.use_proof import ServerUnfit
from moe_trm.runtime.patience import patient
from moe_trm.types import ServerState

REISSUES = 8
"""Times that one sample is asked for again before it is rejected (`engine_failed`)."""
SLOW_REISSUES = 1
"""The same for one that a server which is well did not finish within `rollout.timeout_s`."""
MOST_REFUSED = 256
"""Requests that are refused before one is answered, after which the run ends."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Pause before a sample is asked for again; it doubles."""
WATCH_S = 2.0
"""Pause between two looks at the servers, and longest between two at one that is lost."""
SILENCE_S = 5.0
"""A server with samples in flight that answered none for so long is asked whether it is there."""
PROBE_TIMEOUT_S = 10.0
"""Longest time in which a server that is there says so; one that does not, twice in turn, is out of service."""
LATE_LOADS = 3
"""Loads in a row that end after the next push, at which a lost server is given up: it never catches up."""
HEALTH_S = 30.0
"""Longest time in which a working engine makes a token for a health check; SGLang itself gives up after 20 s."""

log = logging.getLogger(__name__)

Load = Callable[[RemoteServer], Awaitable[None]]
"""Gives a server the newest weights and proves that it serves them; sets its `version`."""


class Fleet:
    """Keeps samples coming from the servers that have the newest weights.

    Args:
        interrupt: end what a server samples when it is given weights, instead of waiting for it.
        patience_s: longest time without any server, or without the router, before the run is given up.
        router: chooses the server of each sample, if there is one; then all servers have its endpoint.
        rolling: servers are given weights in turn, and those whose turn has not come go on sampling.
    """

    def __init__(
        self,
        servers: Sequence[RemoteServer],
        load: Load,
        *,
        interrupt: bool,
        patience_s: float,
        router: Router | None = None,
        rolling: bool = False,
    ) -> None:
        self.servers, self._router = tuple(servers), router
        self._load, self._interrupt, self._patience_s = load, interrupt, patience_s
        self._rolling, self._waiting = rolling, set[RemoteServer]()
        self._version: int | None = None
        self._expected: int | None = None
        self._changed = asyncio.Event()
        self._repairs: dict[RemoteServer, asyncio.Task[None]] = {}
        self._updates: dict[RemoteServer, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.reissued = self.lost = self.recovered = self._refused = 0
        self._answers, self._suspects, self._unfit = False, set[RemoteServer](), set[RemoteServer]()
        self._lost_s = 0.0

    def start(self) -> None:
        """Begin to watch."""
        self._watch = asyncio.ensure_future(self._watching())
        self._watch.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop watching and release the connections."""
        tasks = [*self._repairs.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.close()

    async def ask(self, request: Body) -> tuple[bytes, int | None]:
        """The body of an answer to `request` by a server with the newest weights, and the place of that server.

        It is None behind a router, and where there is one server only.

        Raises:
            RecordRejected: `engine_failed`, when servers that are well fail on this request again and again; `refused`,
                when a server refuses it and answers others.
            EngineError: no server came back in time, the key is wrong, or all requests are refused.
        """
        slow, path = 0, self.servers[0].backend.generate_path
        for attempt in range(REISSUES + 1):
            server = await self._ready()
            try:
                body = await server.ask(lambda http: http.request("POST", path, request))
            except (HttpStatusError, EngineLost) as error:
                if isinstance(error, HttpStatusError) and server.backend.refuses_request(error.status, str(error.got)):
                    raise self._refusal(error) from error
                if not isinstance(error, EngineLost):
                    raise
                lost = error
            else:
                self._answers = True
                alone = self._router is not None or len(self.servers) == 1
                return body, None if alone else self.servers.index(server)
            slow += isinstance(lost, EngineSlow) and not server.fenced
            if slow > SLOW_REISSUES:
                break
            self.reissued += 1
            if not server.fenced and not await server.generates(patient(HEALTH_S)):
                self._fence(server, lost)
            if self._router is not None:
                self._router.forget()
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise failed_everywhere(lost)

    def _refusal(self, error: HttpStatusError) -> Exception:
        """One sample's fault is one sample's. A server that refuses all of them is not the configured one."""
        self._refused += 1
        return error if not self._answers and self._refused >= MOST_REFUSED else refused(error)

    def expect(self, version: int) -> None:
        """Let samples wait for the weights of `version`, which `update` brings; nothing may be in flight."""
        self._version = self._expected = version

    def expects(self, version: int) -> bool:
        """True when samples were told to wait for these weights."""
        return self._expected == version

    @contextmanager
    def keeping(self, server: RemoteServer) -> Iterator[None]:
        """Inside, `server` is paused and is asked for samples, if they are to wait for the weights that it is given.

        It must not go on before the end. When the block fails, they are given up and asked for again.
        """
        # Behind a router it is unknown which server a sample would reach. A server that had no weights is looked at
        # first, and one without its memory has no room.
        able = server.updating and server.version is not None and not server.released
        if not able or self._expected != self._version or self._router is not None or self._rolling:
            yield
            return
        server.keeping = True
        self._changed.set()
        try:
            yield
        except BaseException:
            server.keeping = False
            server.give_up()
            raise
        finally:
            server.keeping = False

    async def update(self, version: int) -> None:
        """Give every server that is in service the weights of `version`, each at its own pace or one after the other.

        Returns when at least one serves them; those that failed are fenced and follow. Raises `SyncError` where loaded
        weights are not the learner's, `EngineError` when no server came back in time.
        """
        self._version = version
        for server in (server for server in self.servers if server.fenced):
            server.end_loan()
        if self._rolling:
            await self._roll()
        else:
            await asyncio.gather(*(self._update(server) for server in self.servers if not server.fenced))
        await self._ready()

    def serving(self, version: int) -> RemoteServer | None:
        """The least busy server that was proved to serve the weights of `version` and takes requests now."""
        able = [
            server
            for server in self.servers
            if server.version == version and not (server.fenced or server.updating or server.is_released)
        ]
        return min(able, key=lambda server: server.in_flight, default=None)

    async def lend_memory(self) -> None:
        """Lend the memory of every server to the learner, until the next `update`. Raises `EngineError`."""
        await asyncio.gather(*(server.lend(partial(self._fence, server)) for server in self.servers))

    async def fence_restarted(self) -> None:
        """Fence servers that were restarted while idle: their label differs. Raises `SyncError` if another run's."""
        for server in self.servers:
            if server.fenced or server.updating or server.is_released:
                continue
            try:
                same = await server.serves_proved(patient(PROBE_TIMEOUT_S))
            except EngineLost:
                same = False
            if not same:
                self._fence(server, EngineLost("the rollout server was started again", where=server.http.url))

    def metrics(self) -> dict[str, float]:
        """See `ServerEngine.metrics`."""
        away = [state.lost_s for state in self.states() if state.lost_s is not None]
        return {
            "rollout/reissued": float(self.reissued),
            "rollout/losses": float(self.lost),
            "rollout/lost_s": self._lost_s + sum(away),
            "rollout/recoveries": float(self.recovered),
            "rollout/servers": float(len(self.servers) - len(away)),
            "rollout/servers_lost": float(len(away)),
        }

    def states(self) -> tuple[ServerState, ...]:
        """Each server now."""
        return tuple(server.state for server in self.servers)

    async def _update(self, server: RemoteServer) -> None:
        server.updating = True
        self._updates[server] = asyncio.ensure_future(self._give(server))
        try:
            await self._updates[server]
        except ServerUnfit as error:
            self._leave_out(server, error)
        except EngineLost as error:
            self._fence(server, error)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not server.fenced or (this is not None and this.cancelling()):
                raise
        finally:
            server.updating = False
            self._changed.set()

    async def _roll(self) -> None:
        """Each server in turn. One that was lost meanwhile is given its weights by the task that repairs it."""
        # A run that begins has no other server to go on with.
        self._waiting = {server for server in self.servers if not server.fenced and server.version is not None}
        try:
            for server in self.servers:
                self._waiting.discard(server)
                if not server.fenced and server.version != self._version:
                    await self._update(server)
        finally:
            self._waiting = set()

    def _may_sample(self, server: RemoteServer) -> bool:
        """True for a server that has the newest weights, waits its turn for them, or keeps samples until then."""
        if server.fenced or server.is_released:
            return False
        current = server.version == self._version or server in self._waiting
        return server.keeping or (current and not server.updating)

    async def _give(self, server: RemoteServer) -> None:
        await (server.abort() if self._interrupt else server.drained())
        await self._load(server)

    async def _ready(self) -> RemoteServer:
        """The least loaded server with the newest weights, as soon as there is one."""
        while True:
            if self._failure is not None:
                raise self._failure
            able = [server for server in self.servers if self._may_sample(server)]
            if able and self._router is None:
                return min(able, key=lambda server: server.in_flight)
            if able and self._router is not None and not any(server.updating for server in self.servers):
                if await self._chosen_among(able, self._router):
                    return able[0]
                continue
            self._changed.clear()
            await self._changed.wait()

    async def _chosen_among(self, able: Sequence[RemoteServer], router: Router) -> bool:
        """True when the router chooses among these servers, still the right ones. Waits a little if it is missing."""
        try:
            await router.choose_among(frozenset(server.http.url for server in able))
        except EngineLost as error:
            log.warning("router: %s (%s)", error.what, error.got)
            if router.lost_s > self._patience_s:
                self._give_up(error)
            await asyncio.sleep(FIRST_PAUSE_S)
            return False
        return not any(server.fenced or server.updating for server in able)

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self._router is not None:
                self._router.forget()
                if self._router.endpoint.silent_s > patient(SILENCE_S):
                    await self._router.give_up_if_stuck()
            await asyncio.gather(*(self._look(server) for server in self.servers))

    async def _look(self, server: RemoteServer) -> None:
        # Others wait for a server that is given weights; behind a router the answers of one hide the silence of
        # another.
        hidden = server.updating or (self._router is not None and server.in_flight)
        timeout_s = patient(PROBE_TIMEOUT_S)
        unasked = server.fenced or server.is_released or not (hidden or server.silent_s > patient(SILENCE_S))
        if unasked or await server.alive(timeout_s):
            self._suspects.discard(server)
        elif server not in self._suspects:
            self._suspects.add(server)
        else:
            why = f"nothing in {timeout_s:g} s, twice"
            self._fence(server, EngineLost("the rollout server is silent", where=server.http.url, got=why))

    def _leave_out(self, server: RemoteServer, why: ServerUnfit) -> None:
        """Go on without this server for good. Raises `why` where it is the last one."""
        self._unfit.add(server)
        if self._unfit == {*self.servers}:
            raise why
        self._fence(server, why)

    def _fence(self, server: RemoteServer, why: MoeTrmError) -> None:
        """Take it out of service until it is repaired, or for good."""
        unfit = server in self._unfit
        if server.fenced and not unfit:
            return
        self.lost += not server.fenced
        server.fence(f"{why.what} ({why.got})" if why.got is not None else why.what)
        log.warning("rollout server %s is out of service: %s", server.http.url, server.why)
        if unfit:
            return
        if server in self._updates:
            self._updates[server].cancel()
        self._repairs[server] = asyncio.ensure_future(self._repair(server))
        self._repairs[server].add_done_callback(self._ended)

    async def _repair(self, server: RemoteServer) -> None:
        """Wait until the server serves the newest weights, proved. `patience_s` without any server ends the run."""
        clock = asyncio.get_running_loop().time
        deadline, pause = clock() + self._patience_s, FIRST_PAUSE_S
        late = 0
        while True:
            newest = self._version
            try:
                if server.is_released:  # it comes back when there is room
                    deadline = clock() + self._patience_s
                elif await server.generates(patient(HEALTH_S)):
                    if await self._reload_if_restarted(server):
                        break
                    late += newest != self._version
            except ServerUnfit as error:
                self._leave_out(server, error)
                return
            except SyncError as error:
                # A slow server may come too late: files of a push are deleted when there are two newer ones.
                if newest == self._version:
                    self._give_up(error)
                    return
                late += 1
                log.info("rollout server %s is given newer weights: %s", server.http.url, error.what)
            except EngineError as error:
                log.info("rollout server %s: %s", server.http.url, error.what)
            if late == LATE_LOADS:
                self._leave_out(server, too_slow(server.http.url, late))
                return
            if clock() > deadline and all(peer.fenced for peer in self.servers):
                self._give_up(none_came_back((peer.http.url for peer in self.servers), self._patience_s))
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, WATCH_S)
        self._lost_s += server.state.lost_s or 0.0
        server.fenced = False
        self.recovered += 1
        log.warning("rollout server %s is back, with weights of version %s", server.http.url, server.version)
        self._changed.set()

    async def _reload_if_restarted(self, server: RemoteServer) -> bool:
        """Load the weights again, unless the label of the last proved version shows that the server never restarted.

        False where newer ones came meanwhile.
        """
        if self._version is None or await self._has_newest(server):
            return True
        newest, server.version = self._version, None
        await self._load(server)
        return newest == self._version and await self._has_newest(server)

    async def _has_newest(self, server: RemoteServer) -> bool:
        return server.version == self._version and await server.serves_proved(patient(PROBE_TIMEOUT_S))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Callers that wait for a server must not wait for a task that died."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()
