"""Kills a run with SIGKILL at random moments, resumes it, and compares its metrics bit for bit with an undisturbed run.

`python -m tests.drills.resume_drill CONFIG --bundle DIR [--kills 50] [--ranks 1 2] [--json FILE] [key=value ...]` needs
a recording with at least as many steps as are run (`record.bundle=DIR`). All processes of the run are killed at once,
as when a machine loses power. A checkpoint is written after every step, so some kills happen while a checkpoint is
being written.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.options import command_line
from benchmarks.short_run import metrics_of
from benchmarks.table import Row, report
from launch.job import learner_command, learner_environment

STARTUP_SHARE = 0.15
"""Share of kills that come before the resumed run has finished its first step."""
TIMED = ("time/", "rollout/tokens_per_s")
"""Metrics that measure time differ between any two runs."""


@dataclass(frozen=True)
class Drill:
    """A finished run that was killed several times.

    It has the number of kills and of different steps that they hit. `identical`: its metrics equal the undisturbed
    run's. `balanced`: every issued sample is accounted for at every step.
    """

    kills: int
    steps_hit: int
    identical: bool
    balanced: bool
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run, e.g. train.steps=6")
    parser.add_argument("--bundle", required=True, help="a recording of the run")
    parser.add_argument("--kills", type=int, default=50, help="for each number of ranks (default: 50)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="learner ranks, which share the experts (default: 1 2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: 0)")
    args = parser.parse_intermixed_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            drill = run_drill(
                args.config, args.overrides, args.bundle, Path(folder) / str(ranks), ranks, args.kills, seed=args.seed
            )
            rows.append({"ranks": ranks, **vars(drill)})
    report("A run killed with SIGKILL at random moments and resumed, against the run left alone", rows, args.json)
    return 0 if all(row["identical"] and row["balanced"] for row in rows) else 1


def run_drill(
    config: str,
    overrides: Sequence[str],
    bundle: str,
    folder: Path,
    ranks: int,
    kills: int,
    *,
    seed: int,
    undisturbed: Path | None = None,
) -> Drill:
    """Run once alone, then once with `kills` kills, on `ranks` ranks.

    Args:
        config: YAML file.
        overrides: further settings.
        bundle: recording to run on.
        folder: where the run folders go.
        ranks: learner ranks, which share the experts.
        kills: how often to kill; the run that ended is started anew until there were as many.
        seed: of the moments.
        undisturbed: the same run that nothing happened to; None: it is run first.
    """
    started, rng = time.perf_counter(), random.Random(seed)
    settings = [
        "rollout.engine=bundle", f"rollout.bundle={bundle}", f"run_dir={folder}", "checkpoint.every=1",
        f"learner.parallel.expert={ranks}", "train.export=false", *overrides,
    ]  # fmt: skip
    if undisturbed is None:
        undisturbed = folder / "alone"
        if _start(config, [*settings, "name=alone"], ranks).wait():
            raise SystemExit("the run that was left alone failed")
    expected, done, hit, identical, rounds = metrics_of(undisturbed), 0, set[int](), True, 0
    balanced = books_balance(expected)
    step_s = expected[-1]["time/step_s"]
    while done < kills:
        rounds += 1
        run = folder / f"killed-{rounds}"
        done = _kill_until_finished(config, [*settings, f"name={run.name}"], ranks, run, done, kills, hit, rng, step_s)
        identical &= timeless(metrics_of(run)) == timeless(expected)
        balanced &= books_balance(metrics_of(run))
    return Drill(done, len(hit), identical, balanced, time.perf_counter() - started)


def _kill_until_finished(
    config: str, settings: list[str], ranks: int, run: Path, done: int, kills: int, hit: set[int],
    rng: random.Random, step_s: float,
) -> int:  # fmt: skip
    """Restart the run until it is finished; while kills are left, kill it at a random moment.

    Returns the number of kills.
    """
    while True:
        steps_done, process = len(metrics_of(run)), _start(config, settings, ranks)
        if done < kills:
            if rng.random() < STARTUP_SHARE:
                _wait(process, rng.uniform(0.0, 8.0))
            else:
                while process.poll() is None and len(metrics_of(run)) <= steps_done:
                    time.sleep(0.01)
                _wait(process, rng.uniform(0.0, 3 * step_s))
            if process.poll() is None:
                kill_everything(process)
                done += 1
                hit.add(len(metrics_of(run)))
                print(f"{ranks} ranks: killed {done} of {kills} times, now in step {len(metrics_of(run))}", flush=True)
                continue
        if process.wait():
            raise SystemExit(f"a resumed run failed: {run}")
        return done


def _start(config: str, settings: list[str], ranks: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        learner_command(config, settings, ranks), env=learner_environment(None), stdout=subprocess.DEVNULL
    )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def kill_everything(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the process and all that it started, and theirs."""
    try:
        everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in everyone:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(everyone, timeout=10)


def books_balance(rows: Sequence[Mapping[str, Any]]) -> bool:
    """True when a row has ledger totals, and issued = queued + in_flight + trained + rejected + dropped in these."""
    places = ("queued", "in_flight", "trained", "rejected", "dropped")
    booked = [row for row in rows if "ledger/issued" in row]
    return bool(booked) and all(
        row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places) for row in booked
    )


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what measures time."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
