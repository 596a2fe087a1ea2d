"""Our step beside TRL's: the same start, the same prompts, 128 answers and two updates, on one machine.

A round trains three short runs, one after the other, in an order that is drawn anew: TRL, ours without the probe, and
ours with the probe in every second step. A step lasts from the end of the one before to its own end, so nothing that a
run does between two steps is left out. A run is judged by the median of its steps, and each of ours by its ratio to the
TRL run of the same round.

All start from the same weights and learn at rate 0, which leaves out no work: answers stay as long as they are at the
start of a run, and are drawn from one policy.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.table import Row
from launch.job import run_job
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.tasks.build import build_task

TRL = "trl"
CONFIG = "configs/quickstart.yaml"
OURS: Mapping[str, tuple[str, ...]] = {
    "with the probe": ("probe.every=2",),
    "without it": ("probe.every=0",),
}
SKIPPED = 3
"""First steps of a run, which warm up."""
SETTINGS = ("optimizer.lr=0.0", "task.eval_size=0", "train.export=false", "rollout.server.port=0")
SCRIPT = Path(__file__).with_name("trl_steps.py")

Rounds = Sequence[Mapping[str, float]]
"""Median seconds of a step of each run, by round and by its name."""


def against_trl(checkpoint: str, folder: Path, python: str, rounds: int, steps: int) -> tuple[list[Row], Rounds]:
    """One row for each of our settings, and the seconds of every run.

    Args:
        checkpoint: the quickstart's start.
        folder: for the runs.
        python: an interpreter with `trl`.
        rounds: of three runs.
        steps: of a run that count.
    """
    draw, medians, names = random.Random(0), list[Mapping[str, float]](), [TRL, *OURS]
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        draw.shuffle(names)
        runs = {name: _steps_of(name, checkpoint, place, python, SKIPPED + steps) for name in names}
        medians.append({name: statistics.median(seconds[SKIPPED:]) for name, seconds in runs.items()})
    return list(rows(medians)), medians


def rows(rounds: Rounds) -> Iterator[Row]:
    """A row for each of our settings: medians over the rounds, and the lowest and the highest ratio of a round."""
    for name in OURS:
        ratios = [medians[name] / medians[TRL] for medians in rounds]
        yield {
            "ours": name,
            "seconds": statistics.median(medians[name] for medians in rounds),
            TRL: statistics.median(medians[TRL] for medians in rounds),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "rounds": len(rounds),
        }


def _steps_of(name: str, checkpoint: str, folder: Path, python: str, steps: int) -> list[float]:
    """Seconds of each step of a run."""
    if name == TRL:
        problems, written = folder / "problems.jsonl", folder / "trl.jsonl"
        problems.write_text("".join(_problems(checkpoint, steps)), encoding="utf-8")
        subprocess.run([python, str(SCRIPT), checkpoint, str(problems), str(steps), str(written)], check=True)
        return [row["time/step_s"] for row in read_steps(written)]
    run = name.replace(" ", "-")
    settings = [*SETTINGS, *OURS[name], f"model.checkpoint={checkpoint}", f"train.steps={steps}"]
    if code := run_job(CONFIG, [*settings, f"run_dir={folder}", f"name={run}"], 1):
        raise MoeTrmError(f"our run {name} ended with exit code {code}", where=str(folder / run))
    return between(read_steps(folder / run / "metrics.jsonl"))


def read_steps(path: Path) -> list[Mapping[str, float]]:
    """The lines of a file of metrics that stand for a step."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in lines if "time/step_s" in row]


def between(steps: Sequence[Mapping[str, float]]) -> list[float]:
    """Seconds from the end of one step to the end of the next; of the first step, its own."""
    ends = [row["time/unix_s"] for row in steps]
    return [steps[0]["time/step_s"], *(end - start for start, end in itertools.pairwise(ends))]


def _problems(checkpoint: str, steps: int) -> Iterator[str]:
    config = Config.model_validate({"model": {"checkpoint": checkpoint}})
    task = build_task(config.task, checkpoint, config.seed)
    for prompt in itertools.chain.from_iterable(task.train_prompts(step, 16) for step in range(1, steps + 1)):
        row = {"prompt": prompt.text, "answer": prompt.answer, "token_ids": list(prompt.token_ids)}
        yield json.dumps(row) + "\n"
