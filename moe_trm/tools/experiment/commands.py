"""`moe-trm experiment FILE`: arms x seeds from one file, with a page and a table at the end."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from launch.start.preflight import check_start
from moe_trm.config.flat import as_yaml
from moe_trm.errors import ConfigError, RunError
from moe_trm.runtime.output import outliving_readers
from moe_trm.tools.experiment import page
from moe_trm.tools.experiment.arms import read_arms
from moe_trm.tools.experiment.code import code_version
from moe_trm.tools.experiment.comparison import LEAST_PAIRS
from moe_trm.tools.experiment.plan import Check, ExperimentPlan, PlannedRun, make_plan
from moe_trm.tools.experiment.processes import alone, left_to_run, run_all
from moe_trm.tools.experiment.progress import STATES, States
from moe_trm.tools.experiment.shared_server import Serve, serve
from moe_trm.tools.experiment.stages import Stages, stages


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm experiment`."""
    parser.add_argument("file", help="YAML file with base, arms, seeds, steps and primary_metric")
    parser.add_argument("--out", type=Path, help="folder of the runs and the page (default: run_dir/name of the file)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="run these arms only; the others wait (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="run these seeds only (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and run nothing")
    parser.add_argument("--retry-failed", action="store_true", help="run those that failed again, and keep the count")
    parser.add_argument("--report", action="store_true", help="write page and table of what has run, and run nothing")


def run(args: argparse.Namespace) -> int:
    """0 when every run finished, 1 when some failed, 128 + signal when stopped. Raises `ConfigError`, `RunError`."""
    with outliving_readers():
        return run_experiment(
            args.file,
            args.out,
            jobs=args.jobs,
            arms=args.arms or (),
            seeds=args.seeds or (),
            dry_run=args.dry_run,
            retry_failed=args.retry_failed,
            only_report=args.report,
        )


def run_experiment(
    file: str | Path,
    out: Path | None = None,
    *,
    jobs: int = 1,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    dry_run: bool = False,
    retry_failed: bool = False,
    only_report: bool = False,
    check: Check = check_start,
    made_of: Stages = stages,
    served_by: Serve = serve,
) -> int:
    """As the command; `check` and `made_of` are of each run, `served_by` of all. Same errors."""
    if jobs < 1:
        raise ConfigError("at least one run at a time", where="--jobs", got=jobs, expected="1 or more")
    plan = make_plan(file, out, (lambda _config, _ranks: None) if only_report else check)
    _check_known("arm", arms, tuple(plan.file.arms))
    _check_known("seed", seeds, plan.file.seeds)
    attached = [arm for arm, config in plan.configs.items() if not config.rollout.starts_server]
    if jobs > 1 and attached:
        raise ConfigError(
            "runs that push weights to the same servers cannot run at a time",
            where=f"arm {attached[0]}",
            got=f"rollout.url or rollout.urls, and --jobs {jobs}",
            expected="one run at a time, or servers of their own",
        )
    if jobs > 1 and plan.file.shared_server:
        raise ConfigError(
            "runs that share a server push their weights to it, so they cannot run at a time",
            where="shared_server",
            got=f"true, and --jobs {jobs}",
            expected="one run at a time, or shared_server: false",
        )
    if dry_run:
        print("\n".join(described(plan, States(plan), jobs)))
        return 0
    if only_report and not (plan.folder / STATES).is_file():
        raise RunError(
            "this experiment has not begun",
            where=str(plan.folder),
            got=f"no {STATES}",
            expected="the folder of an experiment",
            fix="Run it first, without --report.",
        )
    with alone(plan.folder):
        states = States(plan)
        states.begin(plan)
        pending = [] if only_report else left_to_run(plan, states, retry_failed=retry_failed, arms=arms, seeds=seeds)
        asked = _run(plan, states, pending, jobs, made_of, served_by) if pending else 0
        results = read_arms(plan, states)
        written = page.write(plan, results, about(plan, states), states.fixed.changes)
    print("\n".join(page.summary(plan, results)))
    print(f"page: {written[0]}\ntable: {written[1]}", flush=True)
    return 128 + asked if asked else int(any(state.state == "failed" for state in states))


def _check_known(kind: str, names: Sequence[object], expected: Sequence[object]) -> None:
    unknown = [name for name in names if name not in expected]
    if unknown:
        raise ConfigError(
            f"no {kind} of the experiment",
            where=f"--{kind}s",
            got=", ".join(map(str, unknown)),
            expected=" or ".join(map(str, expected)),
        )


def _run(
    plan: ExperimentPlan,
    states: States,
    pending: Sequence[PlannedRun],
    jobs: int,
    made_of: Stages,
    served_by: Serve,
) -> int:
    """`run_all` beside the server that the runs share, if they do."""
    if not plan.file.shared_server:
        return run_all(plan, states, pending, jobs=jobs, made_of=made_of)
    with served_by(plan) as server:
        return run_all(plan, states, pending, jobs=jobs, made_of=server.attached(made_of))


def described(plan: ExperimentPlan, states: States, jobs: int) -> list[str]:
    """The plan, for the user to decide whether to start it."""
    file = plan.file
    repeated = f" and {len(file.repeated_seeds)} repeated" if file.repeated_seeds else ""
    lines = [
        f"{file.name}: {len(file.arms)} arms x {len(file.seeds)} seeds{repeated} = {len(plan.runs)} runs of "
        f"{file.steps} steps, "
        f"{jobs} at a time, into {plan.folder}",
        f"base: {file.base}",
        f"primary metric: {file.primary_metric}, every arm against {file.against}",
    ]
    for arm in file.arms:
        distinct = [f"{key}={as_yaml(value)} (not {as_yaml(first)})" for key, (first, value) in plan.apart(arm).items()]
        lines.append(f"arm {arm}: {', '.join(distinct) or 'the baseline'}")
    lines += [f"{run.name}: {states.of(run).state}" for run in plan.runs]
    if len(file.seeds) < LEAST_PAIRS:
        lines.append(f"note: with fewer than {LEAST_PAIRS} seeds no claim will be possible")
    return lines


def about(plan: ExperimentPlan, states: States) -> list[str]:
    """The time of the runs and their machine."""
    ends = [state.ended_unix_s for state in states if state.ended_unix_s is not None]
    last = f"last run ended {datetime.fromtimestamp(max(ends), UTC):%Y-%m-%d %H:%M} UTC" if ends else "no run has ended"
    return [
        f"{len(plan.file.arms)} arms x {len(plan.file.seeds)} seeds, {plan.file.steps} steps each",
        f"primary metric {plan.file.primary_metric}, against {plan.file.against}",
        f"page by {code_version()}",
        f"{platform.machine()}, {os.cpu_count()} cores",
        last,
    ]
