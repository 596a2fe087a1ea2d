"""Training runs of this project as jobs that take turns (`benchmarks.in_turn`), each with a server of its own.

Servers and ranks are forks of two processes that have done their imports, as in the quickstart: a run is up in seconds,
and shares the memory of what it imported with the others.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.in_turn import Arm
from launch.job import learner_environment
from launch.warm import warm_server
from moe_trm.config import load
from moe_trm.doctor.preflight import smallest_world
from moe_trm.rollout.servers import process as supervisor
from moe_trm.rollout.sglang import launch
from moe_trm.rollout.sglang.warm import warm_engine
from moe_trm.runtime.warm import WarmProcess

CONFIG = Path("configs/quickstart.yaml")
SKIPPED = 3
"""First steps of a run, which warm up."""
RECORDER = "--enable-return-routed-experts"
STOPPED_S = 36_000
"""Longest that a job may wait for its turn. A stopped one reads the clock when it goes on, and must not think that its
server hangs, nor the server that its scheduler does."""


@dataclass(frozen=True)
class Place:
    """Where runs are made: their folder, and the addresses of the processes that fork ranks and servers."""

    folder: Path
    ranks: str
    engine: str


@contextmanager
def place_in(folder: Path) -> Iterator[Place]:
    """A place with its two processes, inside the `with`. Temporary files are in it, too: jobs are killed at the end."""
    log, here = folder / "warm.log", patch.dict(os.environ, TMPDIR=str(folder))
    with here, warm_server(log) as ranks, warm_engine(log) as engine:
        yield Place(folder, ranks.address(), engine.address())


@contextmanager
def own_arm(place: Place, name: str, overrides: Sequence[str], *, records: bool = True) -> Iterator[Arm]:
    """A run of the quickstart's settings, warmed up and stopped, inside the `with`.

    Args:
        place: where.
        name: of the run and its folder.
        overrides: settings, of which `model.checkpoint` and `train.steps` are some.
        records: the server has the recorder of routes, with which the product always starts it.
    """
    folder = place.folder / name.replace(" ", "-")
    folder.mkdir()
    log = folder / "learner.log"
    with ExitStack() as stack:
        server = stack.enter_context(_server(place, overrides, folder / "rollout.log", records))
        settings = [*overrides, f"run_dir={place.folder}", f"name={folder.name}"]
        settings += [f"rollout.url={server.url}", f"rollout.timeout_s={STOPPED_S}"]
        world = smallest_world(load(CONFIG, settings).learner.parallel)
        command = ["-m", "launch.ranks", str(world), str(CONFIG), *settings]
        with log.open("wb") as output, open(os.devnull, "rb") as nothing:
            descriptors = nothing.fileno(), output.fileno(), output.fileno()
            job = WarmProcess(place.ranks, command, learner_environment(server.api_key), descriptors)
        stack.enter_context(job)
        arm = Arm(name, [server.process, job], folder / "metrics.jsonl", [log, folder / "rollout.log"])
        stack.enter_context(arm)
        arm.warm_up(SKIPPED)
        yield arm


@contextmanager
def _server(place: Place, overrides: Sequence[str], log: Path, records: bool) -> Iterator[supervisor.Server]:
    command = launch.launch_command

    def bare(*args: object, **options: object) -> list[str]:
        return [word for word in command(*args, **options) if word != RECORDER]  # type: ignore[arg-type]

    patience = f"rollout.server.extra_args=[--watchdog-timeout, '{STOPPED_S}']"
    config = load(CONFIG, [*overrides, "rollout.server.port=0", patience])
    with nullcontext() if records else patch.object(launch, "launch_command", bare):
        server = supervisor.start_server(config, log, secrets.token_hex(16), warm=place.engine)
    try:
        yield server
    finally:
        server.stop(grace_s=0.0)
