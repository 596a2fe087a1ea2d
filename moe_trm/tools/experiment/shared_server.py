"""One rollout server for all runs of an experiment: each run attaches to it, and gives it its own start first."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from moe_trm.rollout.credentials import API_KEY_VARIABLE, api_key_for
from moe_trm.tools.experiment.plan import ExperimentPlan, PlannedRun
from moe_trm.tools.experiment.stages import RunStage, Stages

LOG = "server.log"


@dataclass(frozen=True)
class SharedServer:
    """A server that runs attach to.

    Attributes:
        url: its address.
        api_key: reaches the runs by their environment alone.
    """

    url: str
    api_key: str

    def attached(self, made_of: Stages) -> Stages:
        """The same processes, of runs that use this server."""

        def made(plan: ExperimentPlan, run: PlannedRun) -> Sequence[RunStage]:
            environment = {API_KEY_VARIABLE: self.api_key}
            return [replace(stage, environment=environment) for stage in made_of(plan, replace(run, server=self.url))]

        return made


Serve = Callable[[ExperimentPlan], AbstractContextManager[SharedServer]]
"""Starts the server of a plan, and ends it."""


@contextmanager
def serve(plan: ExperimentPlan) -> Iterator[SharedServer]:
    """The server of the baseline's settings, which all arms share, inside the `with`.

    It is watched and restarted like any run's. Raises `CheckpointError` and `EngineError` as a run's start does.
    """
    from moe_trm.rollout.servers.backend import Served
    from moe_trm.rollout.servers.watchdog import Watchdog

    config = plan.configs[plan.file.against]
    key = api_key_for(config.rollout) or secrets.token_hex(16)
    print(f"starting one rollout server for all runs (log: {plan.folder / LOG})", flush=True)
    with Watchdog(Served.of(config), plan.folder / LOG, key) as watchdog:
        yield SharedServer(watchdog.url, key)
