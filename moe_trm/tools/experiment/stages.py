"""The processes of one run, one after the other: its training, then the evaluations of what it left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_trm.config.engines import short_name
from moe_trm.runtime.python import run_module
from moe_trm.tools.experiment.plan import ExperimentPlan, PlannedRun


@dataclass(frozen=True)
class RunStage:
    """One process of a run.

    Attributes:
        result: the file that an evaluation leaves; None for the training, whose end the books keep.
        environment: variables beside this process's own.
    """

    name: str
    command: Sequence[str]
    result: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


Stages = Callable[[ExperimentPlan, PlannedRun], Sequence[RunStage]]
"""The training of a run first, then its evaluations."""


def stages(plan: ExperimentPlan, run: PlannedRun) -> Sequence[RunStage]:
    """The ordinary `moe-trm train`, then `moe-trm eval` by each of the file's `evaluations`."""
    moe_trm, folder = run_module("moe_trm"), plan.folder / run.name
    ranks = ["--nproc-per-node", str(plan.file.ranks)] if plan.file.ranks else []
    attach = [f"rollout.url={run.server}"] if run.server else []
    run_stages = [RunStage("training", [*moe_trm, "train", plan.file.base, *run.overrides, *attach, *ranks])]
    for by in plan.file.evaluations:
        result = result_of(plan, run.name, by)
        command = [*moe_trm, "eval", str(folder), *attach, "--by", by, "--json", str(result)]
        run_stages.append(RunStage(f"evaluation by {by}", command, result))
    return run_stages


def result_of(plan: ExperimentPlan, run: str, by: str) -> Path:
    """The folder of the final evaluation of a run."""
    return plan.folder / run / "eval" / f"final-{short_name(by)}.json"
