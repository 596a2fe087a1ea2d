"""Training runs of this project as jobs that take turns (`benchmarks.in_turn`), each with a server of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from benchmarks.in_turn import Arm
from launch.child import Child
from launch.job import learner_command, learner_environment
from moe_trm.config import load
from moe_trm.doctor.preflight import smallest_world
from moe_trm.rollout.sglang import supervisor

CONFIG = Path("configs/quickstart.yaml")
SKIPPED = 3
"""First steps of a run, which warm up."""
RECORDER = "--enable-return-routed-experts"
STOPPED_S = 36_000
"""Longest that a job may wait for its turn. A stopped one reads the clock when it goes on, and must not think that its
server hangs, nor the server that its scheduler does."""


@contextmanager
def place_in(folder: Path) -> Iterator[Path]:
    """The folder of runs. Inside the `with` temporary files are in it, too: jobs are killed at the end."""
    with patch.dict(os.environ, TMPDIR=str(folder)):
        yield folder


@contextmanager
def own_arm(place: Path, name: str, overrides: Sequence[str], *, records: bool = True) -> Iterator[Arm]:
    """A run of the quickstart's settings, warmed up and stopped, inside the `with`.

    Args:
        place: the folder of runs.
        name: of the run and its folder.
        overrides: settings, of which `model.checkpoint` and `train.steps` are some.
        records: the server has the recorder of routes, with which the product always starts it.
    """
    folder = place / name.replace(" ", "-")
    folder.mkdir()
    log = folder / "learner.log"
    with ExitStack() as stack:
        server = stack.enter_context(_server(overrides, folder / "rollout.log", records))
        settings = [*overrides, f"run_dir={place}", f"name={folder.name}"]
        settings += [f"rollout.url={server.url}", f"rollout.timeout_s={STOPPED_S}"]
        world = smallest_world(load(CONFIG, settings).learner.parallel)
        command = learner_command(str(CONFIG), settings, world)
        with log.open("wb") as output:
            environment, out = learner_environment(server.api_key), output.fileno()
            job = stack.enter_context(Child(command, environment, output=out, errors=out))
        arm = Arm(name, [server.process, job], folder / "metrics.jsonl", [log, folder / "rollout.log"])
        stack.enter_context(arm)
        arm.warm_up(SKIPPED)
        yield arm


@contextmanager
def _server(overrides: Sequence[str], log: Path, records: bool) -> Iterator[supervisor.Server]:
    command = supervisor.launch_command

    def bare(*args: object, **options: object) -> list[str]:
        return [word for word in command(*args, **options) if word != RECORDER]  # type: ignore[arg-type]

    patience = f"rollout.server.extra_args=[--watchdog-timeout, '{STOPPED_S}']"
    config = load(CONFIG, [*overrides, "rollout.server.port=0", patience])
    with nullcontext() if records else patch.object(supervisor, "launch_command", bare):
        server = supervisor.start_server(config, log, secrets.token_hex(16))
    try:
        yield server
    finally:
        server.stop(grace_s=0.0)
