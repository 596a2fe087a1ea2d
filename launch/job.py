"""A whole job on this host: the rollout server, then the learner ranks; both stopped at the end."""

from __future__ import annotations

import argparse
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from launch.hosts import push_place
from launch.rollout_process import RolloutProcess
from launch.start.preflight import check_start, load_here, smallest_world
from launch.threads import SINGLE_THREAD
from moe_trm.errors import RunError
from moe_trm.rollout import access
from moe_trm.rollout.credentials import API_KEY_VARIABLE, api_key_for
from moe_trm.run_folder.history import ALL_DONE, is_done, only_trainer
from moe_trm.run_folder.run_end import LEARNER_LOCK, record_failure
from moe_trm.runtime.gloo import LOOPBACK
from moe_trm.runtime.interruption import ECHO_S
from moe_trm.runtime.output import outliving_readers
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.runtime.private import remove_abandoned
from moe_trm.runtime.python import run_module

LOCK = ".lock"
"""File of a run's folder that `moe-trm train` holds from its checks to its end (`moe_trm.runtime.lock`)."""
POLL_S = 0.1
"""Pause between two looks at the processes."""
# Linux gives ports from 32768 on to programs that ask for any port, and to outgoing connections.
LATER_PORTS, TRIED_PORTS = range(20_000, 32_000), 100


class Learner(Protocol):
    """The process above the learner ranks. A context manager: leaving it kills what still runs."""

    def poll(self) -> int | None:
        """Exit status, None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """SIGTERM asks the ranks to finish what they train and save; a second one ends them."""

    def __enter__(self) -> Learner: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


StartLearner = Callable[[str, Sequence[str], int, Mapping[str, str]], Learner]
"""Starts the ranks of a configuration: its path, overrides, how many, and their environment."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm train`."""
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as replay.mode=R3")
    parser.add_argument("--nproc-per-node", type=int, help="learner ranks (default: the fewest that hold the model)")


def run(args: argparse.Namespace) -> int:
    """`moe-trm train`. Ctrl-C and SIGTERM before anything is started end it at once, with one line."""
    with outliving_readers():
        return run_job(args.config, args.overrides, args.nproc_per_node)


def learner_command(config_path: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """The command line of `ranks` learner ranks on this host."""
    return run_module("launch.ranks", str(ranks), config_path, *overrides)


def learner_environment(api_key: str | None) -> dict[str, str]:
    """Their environment, with the rollout server's key, which is never on a command line.

    They meet in a file: torchrun opens no store for them, on all interfaces and without a key.
    """
    settings = {**SINGLE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**LOOPBACK, **os.environ, **settings, **({API_KEY_VARIABLE: api_key} if api_key else {})}


def under_torchrun(config_path: str, overrides: Sequence[str], ranks: int, environment: Mapping[str, str]) -> Learner:
    """The ranks as processes that torchrun starts."""
    return OwnedProcess(learner_command(config_path, overrides, ranks), environment)


def run_job(
    config_path: str, overrides: Sequence[str], num_ranks: int | None = None, start: StartLearner = under_torchrun
) -> int:
    """Start what the configuration needs on this host and wait for the learner; returns its exit code.

    It is the server's where this cannot start, which then has told why on standard error.

    Refusals come before anything is started. Raises `ConfigError`, `CheckpointError`, `EngineError`.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        config, _ = load_here(config_path, list(overrides))
        ranks = num_ranks or smallest_world(config.learner.parallel)
        api_key, settings = api_key_for(config.rollout), config.rollout.server
        run_dir = Path(config.run_dir) / config.name
        new = not run_dir.exists()
        if new:  # what is refused leaves no folder behind
            check_start(config, world_size=ranks)
        stack.enter_context(only_trainer(run_dir / LOCK))
        with only_trainer(run_dir / LEARNER_LOCK):
            pass  # no ranks are left of a job that was killed, and none were started by hand
        if is_done(run_dir, config.dump()):
            print(f"run {run_dir}: {ALL_DONE}", flush=True)
            return 0
        if not new:
            check_start(config, world_size=ranks)
        if signals.begin():
            return 128 + signals.first
        stack.callback(tidy, run_dir, {Path(tempfile.gettempdir()), push_place(config.sync, run_dir, on_one_host=True)})
        server = None
        if config.rollout.starts_server:
            from launch.rollout import log_name
            from moe_trm.rollout.servers.process import on_cpu

            api_key = api_key or secrets.token_hex(16)
            port = settings.port or free_port()
            overrides = [*overrides, f"rollout.server.port={port}"]
            log = run_dir / log_name(settings.host)
            print(f"starting the rollout server on {settings.host}:{port} (log: {log})", flush=True)
            server = stack.enter_context(RolloutProcess(config_path, overrides, api_key))
            # On a CPU both load at the same time.
            if not on_cpu(settings) and (code := wait_for(server, signals)) is not None:
                return code
        learner = stack.enter_context(start(config_path, overrides, ranks, learner_environment(api_key)))
        code = watch(learner, signals, server)
        if server is not None and server.failed:
            record_failure(run_dir, f"the rollout server did not start; {log.name} says why")
        return code


def tidy(run_dir: Path, places: Iterable[Path]) -> None:
    """Remove what ranks and servers left that were killed, once the ranks are gone.

    `places`: of temporary files and of weight pushes.
    """
    with suppress(RunError), only_trainer(run_dir / LEARNER_LOCK):
        for place in places:
            with suppress(FileNotFoundError):  # the ranks did not come to make it
                remove_abandoned(place)
        for file in run_dir.glob(f"*{access.FILE}*"):
            file.unlink()


class Signals:
    """SIGINT and SIGTERM of this process. A context manager.

    Until `begin` they end it, by `SystemExit`. From then on they are noted and do nothing else. One whose `SystemExit`
    was swallowed on the way is noted all the same.

    Attributes:
        first: number of the first one; 0 before it.
        count: how many came. SIGTERM again within `ECHO_S`, as service managers send it, is the same request; Ctrl-C
            again is not.
    """

    def __init__(self) -> None:
        self.first = self.count = 0
        self._last_s = -math.inf
        self._has_started = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self) -> int:
        """Processes are started now; number of a signal that came before."""
        self._has_started = True
        return self.first

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or number
        if number != signal.SIGTERM or time.monotonic() - self._last_s > ECHO_S:
            self.count, self._last_s = self.count + 1, time.monotonic()
        if not self._has_started:
            os.write(2, b"stopped before anything was started\n")
            sys.exit(128 + number)


def wait_for(server: RolloutProcess, signals: Signals) -> int | None:
    """Return once the server is ready; the exit code of this job where it fails, or a signal comes before.

    A server on GPUs sizes itself by the memory that is free when it starts, so it is there before the learner.
    """
    while not server.ready:
        if (code := _given_up(server, signals)) is not None:
            return code
        time.sleep(POLL_S)
    return None


def _given_up(server: RolloutProcess, signals: Signals) -> int | None:
    """Exit code of a job that ends while its server starts, when nothing can be saved; None for one that goes on."""
    if signals.first:
        return 128 + signals.first
    return server.failed


def watch(learner: Learner, signals: Signals, server: RolloutProcess | None = None) -> int:
    """Wait for the learner; returns its exit code, or the code of a stop signal or of a failed server.

    A signal is for the ranks: at the first they finish their update, save and end; at the second they end at once.
    While `server` starts, a signal or its failure ends this wait.
    """
    passed_on = 0
    while (status := learner.poll()) is None:
        if server is not None and not server.ready:
            if (code := _given_up(server, signals)) is not None:
                return code
        elif passed_on < signals.count:
            learner.send_signal(signal.SIGTERM)
            passed_on += 1
            if passed_on == 1:
                notice = "asked to stop: what is being trained is finished and saved; once more ends it at once"
                print(notice, flush=True)
        time.sleep(POLL_S)
    if status and signals.first:
        return 128 + signals.first
    return status if status >= 0 else 128 - status


def free_port() -> int:
    """A free port for a process that listens later, below those that the system gives away by itself."""
    for _ in range(TRIED_PORTS):
        port = secrets.choice(LATER_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {TRIED_PORTS} ports between {LATER_PORTS[0]} and {LATER_PORTS[-1]} is free")
