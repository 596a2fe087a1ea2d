"""Rollout servers with their keepers, a run, and all that disturbs them: kills, stops, resets, a full disk, load."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil

from launch.job import free_port
from moe_trm.runtime.lifeline import signal_group
from tests.drills.cut_link import Link

START_S = 600.0
"""Longest time in which a server is up, on a machine that others use."""
PAUSE_S = (1.0, 25.0)
"""Shortest and longest pause; a keeper starts a server again that is silent for 10 s."""
DEADLY_S = 10.0
"""A server that is stopped for so long may be taken for dead (`rollout.server.silence_timeout_s`)."""
FAULTS = ("kill", "pause", "keeper", "requests", "reset", "run", "stall", "disk")
"""SIGKILL of a server; SIGSTOP of a server or of its keeper for a while; long requests that nobody waits for; a reset
of every connection; SIGKILL of the run; SIGSTOP of the run, the servers and their keepers together; a full disk."""
LASTING = ("pause", "keeper", "stall", "disk")
NUM_REQUESTS, REQUEST_TOKENS = 4, 400
FILLED_BYTES, FILL_S = 1 << 16, 0.05
BURN = "while True: pass"
LOADED_S, RELIEVED_S, LOOK_S = 60.0, 120.0, 5.0
"""The machine is kept busy for a while, then left alone for a while; it is looked at so often."""


@dataclass
class KeptServer:
    """A server that `launch.rollout` keeps: it starts it again when it dies or hangs. Requests go through `link`."""

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
            return [
                process for process in self.keeper.children() if "sglang.launch_server" in " ".join(process.cmdline())
            ]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the whole group of the server, if there is one."""
        for process in self.processes():
            signal_group(process.pid, number)


@dataclass
class Disturber:
    """Disturbs a run and its servers at random moments until `end` is called.

    Args:
        servers: to be disturbed.
        every_s: mean seconds between two disturbances.
        seed: of moments, kinds and victims.
        run: gives the process id of `moe-trm train`.
        disks: small file systems of the run.

    Attributes:
        done: disturbances by name.
        deadly: kills, and stops of one server for so long that it may be taken for dead.
        room: set while no disk is full.
    """

    servers: Sequence[KeptServer]
    every_s: float
    seed: int
    run: Callable[[], int]
    disks: Sequence[Path]
    done: Counter[str] = field(default_factory=Counter)
    deadly: int = 0
    room: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)

    def disturb(self) -> None:
        """Disturb; nothing stays stopped and no disk full when this returns."""
        rng = random.Random(self.seed)
        self.room.set()
        while not self._over.wait(rng.expovariate(1 / self.every_s)):
            fault, server, seconds = rng.choice(FAULTS), rng.choice(self.servers), rng.uniform(*PAUSE_S)
            self.done[fault] += 1
            self.deadly += fault == "kill" or (fault == "pause" and seconds >= DEADLY_S)
            print(f"{fault} {server.url}" + (f" for {seconds:.0f} s" * (fault in LASTING)), flush=True)
            self._do(fault, server, seconds)

    def end(self) -> None:
        """Let `disturb` return after the disturbance in progress."""
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
        elif fault == "run":
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.run()).kill()
        elif fault == "stall":
            self._stall(seconds)
        elif fault == "disk":
            self.room.clear()
            self._fill(self.disks[int(seconds) % len(self.disks)] / "filler", time.monotonic() + seconds)
            self.room.set()
        else:
            for _ in range(NUM_REQUESTS):
                threading.Thread(target=_abandoned_request, args=(server,), daemon=True).start()

    def _stall(self, seconds: float) -> None:
        """Let time pass in which no process does anything, as on a machine that was suspended."""
        stopped = []
        for leader in (self.run(), *(server.keeper.pid for server in self.servers)):
            with suppress(psutil.NoSuchProcess):
                stopped += [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                self._over.wait(seconds)

    def _fill(self, filler: Path, until: float) -> None:
        """Take all the room there is, also what others give up meanwhile."""
        with filler.open("wb", buffering=0) as file:
            while time.monotonic() < until and not self._over.wait(FILL_S):
                with suppress(OSError):
                    while True:
                        file.write(bytes(FILLED_BYTES))
        filler.unlink()


@contextmanager
def kept_servers(
    config: Path, overrides: Sequence[str], count: int, key: str, folder: Path
) -> Iterator[list[KeptServer]]:
    """`count` servers of `config`, up; ended with all that they started.

    Raises `SystemExit` when one does not come up.
    """
    keepers: list[tuple[psutil.Popen, Path]] = []
    servers: list[KeptServer] = []
    try:
        for number in range(count):
            settings = [*overrides, f"name=server-{number}", f"rollout.server.port={free_port()}"]
            log = folder / f"keeper-{number}.log"
            keepers.append((_start(config, settings, key, log), log))
        servers += [_ready(keeper, log, key) for keeper, log in keepers]
        yield servers
    finally:
        for keeper, _ in keepers:
            with suppress(psutil.NoSuchProcess):
                keeper.send_signal(signal.SIGCONT)
                keeper.terminate()
        for keeper, _ in keepers:
            with suppress(psutil.TimeoutExpired):
                keeper.wait(60)
            with suppress(psutil.NoSuchProcess):
                keeper.kill()
        for server in servers:
            server.link.close()


@contextmanager
def loaded(load: float) -> Iterator[list[float]]:
    """Inside the `with`, the machine has at least this load for stretches of a minute; the loads that it had.

    Others' work counts. What is missing is made by processes of the lowest priority.
    """
    over, loads = threading.Event(), list[float]()

    def keep() -> None:
        burning: list[subprocess.Popen[bytes]] = []
        start = time.monotonic()
        while not over.wait(LOOK_S):
            loads.append(os.getloadavg()[0])
            busy = (time.monotonic() - start) % (LOADED_S + RELIEVED_S) < LOADED_S
            if busy and not burning:
                missing = max(0, round(load - loads[-1]))
                burning += [subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", BURN]) for _ in range(missing)]
            elif not busy:
                _end(burning)
        _end(burning)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield loads
    finally:
        over.set()
        thread.join()


def _end(burning: list[subprocess.Popen[bytes]]) -> None:
    while burning:
        process = burning.pop()
        process.kill()
        process.wait()


def _start(config: Path, settings: Sequence[str], key: str, log: Path) -> psutil.Popen:
    environment: Mapping[str, str] = {**os.environ, "MOE_TRM_API_KEY": key}
    command = [sys.executable, "-m", "launch.rollout", str(config), *settings]
    with log.open("wb") as output:
        return psutil.Popen(command, env=environment, stdout=output, stderr=output)


def _ready(keeper: psutil.Popen, log: Path, key: str) -> KeptServer:
    deadline = time.monotonic() + START_S
    while keeper.poll() is None and time.monotonic() < deadline:
        log_text = log.read_text()
        if "ready at " in log_text:
            return KeptServer(keeper, Link(log_text.partition("ready at ")[2].split()[0]), key)
        time.sleep(0.2)
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
