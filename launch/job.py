"""A whole job on this host: the rollout server, then the learner ranks; both stopped at the end."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from launch.server_start import ServerStart
from launch.threads import SINGLE_THREAD
from moe_trm.doctor.preflight import check_start, load_here, smallest_world
from moe_trm.rollout.credentials import API_KEY_VARIABLE, api_key_for
from moe_trm.runtime.lifeline import Lifeline
from moe_trm.runtime.warm import WarmProcess

POLL_S = 0.2
"""Pause between two looks at the learner while the server starts."""
# Linux gives ports from 32768 on to whoever asks for any, and to outgoing connections.
LATER_PORTS, TRIED_PORTS = range(20_000, 32_000), 100


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm train`."""
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as replay.mode=R3")
    parser.add_argument("--nproc-per-node", type=int, help="learner ranks (default: the fewest that hold the model)")
    parser.add_argument(
        "--warm-ranks",
        metavar="SOCKET",
        help="of a process that forks the ranks, as `warm_ranks` of an experiment makes",
    )


def run(args: argparse.Namespace) -> int:
    """`moe-trm train`.

    Ctrl-C and SIGTERM before the start of the learner end it at once; whatever was started is stopped.
    """
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, lambda number, _frame: sys.exit(128 + number))
    return run_job(args.config, args.overrides, args.nproc_per_node, args.warm_ranks)


def run_job(
    config_path: str,
    overrides: Sequence[str],
    num_ranks: int | None = None,
    warm: str | None = None,
    warm_engine: str | None = None,
) -> int:
    """Start what the configuration needs on this host and wait for the learner; returns its exit code.

    `warm`: address of a `WarmServer` that forks the ranks; `warm_engine`: of one that forks a rollout server on a CPU.
    Refusals come before anything is started. Raises `ConfigError`, `CheckpointError`, `EngineError`; `RunError` where
    the first one is gone.
    """
    config, _ = load_here(config_path, list(overrides))
    ranks = num_ranks or smallest_world(config.learner.parallel)
    check_start(config, world_size=ranks)
    if not config.rollout.starts_server:
        return run_learner(config_path, overrides, ranks, api_key_for(config.rollout), warm=warm)

    from moe_trm.rollout.servers.process import on_cpu
    from moe_trm.rollout.servers.watchdog import Watchdog

    api_key = api_key_for(config.rollout) or secrets.token_hex(16)
    port = config.rollout.server.port or free_port()
    overrides = [*overrides, f"rollout.server.port={port}"]
    server_config = config.rollout.server.model_copy(update={"port": port})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server_config})})
    run_dir = Path(config.run_dir) / config.name
    run_dir.mkdir(parents=True, exist_ok=True)
    print(
        f"starting the rollout server on {config.rollout.server.host}:{config.rollout.server.port} "
        f"(log: {run_dir / 'rollout.log'})",
        flush=True,
    )
    if not on_cpu(config.rollout.server):  # a server sizes itself by the memory that is free when it starts
        with Watchdog(config, run_dir / "rollout.log", api_key):
            return run_learner(config_path, overrides, ranks, api_key, warm=warm)
    overrides.append(f"rollout.server.wait_s={config.rollout.server.startup_timeout_s}")
    log = run_dir / "rollout.log"
    with ServerStart(lambda up: Watchdog(config, log, api_key, given_up=up, warm=warm_engine)) as server:
        return run_learner(config_path, overrides, ranks, api_key, server, warm)


Learner = subprocess.Popen[bytes] | WarmProcess
"""The process above the learner ranks, in a session of its own."""


def run_learner(
    config_path: str,
    overrides: Sequence[str],
    ranks: int,
    api_key: str | None,
    server: ServerStart | None = None,
    warm: str | None = None,
) -> int:
    """The learner ranks on this host; the API key travels in the environment, never on a command line.

    SIGINT and SIGTERM go to the ranks: at the first they finish their step, save and end; at the second they end at
    once. While `server` is still starting, the first ends all. When this process is killed, they are killed too.

    Args:
        config_path: for the ranks.
        overrides: likewise.
        ranks: how many.
        api_key: of the rollout server.
        server: the start of the server that the ranks wait for; they are killed when it fails. None: there is one.
        warm: address of a `WarmServer` that forks them; None: processes of their own.
    """
    learner, lifeline = _start_learner(config_path, overrides, ranks, api_key, warm)
    try:
        with passing_signals_to(learner, server):
            code = _wait(learner, server)
    except SystemExit:
        _kill(learner)
        raise
    finally:
        if lifeline is not None and learner.returncode is not None:
            lifeline.release()
    return code


def _start_learner(
    config_path: str, overrides: Sequence[str], ranks: int, api_key: str | None, warm: str | None
) -> tuple[Learner, Lifeline | None]:
    """The learner, and what kills it with this process; a warm one needs nothing for that."""
    environment = learner_environment(api_key)
    if warm is not None:
        return WarmProcess(warm, ["-m", "launch.ranks", str(ranks), config_path, *overrides], environment), None
    # A session of its own: the terminal's Ctrl-C comes to us alone, and reaches the ranks once.
    learner = subprocess.Popen(learner_command(config_path, overrides, ranks), env=environment, start_new_session=True)
    return learner, Lifeline(learner.pid)


def _kill(learner: Learner) -> None:
    """End it and its ranks at once."""
    if isinstance(learner, WarmProcess):
        learner.kill()
    else:
        os.killpg(learner.pid, signal.SIGKILL)
        learner.wait()


def _wait(learner: Learner, server: ServerStart | None) -> int:
    """Exit code of the learner, which is killed when there will be no server."""
    while server is not None and learner.poll() is None and not server.over.wait(POLL_S):
        pass
    if server is not None and server.failed and learner.poll() is None:
        _kill(learner)
    return learner.wait()


def learner_command(config_path: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """The command line of `ranks` learner ranks on this host."""
    return [sys.executable, "-m", "launch.ranks", str(ranks), config_path, *overrides]


def learner_environment(api_key: str | None) -> dict[str, str]:
    """Their environment, with the rollout server's key."""
    return {**os.environ, **SINGLE_THREAD, **({API_KEY_VARIABLE: api_key} if api_key else {})}


@contextmanager
def passing_signals_to(learner: Learner, server: ServerStart | None = None) -> Iterator[None]:
    """SIGINT and SIGTERM of this process are for `learner`, inside the `with`.

    While `server` starts nothing can be saved: they raise `SystemExit` here.
    """

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if server is not None and not server.over.is_set():
            sys.exit(128 + number)
        print("asked to stop: the step in progress is finished and saved; once more ends it at once", flush=True)
        learner.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
