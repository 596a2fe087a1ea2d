"""The arms of an experiment as far as they have run: finished runs by seed, failures, means over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from moe_trm.errors import RunError
from moe_trm.observe.report.intervals import around_mean
from moe_trm.run_folder.run import Run, read_run
from moe_trm.tools.experiment.plan import ExperimentPlan
from moe_trm.tools.experiment.progress import RunState, States
from moe_trm.tools.experiment.stages import result_of


@dataclass(frozen=True)
class Arm:
    """An arm's finished runs by seed, the states of all its runs, and by who answered the evaluations of each finished
    run.

    Failed and unfinished runs are in no figure, and are counted beside it. Runs that repeat a seed (`repetitions`, and
    `again`, their states) are in none of its means.
    """

    name: str
    runs: Mapping[int, Run]
    states: tuple[RunState, ...]
    evaluations: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    repetitions: Mapping[int, Run] = field(default_factory=dict)
    again: tuple[RunState, ...] = ()

    @property
    def failed(self) -> tuple[RunState, ...]:
        return tuple(state for state in self.states if state.state == "failed")

    @property
    def runs_in_words(self) -> str:
        """Number of runs that its figures are of."""
        unfinished = len(self.states) - len(self.runs) - len(self.failed)
        parts = [f"{len(self.runs)} of {len(self.states)} runs finished"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{unfinished} not finished yet"] if unfinished else []
        return ", ".join(parts)

    def values(self, metric: str, *, at_end: bool = False) -> list[float]:
        """One value for each finished run that measured `metric` finitely: its last one, or the mean over its steps."""
        figures = []
        for run in self.runs.values():
            points = [(step, value) for step, value in run.series(metric) if step > 0 or at_end]
            if at_end and points and points[-1][0] == run.last_step and points[-1][1] is not None:
                figures.append(points[-1][1])
            finite = [value for _, value in points if value is not None]
            if not at_end and finite:
                figures.append(mean(finite))
        return figures

    def metrics(self) -> set[str]:
        return {name for run in self.runs.values() for name in run.metrics()}

    def mean_run(self) -> Run | None:
        """The mean over its finished runs, step by step where all have the metric; None where none has finished.

        A step where any of them is not finite is not finite.
        """
        runs = list(self.runs.values())
        if not runs:
            return None
        series = {metric: dict(self._common(metric)) for metric in sorted(self.metrics())}
        steps = sorted({step for points in series.values() for step in points})
        rows = [
            {"step": step, **{metric: _mean(points[step]) for metric, points in series.items() if step in points}}
            for step in steps
        ]
        return Run(runs[0].folder, {**runs[0].config, "name": self.name}, rows, ())

    def reach(self, metric: str) -> list[tuple[int, float, float]]:
        """Student's 95% interval of the mean at every step that all finished runs have; empty for a single run."""
        intervals = []
        for step, values in self._common(metric):
            finite = [value for value in values if value is not None]
            interval = around_mean(finite) if len(finite) == len(values) else None
            if interval is not None:
                intervals.append((step, *interval))
        return intervals

    def _common(self, metric: str) -> Iterator[tuple[int, Sequence[float | None]]]:
        points_by_run = [dict(run.series(metric)) for run in self.runs.values()]
        for step in sorted(set.intersection(*(set(points) for points in points_by_run))):
            yield step, [points[step] for points in points_by_run]


def read_arms(plan: ExperimentPlan, states: States) -> list[Arm]:
    """Every arm of the plan, in its order. Raises `RunError` for a finished run whose files are gone."""
    arms = []
    for name in plan.file.arms:
        arm_states, again = (
            tuple(state for state in states if state.arm == name and state.again is second) for second in (False, True)
        )
        runs, repetitions = (
            {state.seed: read_run(plan.folder / state.run) for state in part if state.state == "finished"}
            for part in (arm_states, again)
        )
        evaluations: dict[str, list[Mapping[str, float]]] = {
            by: [_evaluation(result_of(plan, state.run, by)) for state in arm_states if state.state == "finished"]
            for by in plan.file.evaluations
        }
        arms.append(Arm(name, runs, arm_states, evaluations, repetitions, again))
    return arms


def _evaluation(path: Path) -> Mapping[str, float]:
    """The metrics that `moe-trm eval` wrote. Raises `RunError`."""
    try:
        metrics: Mapping[str, float] = json.loads(path.read_bytes())["metrics"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise RunError(
            "the evaluation of a finished run cannot be read",
            where=str(path),
            got=repr(error),
            expected="what `moe-trm eval --json` wrote",
            fix="Write it again with `moe-trm eval RUN --by WHO --json` and this path.",
        ) from error
    return metrics


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return mean(finite) if len(finite) == len(values) else None
