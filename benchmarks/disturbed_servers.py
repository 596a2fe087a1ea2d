"""Rollout servers with their keepers, and what disturbs them: kills, pauses, slow keepers, requests of others."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil

from benchmarks.cut_link import Link
from launch.job import free_port
from moe_trm.runtime.lifeline import signal_group

START_S = 600.0
"""Longest time in which a server is up, on a machine that others use."""
PAUSE_S = (1.0, 25.0)
"""Shortest and longest pause; a keeper starts a server again that is silent for 10 s."""
FAULTS = ("kill", "pause", "keeper", "requests", "reset")
"""SIGKILL of a server, SIGSTOP of a server or of its keeper for a while, long requests that nobody waits for, a reset
of every connection."""
NUM_REQUESTS, REQUEST_TOKENS = 4, 400


@dataclass
class KeptServer:
    """A server that `launch.rollout` keeps: it starts it again when it dies or hangs. It is asked through `link`."""

    keeper: psutil.Popen
    link: Link
    key: str

    @property
    def url(self) -> str:
        """Its address."""
        return self.link.url

    def processes(self) -> list[psutil.Process]:
        """The server's own, without watchers; none while it is being started again."""
        with suppress(psutil.Error):
            return [each for each in self.keeper.children() if "sglang.launch_server" in " ".join(each.cmdline())]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the whole group of the server, if there is one."""
        for process in self.processes():
            signal_group(process.pid, number)


@dataclass
class Disturber:
    """Disturbs servers at random moments until it is told to end; counts what it did by name.

    Args:
        servers: to be disturbed.
        every_s: mean seconds between two disturbances.
        seed: of moments, kinds and victims.
    """

    servers: Sequence[KeptServer]
    every_s: float
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Disturb; no server stays stopped when this returns."""
        rng = random.Random(self.seed)
        while not self._over.wait(rng.expovariate(1 / self.every_s)):
            fault, server, seconds = rng.choice(FAULTS), rng.choice(self.servers), rng.uniform(*PAUSE_S)
            self.done[fault] += 1
            print(f"{fault} {server.url}" + (f" for {seconds:.0f} s" * (fault in ("pause", "keeper"))), flush=True)
            self._do(fault, server, seconds)

    def end(self) -> None:
        """Let `run` return after the disturbance in progress."""
        self._over.set()

    def _do(self, fault: str, server: KeptServer, seconds: float) -> None:
        if fault == "kill":
            server.signal(signal.SIGKILL)
        elif fault == "pause":
            server.signal(signal.SIGSTOP)
            self._over.wait(seconds)
            server.signal(signal.SIGCONT)
        elif fault == "keeper":
            server.keeper.send_signal(signal.SIGSTOP)
            self._over.wait(seconds)
            server.keeper.send_signal(signal.SIGCONT)
        elif fault == "reset":
            server.link.cut()
        else:
            for _ in range(NUM_REQUESTS):
                threading.Thread(target=_abandoned_request, args=(server,), daemon=True).start()


@contextmanager
def kept_servers(
    config: Path, overrides: Sequence[str], count: int, key: str, folder: Path
) -> Iterator[list[KeptServer]]:
    """`count` servers of `config`, up; ended with all that they started.

    Raises `SystemExit` when one does not come up.
    """
    servers: list[KeptServer] = []
    try:
        for number in range(count):
            settings = [*overrides, f"name=server-{number}", f"rollout.server.port={free_port()}"]
            servers.append(_start(config, settings, key, folder / f"keeper-{number}.log"))
        yield servers
    finally:
        for server in servers:
            server.keeper.send_signal(signal.SIGCONT)
            server.keeper.terminate()
        for server in servers:
            with suppress(psutil.TimeoutExpired):
                server.keeper.wait(60)
            with suppress(psutil.NoSuchProcess):
                server.keeper.kill()
            server.link.close()


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """`count` processes that use all the processor time they get, inside the `with`."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def _start(config: Path, settings: Sequence[str], key: str, log: Path) -> KeptServer:
    environment: Mapping[str, str] = {**os.environ, "MOE_TRM_API_KEY": key}
    with log.open("wb") as output:
        keeper = psutil.Popen(
            [sys.executable, "-m", "launch.rollout", str(config), *settings],
            env=environment,
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + START_S
    while keeper.poll() is None and time.monotonic() < deadline:
        said = log.read_text()
        if "ready at " in said:
            return KeptServer(keeper, Link(said.partition("ready at ")[2].split()[0]), key)
        time.sleep(0.2)
    keeper.kill()
    raise SystemExit(f"a rollout server did not start: {log.read_text()}")


def _abandoned_request(server: KeptServer) -> None:
    """Ask for a long answer and hang up after its first token, as a health check does that gave up."""
    import urllib.request

    body = {
        "input_ids": [1, 5, 6],
        "sampling_params": {"max_new_tokens": REQUEST_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{server.url}/generate",
        data=orjson.dumps(body),
        headers={"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"},
    )
    with suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
