"""The learner rank's side of the controller: start it, ask it, stop it."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from zmq import Socket, curve_keypair
from zmq.constants import Event, SocketOption, SocketType
from zmq.sugar.context import Context
from zmq.utils.monitor import recv_monitor_message

from moe_trm.config.schema import Config
from moe_trm.errors import REFUSED, ControllerError, ControllerLeaving
from moe_trm.rollout.access import Access
from moe_trm.rollout.batch_table import batch_of
from moe_trm.rollout.credentials import without_key
from moe_trm.rollout.service import ENDS, ControllerReply, Request, Start, keep_alive
from moe_trm.runtime import wire
from moe_trm.runtime.lifeline import kill_marked, signal_group
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.runtime.patience import patient
from moe_trm.runtime.private import Scratch, append_private
from moe_trm.runtime.python import run_module
from moe_trm.sync.manifest import Meeting, ScoredText, TensorEntry
from moe_trm.types import ServerState, TrainBatch

GRACE_S = 30.0
"""Time for a controller that is asked to end: it ends the commands of agents and removes their folders."""
ASK_AGAIN_S = 20.0
"""Time without an answer after which a request is sent again. Where it is still worked on, that does nothing."""
_POLL_MS = 500
FIRST_CONTACT_S, LOST_S = 1800.0, 8.0
"""Longest time until a controller that is being started takes connections (it reads the prompts first), and longest
without one afterwards. A loaded machine gets more."""
LOST_WHILE_STOPPING_S = 2.0
"""Longest time without a connection for a rank that was asked to stop: its launcher kills it soon, loaded or not."""


class Connection:
    """The state of a socket's connection, by the events of its monitor. Make it before the socket connects."""

    def __init__(self, socket: Socket[bytes]) -> None:
        self._monitor: Socket[bytes] = socket.get_monitor_socket(Event.HANDSHAKE_SUCCEEDED | Event.DISCONNECTED)
        self._socket, self._apart_since, self._limit_s = socket, time.monotonic(), FIRST_CONTACT_S

    def lost_s(self, *, stopping: bool) -> float:
        """Seconds without a connection beyond what is usual; 0 while there is one, or may soon be.

        `stopping`: this rank was asked to stop.
        """
        while self._monitor.poll(0):
            made = recv_monitor_message(self._monitor)["event"] == Event.HANDSHAKE_SUCCEEDED
            self._apart_since, self._limit_s = math.inf if made else time.monotonic(), LOST_S
        apart_s = time.monotonic() - self._apart_since
        limit_s = LOST_WHILE_STOPPING_S if stopping else patient(self._limit_s)
        return apart_s if apart_s > limit_s else 0.0

    def close(self) -> None:
        """End the watch, before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close()


class ControllerProcess:
    """The controller, started by the first rank. The other ranks get `access`.

    For ranks of one machine the socket is a file in a private folder (mode 0700), so that only this user reaches it.
    For ranks on several machines it listens on `address`, encrypted (CurveZMQ) under a key pair made for this run.
    """

    def __init__(self, config: Config, api_key: str | None, log_path: Path, *, address: str | None = None) -> None:
        self._folder, self._key = Scratch(), secrets.token_hex(16)
        self._endpoint, self._public_key, secret_key = f"ipc://{self._folder.path}/controller", "", ""
        if address is not None:
            public, secret = curve_keypair()
            self._endpoint, self._public_key, secret_key = _free_endpoint(address), public.decode(), secret.decode()
        self._log_path = log_path
        # By it, commands are found that the controller started and could not end.
        self._mark = f"MOE_TRM_CONTROLLER={secrets.token_hex(8)}"
        name, value = self._mark.split("=")
        with append_private(log_path) as log:
            self._begins = log.tell()
            # Ctrl-C and torchrun's signals to a rank's group are not for the controller: the rank ends it.
            self._process = OwnedProcess(
                run_module("moe_trm.rollout.service"),
                # It reads its key below; the functions of the user's own that it starts, and code that those run, are
                # not to find one.
                {**without_key(os.environ), name: value},
                input=subprocess.PIPE,
                output=log,
                errors=log,
                grace_s=GRACE_S,
                mark=self._mark,
            )
        start = Start(self._endpoint, self._key, config.model_dump(mode="json"), api_key, secret_key)
        self._process.input.write(msgspec.json.encode(start) + b"\n")
        self._process.input.close()

    def access(self, attempt: str, pushes: Scratch | None) -> Access:
        """Address and keys of this attempt's controller, and the folder of weight pushes."""
        folder = "" if pushes is None else str(pushes.path.absolute())
        return Access(
            attempt=attempt, endpoint=self._endpoint, key=self._key, public_key=self._public_key, pushes=folder
        )

    def check(self) -> None:
        """Raise `ControllerError` with the end of its log when the process is gone."""
        if (status := self._process.poll()) is not None:
            tail = self._log_path.read_bytes()[self._begins :].decode(errors="replace").strip().splitlines()[-30:]
            raise ControllerError(
                f"the rollout controller ended with exit code {status}"
                if status >= 0
                else f"the rollout controller was ended by {signal.Signals(-status).name}",
                where=str(self._log_path),
                fix="Its last words:\n" + "\n".join(f"    {line}" for line in tail),
                may_pass=status != REFUSED,
            )

    def wait(self, timeout_s: float = 30.0) -> None:
        """Let it finish after `stop`. When it does not, it is asked to end, and killed in the end."""
        for patience_s, number in ((timeout_s, ENDS), (GRACE_S, signal.SIGKILL)):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
            signal_group(self._process.pid, number)
        self._process.wait()
        kill_marked(self._mark)
        self._process.release()
        self._folder.remove()


def _free_endpoint(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        host = f"[{address}]" if family == socket.AF_INET6 else address
        return f"tcp://{host}:{probe.getsockname()[1]}"


class RolloutClient:
    """One rank's requests to its controller. A context manager: leaving it stops the controller that this rank started.

    Args:
        ranks: this rank's index and the number of all ranks, each of which reports its shard of a push.
        data: this rank's index and the number of ranks that hold different rows.
        process: the controller, on the rank that started it.
        public_key: of a controller that speaks CurveZMQ; empty for one on this machine.
        watch: told the state of the rollout servers again and again while this rank waits.
        asked: true once this rank was asked to stop.
        streams: steps are trained in parts. One that has begun is finished, so its samples are still waited for.
    """

    def __init__(
        self,
        endpoint: str,
        key: str,
        *,
        ranks: tuple[int, int],
        data: tuple[int, int],
        process: ControllerProcess | None = None,
        public_key: str = "",
        watch: Callable[[tuple[ServerState, ...]], None] | None = None,
        asked: Callable[[], object] = bool,
        streams: bool = False,
    ) -> None:
        self._key, self._ranks, self._data, self._process = key, ranks, data, process
        self._watch, self._look, self._lost = watch, 0, False
        self._stopping, self._leaves = asked, {"push", "evaluate"} if streams else {"push", "evaluate", "batch"}
        self._number, self._asked, self._since = 0, list[bytes | memoryview](), 0.0
        self.proves_tensors = True
        """False once a push said that every one has to be proved by use."""
        self._endpoint = endpoint
        self._socket: Socket[bytes] = Context.instance().socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        # Its name stays when its connection is lost, so that the answer finds it.
        self._socket.setsockopt(SocketOption.ROUTING_ID, secrets.token_hex(16).encode())
        keep_alive(self._socket)
        self._connection = Connection(self._socket)
        if public_key:
            own_public_key, own_secret_key = curve_keypair()
            self._socket.setsockopt(SocketOption.CURVE_PUBLICKEY, own_public_key)
            self._socket.setsockopt(SocketOption.CURVE_SECRETKEY, own_secret_key)
            self._socket.setsockopt(SocketOption.CURVE_SERVERKEY, public_key.encode())
        self._socket.connect(endpoint)

    def begin(self) -> None:
        """Return when the controller's engine has answered. Raises `ControllerError`."""
        self._ask("begin")

    def next_batch(self, step: int, layer_ids: tuple[int, ...], part: int = 0) -> TrainBatch:
        """This rank's rows of `step`, or of a part of it, with the routes of `layer_ids` only."""
        table = self._ask("batch", step=step, part=part, layer_ids=layer_ids).batch
        assert table is not None
        return batch_of(table)

    def push(
        self, version: int, entries: tuple[TensorEntry, ...], *, directory: str, texts: tuple[ScoredText, ...] = ()
    ) -> None:
        """Report this rank's shard of `version`; returns when the engine serves that version, proved.

        `texts`: of the proof by use, the same from every rank. Raises `ControllerError`.
        """
        reply = self._ask("push", version=version, directory=directory, entries=entries, texts=texts)
        self.proves_tensors = reply.proves_tensors

    @contextmanager
    def pushing(
        self, version: int, entries: tuple[TensorEntry, ...], *, meeting: Meeting, texts: tuple[ScoredText, ...] = ()
    ) -> Iterator[None]:
        """As `push`, while the body of the `with` broadcasts the tensors to the engine."""
        self._send("push", version=version, meeting=meeting, entries=entries, texts=texts)
        yield
        self.proves_tensors = self._receive("push").proves_tensors

    def evaluate(self, version: int) -> dict[str, float]:
        """Evaluation of `version` on held-out prompts; measured once, however many ranks ask.

        Empty without held-out prompts, and where the controller was asked to end before it was measured.
        """
        try:
            return self._ask("evaluate", version=version).metrics
        except ControllerLeaving:
            return {}

    def state(self) -> dict[str, Any]:
        """The controller's state for a checkpoint, as plain data; empty on ranks that did not start it."""
        return self._ask("state").state if self._process is not None else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`, before the first push."""
        if self._process is not None:
            self._ask("restore", state=dict(state))

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if kind is None:
                self._ask("stop")
            self._process.wait(30.0 if kind is None else 0.0)
        self._connection.close()
        self._socket.close()

    def _ask(self, op: str, **fields: object) -> ControllerReply:
        self._send(op, **fields)
        return self._receive(op)

    def _send(self, op: str, **fields: object) -> None:
        self._asked, self._since = self._request(op, **fields), time.monotonic()
        self._socket.send_multipart(self._asked)

    def _request(self, op: str, **fields: object) -> list[bytes | memoryview]:
        (rank, num_ranks), (data_rank, data_size) = self._ranks, self._data
        self._number += 1
        place: dict[str, Any] = {
            "rank": rank, "num_ranks": num_ranks, "data_rank": data_rank, "data_size": data_size, **fields,
        }  # fmt: skip
        return wire.encode(Request(self._key, op, self._number, **place))

    def _receive(self, op: str) -> ControllerReply:
        """The answer to the last request; the servers are looked at meanwhile, and once more after it where one was
        lost. What stays without an answer for long is asked again: it may have been lost on its way. A rank that is
        asked to stop meanwhile has the controller refuse, to all ranks, what is not finished.
        """
        watches, number = self._watch is not None and op != "stop", self._number
        reply: ControllerReply | None = None
        while reply is None or (self._look and not reply.error):
            answer = self._next()
            if answer is None and op in self._leaves and self._stopping():
                self._leaves = set()
                self._socket.send_multipart(self._request("leave"))
            if answer is None and time.monotonic() - self._since > ASK_AGAIN_S:
                self._look, self._since = 0, time.monotonic()
                if reply is None:
                    self._socket.send_multipart(self._asked)
            if answer is None and watches and not self._look:
                self._look_at_servers()
            elif answer is not None and self._look and answer.number == self._look:
                self._look = 0
                self._tell(answer)
            elif answer is not None and answer.number in (number, 0) and reply is None:  # 0: it could not be read
                reply = answer
                if watches and self._lost:
                    self._look_at_servers()
        if reply.leaving:
            raise ControllerLeaving(f"the controller no longer answers '{op}'", got=reply.error, may_pass=True)
        if reply.error:
            raise ControllerError(f"the controller refused '{op}'", got=reply.error, may_pass=reply.may_pass)
        return reply

    def _next(self) -> ControllerReply | None:
        """The next answer; None when there is none for a while. Raises `ControllerError` when there will be none."""
        if not self._socket.poll(_POLL_MS):
            if self._process is not None:
                self._process.check()
            elif lost_s := self._connection.lost_s(stopping=bool(self._stopping())):
                raise ControllerError(
                    "the controller is gone",
                    where=self._endpoint,
                    got=f"no connection for {lost_s:.0f} s",
                    fix="It runs beside the first rank, whose log and controller.log tell why it ended.",
                    may_pass=True,
                )
            return None
        frames = [frame.buffer.toreadonly() for frame in self._socket.recv_multipart(copy=False)]
        return wire.decode(frames, ControllerReply)

    def _look_at_servers(self) -> None:
        self._socket.send_multipart(self._request("servers"))
        self._look = self._number

    def _tell(self, answer: ControllerReply) -> None:
        self._lost = any(state.lost_s is not None for state in answer.servers)
        if self._watch is not None and not answer.error:
            self._watch(answer.servers)
