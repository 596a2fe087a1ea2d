"""Our step beside TRL's: the same start, the same prompts, 128 answers and two updates, in turn on one machine.

Three jobs are alive at once and take turns step by step, all but one stopped meanwhile (`benchmarks.in_turn`): TRL,
ours without the probe, and ours with the probe in every second step. A round has two turns of each in random order, so
that one of the last job's has a probe. A step lasts from the end of the one before to its own end. Nothing that a run
does between two steps is left out, but nobody watches our server.

All start from the same weights and learn at rate 0, which leaves out no work: answers stay as long as they are at the
start of a run, and are drawn from one policy.

The ratio is robust least squares on the logarithms of both turns' mean: job, round, and for each job what its answers
and the host do to it (`benchmarks.turn_ratios`). It holds for answers of mean length, and for a host as it was in the
mean. The estimator is Huber's, and intervals are Student's 95%.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.in_turn import Arm, Rounds, Turn, rounds_of, started, turns_of
from benchmarks.own_arms import SKIPPED, own_arm, place_in
from benchmarks.table import Row
from benchmarks.turn_ratios import Measured, ratios
from moe_trm.config.schema import Config
from moe_trm.tasks.build import build_task

TRL = "trl"
OURS: Mapping[str, tuple[str, ...]] = {
    "with the probe": ("probe.every=2",),
    "without it": ("probe.every=0",),
}
TURNS = 2
"""Of each job in a round: one with the probe and one without, where there is one."""
SKIPPED_ROUNDS = 1
SETTINGS = ("optimizer.lr=0.0", "task.eval_size=0", "train.export=false")


def against_trl(checkpoint: str, folder: Path, python: str, rounds: int) -> tuple[list[Row], list[Row]]:
    """One row for each of our settings, and every turn.

    A row has the seconds of both, and the ratio of ours to TRL's with its 95% interval.

    Args:
        checkpoint: the quickstart's start.
        folder: for the runs.
        python: an interpreter with `trl`.
        rounds: of two steps of each job.
    """
    steps = SKIPPED + TURNS * (SKIPPED_ROUNDS + rounds) + 1  # the last step of a job is never reached
    settings = [*SETTINGS, f"model.checkpoint={checkpoint}", f"train.steps={steps}"]
    with ExitStack() as stack:
        place = stack.enter_context(place_in(folder))
        arms = {TRL: stack.enter_context(trl_arm(checkpoint, folder, python, steps))}
        for name, own in OURS.items():
            arms[name] = stack.enter_context(own_arm(place, name, [*settings, *own]))
        found = list(rounds_of(arms, rounds, dict.fromkeys(arms, TURNS), SKIPPED_ROUNDS))
    return list(rows(found, versions_in(steps_file(folder))["trl"])), turns_of(found)


@contextmanager
def trl_arm(checkpoint: str, folder: Path, python: str, steps: int) -> Iterator[Arm]:
    """TRL's trainer, warmed up and stopped, inside the `with`."""
    problems, log = folder / "problems.jsonl", folder / "trl.log"
    problems.write_text("".join(_problems(checkpoint, steps)), encoding="utf-8")
    script = str(Path(__file__).with_name("trl_steps.py"))
    command = [python, script, checkpoint, str(problems), str(steps), str(steps_file(folder))]
    with started(command, log) as process, Arm(TRL, [process], steps_file(folder), [log]) as arm:
        arm.warm_up(SKIPPED)
        yield arm


def steps_file(folder: Path) -> Path:
    """What TRL's trainer writes of its steps."""
    return folder / "trl.jsonl"


def versions_in(path: Path) -> Mapping[str, str]:
    """Versions of TRL and of what it stands on, by module."""
    with path.open(encoding="utf-8") as lines:
        found: Mapping[str, str] = json.loads(next(lines))["versions"]
    return found


def rows(found: Rounds, version: str) -> Iterator[Row]:
    """A row for each of our settings."""
    means = [mean_of(name, number, made) for number, made in enumerate(found) for name in (TRL, *OURS)]
    compared = ratios(means, TRL, own_slopes=True)
    seconds = {name: statistics.median(one.value for one in means if one.arm == name) for name in (TRL, *OURS)}
    for name in OURS:
        yield {
            "ours": name,
            "seconds": seconds[name],
            f"trl {version}": seconds[TRL],
            "ratio": compared[name].value,
            "from": compared[name].interval[0],
            "to": compared[name].interval[1],
            "rounds": len(found),
        }


def mean_of(name: str, number: int, made: Sequence[tuple[str, Turn]]) -> Measured:
    """Both turns of a job in a round as one measurement."""
    turns = [turn for arm, turn in made if arm == name]
    chance = [(turn.row["response/length_mean"], turn.row["response/length_max"], *turn.host) for turn in turns]
    means = tuple(map(statistics.fmean, zip(*chance, strict=True)))
    return Measured(name, number, statistics.fmean(turn.seconds for turn in turns), means)


def _problems(checkpoint: str, steps: int) -> Iterator[str]:
    config = Config.model_validate({"model": {"checkpoint": checkpoint}})
    task = build_task(config.task, checkpoint, config.seed)
    for prompt in itertools.chain.from_iterable(task.train_prompts(step, 16) for step in range(1, steps + 1)):
        row = {"prompt": prompt.text, "answer": prompt.answer, "token_ids": list(prompt.token_ids)}
        yield json.dumps(row) + "\n"
