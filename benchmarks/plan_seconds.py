"""Seconds of a step that the planner's simulation predicts, against real runs in three pipeline modes.

`python -m benchmarks.plan_seconds [--steps N] [--repeats N] [--json FILE]`. Two synchronous runs measure what the
simulation needs: with many and with few requests in flight, the seconds of a decoding pass and of each row in it; the
seconds of a pass of log-probs, of all other training, of handing over and of a push; the share of time in which each
side computes. Then runs of the real SGLang server and the real learner, one rank each, are measured in each mode.
Nothing of these runs is used by the prediction.

Servers and learner share the cores of one machine here (`benchmarks/sharing.py`). The speed of a core while all
compute is measured apart (`benchmarks/crowded_cores.py`). A step lasts from one line of metrics to the next. The
learning rate is 0, so that answers keep their lengths.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.crowded_cores import crowded
from benchmarks.options import command_line
from benchmarks.sharing import Cores
from benchmarks.short_run import SETTINGS, starting_checkpoint
from benchmarks.side_cores import SideClock, watched
from benchmarks.table import Row, report
from launch.job import run_job
from moe_trm.config.load import load
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.recording.bundle import BundleReader
from moe_trm.tools.plan.lengths import Lengths, recorded
from moe_trm.tools.plan.modes import Mode
from moe_trm.tools.plan.simulate import SimulatedSchedule, SimulatedServers, simulate
from moe_trm.tools.plan.speed import anchor_passes

MODES = (("sync",), ("one_step",), ("async", "pipeline.max_staleness=2"))
MANY, FEW = 128, 16
"""Requests in flight, in the measured runs and in the second run that measures speeds."""
SKIPPED = 3
"""First steps, in which nothing has been sampled ahead and caches are cold."""
WALL = "wall_s"
"""Seconds from the line of the step before to the line of this one: what comes between two steps is in it."""


@dataclass(frozen=True)
class Speeds:
    """Speeds of a machine, from two synchronous runs.

    Attributes:
        pass_s, row_s: seconds of a decoding pass, and of each row in it.
        score_s: of a pass of log-probs over a step; `train_s` of all else that the learner does, `push_s` of loading.
        server_cores, learner_cores: that each side keeps busy while it has work and the other one has none.
        cores: of the machine.
        lengths: of answers.
    """

    pass_s: float
    row_s: float
    score_s: float
    train_s: float
    push_s: float
    server_cores: float
    learner_cores: float
    cores: Cores
    lengths: Lengths

    @property
    def sharing(self) -> float:
        """Speed of each side while both compute."""
        return self.cores.sharing(self.server_cores, self.learner_cores)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: runs/quickstart-start if there)")
    parser.add_argument("--steps", type=int, default=14, help=f"of each run, {SKIPPED} not counted (default: 14)")
    parser.add_argument("--repeats", type=int, default=1, help="of everything (default: 1)")
    args = parser.parse_args(argv)
    start_load, rows = os.getloadavg()[0], list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = starting_checkpoint(args.checkpoint, Path(folder))
        for repeat in range(args.repeats):
            place = Path(folder) / str(repeat)
            place.mkdir()
            rows += repeated(checkpoint, place, args.steps)
    report(f"Seconds of a step; load before the first run {start_load:.1f}", rows, args.json)
    return 0


def repeated(checkpoint: Path, folder: Path, steps: int) -> list[Row]:
    """One row for each mode."""
    path = folder / "config.yaml"
    settings = SETTINGS | {"run_dir": str(folder / "runs"), "model": {"checkpoint": str(checkpoint)}}
    settings |= {"learner": {}, "optimizer": {"lr": 0.0}, "observe": {"report": False, "transcripts": 0}}
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    speeds = calibrate(path, checkpoint, folder, steps)
    return [compared(path, folder, words, steps, speeds) for words in MODES]


def run(path: Path, folder: Path, name: str, steps: int, words: Sequence[str]) -> list[dict[str, float]]:
    """Metrics of the counted steps of one run, and `WALL` of each."""
    code = run_job(str(path), settings_of(folder, name, steps, words), 1)
    if code:
        raise MoeTrmError(f"run {name} ended with exit code {code}", where=str(folder))
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, float]] = [row for row in map(json.loads, lines) if "time/step_s" in row]
    return [
        row | {WALL: row["time/unix_s"] - previous["time/unix_s"]} for previous, row in pairwise(rows[SKIPPED - 1 :])
    ]


def settings_of(folder: Path, name: str, steps: int, words: Sequence[str]) -> list[str]:
    """Overrides of one run. Its rollouts are recorded, for their lengths."""
    return [f"name={name}", f"train.steps={steps}", f"record.bundle={folder / name}", *words]


def calibrate(path: Path, checkpoint: Path, folder: Path, steps: int) -> Speeds:
    """The speeds of this machine, by a run with many requests in flight and a shorter one with few."""
    cores = Cores(len(os.sched_getaffinity(0)), crowded(checkpoint))
    words = [f"rollout.concurrency={MANY}"]
    with watched() as clock:
        many = run(path, folder, "many", steps, words)
    few = run(path, folder, "few", max(SKIPPED + 2, steps // 2), [f"rollout.concurrency={FEW}"])
    pass_s, row_s = decoding(
        [(sampling_s(many), *decoded(folder / "many", MANY)), (sampling_s(few), *decoded(folder / "few", FEW))]
    )
    lengths = recorded(str(folder / "many"))
    push_s = min(mean(many, "push"), mean(many, "sync"))
    # What the learner waits beyond the sampling is the way of the batch to it, and counts as the learner's.
    rest_s = fmean(row[WALL] for row in many) - min(sampling_s(many), mean(many, "wait")) - mean(many, "score") - push_s
    score_s = mean(many, "score") / anchor_passes(load(str(path), settings_of(folder, "many", steps, words)))
    return Speeds(pass_s, row_s, score_s, rest_s, push_s, *busy_cores(clock, many), cores, lengths)


def mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of `time/NAME_s`."""
    return fmean(row.get(f"time/{name}_s", 0.0) for row in rows)


def sampling_s(rows: Sequence[Mapping[str, float]]) -> float:
    """Seconds in which the controller had samples in flight, of a step."""
    return mean(rows, "rollout")


def decoded(bundle: Path, slots: int) -> tuple[float, float]:
    """Decoding passes and decoded tokens of a step, when `slots` requests are in flight at most."""
    reader, passes, tokens = BundleReader(str(bundle)), list[float](), list[int]()
    for step in list(reader.steps())[SKIPPED:]:
        answers = [record.num_sampled for record in sorted(reader.read(step), key=lambda record: record.sample_id)]
        passes.append(
            simulate([answers], 0.0, SimulatedServers(1, slots, lambda _n: 1.0), SimulatedSchedule(0)).ends_s[-1]
        )
        tokens.append(sum(answers))
    return fmean(passes), fmean(tokens)


def decoding(runs: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of a pass and of a row: seconds = pass_s * passes + row_s * tokens, for two runs.

    Where noise makes one of them negative, it is 0 and the other one explains the first run.
    """
    (first_s, passes, tokens), (second_s, more_passes, more_tokens) = runs
    determinant = passes * more_tokens - more_passes * tokens
    pass_s = (first_s * more_tokens - second_s * tokens) / determinant
    row_s = (passes * second_s - more_passes * first_s) / determinant
    if pass_s < 0:
        return 0.0, first_s / tokens
    return (pass_s, row_s) if row_s >= 0 else (first_s / passes, 0.0)


def busy_cores(clock: SideClock, rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Cores that the servers keep busy while samples are in flight, and the learner while it does not wait."""
    sampling = training = server = learner = 0.0
    for row in rows:
        end = row["time/unix_s"]
        start = end - row["time/step_s"]
        turn = start + row["time/wait_s"]
        sampling, training = sampling + turn - start, training + end - turn
        server += clock.between("server", start, turn)
        learner += clock.between("learner", turn, end)
    if not server or not learner:
        raise MoeTrmError(
            "the processes of one side were not seen",
            got=f"{server:.2f} CPU seconds of the servers, {learner:.2f} of the learner",
            expected="some of each",
            fix="Look at ROLES of benchmarks/processes.py.",
        )
    return server / sampling, learner / training


def predicted(config: Config, speeds: Speeds, steps: int) -> tuple[float, float]:
    """Mean seconds of a counted step, and the share of it in which the learner waits."""
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    slots = config.rollout.server.max_running_requests
    fleet = SimulatedServers(
        1,
        slots,
        lambda n: 1 / (speeds.pass_s + speeds.row_s * n),
        speeds.push_s,
        in_flight=float(config.rollout.concurrency),
        sharing=speeds.sharing,
    )
    fresh, with_older = anchor_passes(config, 0.0), anchor_passes(config, 1.0)
    train_s, older_s = speeds.train_s + speeds.score_s * fresh, speeds.score_s * (with_older - fresh)
    schedule = Mode.of(config.pipeline, config.learner.minibatches).schedule(sends=config.sync.method == "distributed")
    simulation = simulate(speeds.lengths.batches(steps, samples), train_s, fleet, schedule, older_s)
    return (simulation.ends_s[-1] - simulation.ends_s[SKIPPED - 1]) / (steps - SKIPPED), simulation.learner_idle_later


def compared(path: Path, folder: Path, words: Sequence[str], steps: int, speeds: Speeds) -> Row:
    """The row of one mode. The interval is the measured mean's, two standard errors wide on each side."""
    mode, *mode_settings = words
    overrides = [f"pipeline.mode={mode}", f"rollout.concurrency={MANY}", *mode_settings]
    expected, idle = predicted(load(str(path), settings_of(folder, mode, steps, overrides)), speeds, steps)
    rows = run(path, folder, mode, steps, overrides)
    seconds = [row[WALL] for row in rows]
    measured, error = fmean(seconds), stdev(seconds) / len(seconds) ** 0.5
    return {
        "mode": mode,
        "predicted s": expected,
        "measured s": measured,
        "predicted / measured": expected / measured,
        "from": expected / (measured + 2 * error),
        "to": expected / max(measured - 2 * error, 1e-9),
        "learner waits, predicted": idle,
        "learner waits, measured": mean(rows, "wait") / measured,
        "cores, servers": speeds.server_cores,
        "cores, learner": speeds.learner_cores,
        "crowded": speeds.cores.crowded,
        "sharing": speeds.sharing,
        "pass ms": 1000 * speeds.pass_s,
        "row ms": 1000 * speeds.row_s,
        "score s": speeds.score_s,
        "other training s": speeds.train_s,
        "push s": speeds.push_s,
    }


if __name__ == "__main__":
    sys.exit(main())
