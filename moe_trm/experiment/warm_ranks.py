"""Warm ranks for all runs of an experiment: forks of one process that has their imports done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_trm.experiment.plan import ExperimentPlan, PlannedRun
from moe_trm.experiment.stages import RunStage, Stages
from moe_trm.runtime.warm import WarmServer

LOG = "warm.log"

Warm = Callable[[ExperimentPlan], WarmServer]
"""Makes the server of warm processes of a plan."""


def warm(plan: ExperimentPlan) -> WarmServer:
    """The server of the plan's runs; it starts when it is first asked for its address."""
    from launch.warm import warm_server

    return warm_server(plan.folder / LOG)


def forked(made_of: Stages, server: WarmServer) -> Stages:
    """The same processes, with each training and its ranks as forks. Evaluations are as they were."""

    def made(plan: ExperimentPlan, run: PlannedRun) -> Sequence[RunStage]:
        address = server.address()
        training, *evaluations = made_of(plan, replace(run, warm=address))
        return [replace(training, warm=address), *evaluations]

    return made
