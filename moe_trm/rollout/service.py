"""The controller as a process: a local socket in front of `RolloutController`.

Requests and replies are `wire` messages on a ZeroMQ socket. Every request carries the run's key, compared in constant
time. Started by the first learner rank of a node: `python -m moe_trm.rollout.service`, configuration and key on
standard input.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from moe_trm.config.schema import Config
from moe_trm.errors import ControllerError, ControllerLeaving, MoeTrmError
from moe_trm.rollout.batch_table import BatchTable, table_of
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.rank_share import rank_share
from moe_trm.runtime import wire
from moe_trm.runtime.ending import run_to_end
from moe_trm.runtime.interruption import ASKED
from moe_trm.sync.disk import finish_push
from moe_trm.sync.manifest import Meeting, ScoredText, Share, TensorEntry
from moe_trm.types import ServerState

ENDS = signal.SIGUSR1
"""Signal by which the rank that started the controller ends it. Others may send SIGTERM to every process of a job."""
LAST_ANSWERS_S = 5.0
"""Time that requests in progress may take after the request to stop."""
REQUEST_LIMIT_BYTES = 256 << 20
"""Largest message that is accepted; the sender of a larger one is disconnected."""
MOST_FILES = 1 << 16
HEARTBEAT_MS, SILENCE_MS = 5_000, 60_000
"""Between two signs of life of a connection, and the longest time without one until it is made anew."""


class Start(msgspec.Struct, frozen=True):
    """Parameters that the parent writes to the service's standard input, as one line of JSON.

    With `secret_key` the socket speaks CurveZMQ only.
    """

    endpoint: str
    key: str
    config: dict[str, Any]
    api_key: str | None
    secret_key: str = ""


class Request(msgspec.Struct, frozen=True):
    """`begin`: the engine has answered. `batch`: this rank's share of `step`, or of a `part` of it. `push`: this rank's
    shard of `version`. `evaluate`: its metrics.

    `servers`: their state now. `state`: what a checkpoint keeps of the controller; `restore`: go on after `state`,
    before the first push. `leave`: this rank was asked to stop, so what is not finished is refused to all. `stop`: end
    the process.

    `number`: of this rank's requests; one that is asked again, because its answer may be lost, keeps it.
    """

    key: str
    op: str
    number: int = 0
    step: int = 0
    part: int = 0
    rank: int = 0
    num_ranks: int = 1
    data_rank: int = 0
    data_size: int = 1
    layer_ids: tuple[int, ...] = ()
    version: int = 0
    directory: str = ""
    entries: tuple[TensorEntry, ...] = ()
    meeting: Meeting | None = None
    texts: tuple[ScoredText, ...] = ()
    state: dict[str, Any] = {}


class ControllerReply(msgspec.Struct, frozen=True):
    """`error` is empty when the request succeeded; `may_pass` as of the error. `number`: of the request.

    `proves_tensors`: as of the controller, in the answer to a push.
    """

    error: str = ""
    may_pass: bool = False
    number: int = 0
    proves_tensors: bool = True
    servers: tuple[ServerState, ...] = ()
    leaving: bool = False
    batch: BatchTable | None = None
    metrics: dict[str, float] = {}
    state: dict[str, Any] = {}


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Let a socket notice a connection that has died without a word, and make a new one."""
    socket.setsockopt(SocketOption.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(SocketOption.HEARTBEAT_TIMEOUT, SILENCE_MS)


class ControllerService:
    """Answers the ranks. Work that all ranks ask for (a step, a push) runs once; everyone waits for the same result.

    So a request that is asked again changes nothing, and gets the same answer.
    """

    def __init__(self, controller: RolloutController, start: Start, checkpoint: str) -> None:
        self._controller, self._start, self._checkpoint = controller, start, checkpoint
        self._shared: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._answering: set[tuple[bytes, int]] = set()
        self._shards: dict[int, dict[int, Request]] = {}
        self._pushed: dict[int, asyncio.Event] = {}
        self._loading: asyncio.Future[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._stop, self._leaving = asyncio.Event(), asyncio.Event()
        self._finished: set[tuple[str, int]] = set()

    @property
    def started(self) -> bool:
        """True once its engine has answered."""
        return self._starting is not None and self._starting.done()

    def leave(self) -> None:
        """A rank, or everything on this machine, was asked to end: refuse what is not finished by now.

        The ranks then undo the step that they wait for, and save; their states are still given. Work is shared, so all
        of them get the same answer: what one has, the others get as well.
        """
        if not self._leaving.is_set():
            self._finished = {key for key, work in self._shared.items() if work.done()}
            self._leaving.set()

    async def serve(self) -> None:
        """Start the controller, and answer until a rank asks to stop. A cancellation closes the controller too.

        Until the engine has answered, only its servers are told of. Raises `EngineError` where it does not.
        """
        socket = zmq.asyncio.Context.instance().socket(SocketType.ROUTER)
        socket.setsockopt(SocketOption.LINGER, 1000)
        socket.setsockopt(SocketOption.MAXMSGSIZE, REQUEST_LIMIT_BYTES)
        keep_alive(socket)
        # A rank whose connection was lost comes back under its name: answers go to where it is now.
        socket.setsockopt(SocketOption.ROUTER_HANDOVER, 1)
        if self._start.secret_key:
            socket.curve_secretkey, socket.curve_server = self._start.secret_key.encode(), True
        socket.bind(self._start.endpoint)
        pending: set[asyncio.Task[None]] = set()
        stop = asyncio.ensure_future(self._stop.wait())
        self._starting = starting = asyncio.ensure_future(self._start_controller())
        try:
            while not self._stop.is_set():
                received = asyncio.ensure_future(socket.recv_multipart())
                await asyncio.wait({received, stop}, return_when=asyncio.FIRST_COMPLETED)
                if received.done():
                    identity, *frames = received.result()
                    task = asyncio.create_task(self._answer(socket, identity, frames))
                    pending.add(task)
                    task.add_done_callback(pending.discard)
                else:
                    received.cancel()
            if pending:
                await asyncio.wait(pending, timeout=LAST_ANSWERS_S)
            if starting.done():
                starting.result()
        finally:
            starting.cancel()
            # Whoever waits for a rank that is gone would wait for ever.
            for task in pending:
                task.cancel()
            await self._controller.close()
            socket.close()

    async def _start_controller(self) -> None:
        try:
            await self._controller.start()
        except BaseException:
            self._stop.set()
            raise

    async def _answer(self, socket: zmq.asyncio.Socket, identity: bytes, frames: list[bytes]) -> None:
        number, op = 0, ""
        try:
            request = wire.decode(frames, Request)
            number, op = request.number, request.op
            if not hmac.compare_digest(request.key.encode(), self._start.key.encode()):
                raise ControllerError(
                    "wrong controller key", fix="Only the ranks of this run may talk to its controller."
                )
            if request.op not in self._handlers:
                raise ControllerError("unknown request", got=request.op, expected=sorted(self._handlers))
            if (identity, number) in self._answering:
                return
            self._answering.add((identity, number))
            try:
                if request.op not in ("servers", "stop") and self._starting is not None:
                    await asyncio.shield(self._starting)
                reply = await self._reply(request)
            finally:
                # Before the answer is sent: it may be lost with its connection, and is then asked for again.
                self._answering.remove((identity, number))
        except MoeTrmError as error:
            _log(f"refused '{op}': {type(error).__name__}: {error}")
            leaving = isinstance(error, ControllerLeaving)
            reply = ControllerReply(error=f"{type(error).__name__}: {error}", may_pass=error.may_pass, leaving=leaving)
        except Exception as error:  # noqa: BLE001 - a rank that gets no answer would wait for ever
            traceback.print_exc()
            reply = ControllerReply(error=f"{type(error).__name__}: {error} (more in controller.log)", may_pass=True)
        # Routes of a step are large: their arrays are sent from where they are.
        numbered = msgspec.structs.replace(reply, number=number)
        await socket.send_multipart([identity, *wire.encode(numbered)], copy=False)

    async def _reply(self, request: Request) -> ControllerReply:
        """The answer, or `ControllerLeaving` for work that is not finished when everything has to end."""
        work = {"batch": (f"batch {request.part}", request.step), "push": ("push", request.version)}
        key = {**work, "evaluate": ("evaluate", request.version)}.get(request.op)
        leaving = asyncio.ensure_future(self._leaving.wait())
        answer = asyncio.ensure_future(self._handlers[request.op](self, request))
        try:
            if key is not None and key not in self._finished:
                await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if self._leaving.is_set() and key not in self._finished:
                    raise ControllerLeaving("this run was asked to end", may_pass=True)
            return await answer
        finally:
            leaving.cancel()
            answer.cancel()

    async def _batch(self, request: Request) -> ControllerReply:
        if self._controller.uses_bank(request.step):
            # The fixed texts are scored with the weights of this step.
            await self._settled()
        planned = asyncio.ensure_future(
            self._once(
                f"batch {request.part}",
                request.step,
                lambda: self._controller.plan(request.step, request.data_size, request.part),
            )
        )
        if self._loading is not None:
            # A push that fails would leave the plan waiting for samples of weights that never come.
            await asyncio.wait({planned, self._loading}, return_when=asyncio.FIRST_COMPLETED)
            if self._loading.done():
                self._loading.result()
        shares = await planned
        share = shares[request.data_rank]
        return ControllerReply(batch=table_of(rank_share(share, request.layer_ids)))

    async def _push(self, request: Request) -> ControllerReply:
        if ("push", request.version) not in self._shared:
            shards = self._shards.setdefault(request.version, {})
            shards[request.rank] = request
            complete = self._pushed.setdefault(request.version, asyncio.Event())
            if len(shards) == request.num_ranks:
                complete.set()
            await complete.wait()
            self._pushed.pop(request.version, None)
        await self._once("push", request.version, lambda: self._start_load(request))
        return ControllerReply(proves_tensors=self._controller.proves_tensors)

    async def _start_load(self, request: Request) -> None:
        """Load, and prove.

        Where sampling overlaps training the ranks go on meanwhile: what fails here stops their next request.
        """
        first = self._loading is None
        await self._settled()
        self._loading = asyncio.ensure_future(self._load(request))
        if first or request.meeting is not None or not self._controller.overlaps:
            await self._settled()

    async def _settled(self) -> None:
        """The newest push has arrived, proved; raises what became of it."""
        if self._loading is not None:
            await asyncio.shield(self._loading)

    async def _load(self, request: Request) -> None:
        shards = [shard for _, shard in sorted(self._shards.pop(request.version).items())]
        if request.meeting is not None:
            shares = [Share(shard.meeting, shard.entries, shard.texts) for shard in shards if shard.meeting is not None]
            await self._controller.receive_weights(request.version, shares)
            return
        entries = tuple(entry for shard in shards for entry in shard.entries)
        push = finish_push(request.directory, entries, request.version, self._checkpoint)
        await self._controller.load_weights(msgspec.structs.replace(push, texts=shards[0].texts))

    async def _evaluate(self, request: Request) -> ControllerReply:
        await self._settled()
        return ControllerReply(metrics=dict(await self._once("evaluate", request.version, self._controller.evaluate)))

    async def _begin(self, request: Request) -> ControllerReply:
        return ControllerReply()

    async def _servers(self, request: Request) -> ControllerReply:
        return ControllerReply(servers=self._controller.servers())

    async def _state(self, request: Request) -> ControllerReply:
        return ControllerReply(state=self._controller.state())

    async def _restore(self, request: Request) -> ControllerReply:
        self._controller.restore(request.state)
        return ControllerReply()

    async def _leave(self, request: Request) -> ControllerReply:
        _log(f"rank {request.rank} was asked to end: what is not finished is refused")
        self.leave()
        return ControllerReply()

    async def _end(self, request: Request) -> ControllerReply:
        self._stop.set()
        return ControllerReply()

    async def _once(self, op: str, number: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        for key in [key for key in self._shared if key[0] == op and key[1] < number]:
            del self._shared[key]
        if (op, number) not in self._shared:
            self._shared[op, number] = asyncio.ensure_future(work())
        return await asyncio.shield(self._shared[op, number])

    _handlers: Mapping[str, Callable[[ControllerService, Request], Coroutine[Any, Any, ControllerReply]]] = {
        "begin": _begin,
        "batch": _batch,
        "push": _push,
        "evaluate": _evaluate,
        "servers": _servers,
        "state": _state,
        "restore": _restore,
        "leave": _leave,
        "stop": _end,
    }


def _log(line: str) -> None:
    """To controller.log, which is never empty: who ended, and when, is read from it."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {line}", file=sys.stderr, flush=True)


def allow_connections() -> None:
    """Raise the soft limit on open files of this process to `MOST_FILES`, as far as the hard one lets it.

    Each request in flight, agent and connection takes one; many systems begin with 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


async def _main(start: Start) -> None:
    """The controller's life. `ENDS`, by the rank that started it, closes what there is so far.

    So does SIGTERM once that rank is gone, as by the lifeline. While it lives, SIGTERM and SIGINT came from outside, to
    all processes of the job: the rank needs its controller until it has saved.
    """
    from moe_trm.rollout.build import build_controller

    life, loop, rank = asyncio.current_task(), asyncio.get_running_loop(), os.getppid()
    assert life is not None
    service: ControllerService | None = None

    def asked(end: Callable[[], object]) -> None:
        if service is None or not service.started or os.getppid() != rank:
            end()
            return
        _log("asked to end while the rank that it serves still runs: what is not finished is refused")
        service.leave()

    loop.add_signal_handler(ENDS, life.cancel)
    for number in ASKED:
        loop.add_signal_handler(number, asked, life.cancel)
    _log(f"the controller begins (process {os.getpid()})")
    allow_connections()
    config = Config.model_validate(start.config)
    controller = await build_controller(config, start.api_key)
    # All that was imported stays. Collections that go through it again stop the controller for a tenth of a second.
    gc.collect()
    gc.freeze()
    service = ControllerService(controller, start, config.model.checkpoint)
    await service.serve()
    _log("the controller ends, as its rank asked")


def main() -> int:
    """The controller, from its standard input; its exit status."""
    try:
        asyncio.run(_main(msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)))
    except MoeTrmError as error:
        _log(f"{type(error).__name__}: {error}")
        return error.exit_status
    except asyncio.CancelledError:
        _log("the controller was asked to end")
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    run_to_end(main)
