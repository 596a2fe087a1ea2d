"""Seconds of a step that the planner's simulation predicts, against real runs in three pipeline modes.

`python -m benchmarks.plan_seconds [--steps N] [--repeats N] [--json FILE]`. Two short synchronous runs measure what the
simulation needs: with many and with few requests in flight, the seconds of a decoding pass and of each row in it; the
seconds of training, of handing over and of a push; the cores that each side keeps busy. Then runs of the real SGLang
server and the real learner, one rank each, are measured in each mode. Nothing of these runs is used by the prediction.

Servers and learner share the cores of one machine here. While both compute, each gets min(1, cores / cores that both
ask for) of its speed. The learning rate is 0, so that answers keep their lengths.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.options import command_line
from benchmarks.short_run import SETTINGS, starting_checkpoint
from benchmarks.side_cores import SideClock, watched
from benchmarks.table import Row, report
from launch.job import run_job
from moe_trm.config.load import load
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.plan.lengths import Lengths, recorded
from moe_trm.plan.modes import Mode
from moe_trm.plan.simulate import Fleet, Schedule, simulate
from moe_trm.plan.speed import anchor_passes
from moe_trm.recording.bundle import BundleReader

MODES = (("sync",), ("one_step",), ("async", "pipeline.max_staleness=2"))
MANY, FEW = 128, 16
"""Requests in flight, in the measured runs and in the second run that measures speeds."""
SKIPPED = 3
"""First steps, in which nothing has been sampled ahead and caches are cold."""


@dataclass(frozen=True)
class Speeds:
    """Speeds of a machine, from two short synchronous runs.

    Attributes:
        pass_s, row_s: seconds of a decoding pass, and of each row in it.
        score_s: of the log-prob passes of a step; `train_s` of all else that the learner does, `push_s` of loading.
        server_cores, learner_cores: that each side keeps busy while it computes.
        lengths: of answers.
    """

    pass_s: float
    row_s: float
    score_s: float
    train_s: float
    push_s: float
    server_cores: float
    learner_cores: float
    lengths: Lengths

    @property
    def sharing(self) -> float:
        """Speed of each side while both compute on the cores that this process may use."""
        return min(1.0, len(os.sched_getaffinity(0)) / (self.server_cores + self.learner_cores))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: runs/quickstart-start if there)")
    parser.add_argument("--steps", type=int, default=14, help=f"of each run, {SKIPPED} not counted (default: 14)")
    parser.add_argument("--repeats", type=int, default=1, help="of everything (default: 1)")
    args = parser.parse_args(argv)
    before, rows = os.getloadavg()[0], list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = starting_checkpoint(args.checkpoint, Path(folder))
        for repeat in range(args.repeats):
            place = Path(folder) / str(repeat)
            place.mkdir()
            rows += repeated(checkpoint, place, args.steps)
    report(f"Seconds of a step; load before the first run {before:.1f}", rows, args.json)
    return 0


def repeated(checkpoint: Path, folder: Path, steps: int) -> list[Row]:
    """One row for each mode."""
    path = folder / "config.yaml"
    settings = SETTINGS | {"run_dir": str(folder / "runs"), "model": {"checkpoint": str(checkpoint)}}
    settings |= {"learner": {}, "optimizer": {"lr": 0.0}, "observe": {"report": False, "transcripts": 0}}
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    speeds = calibrate(path, folder, max(SKIPPED + 2, steps // 2))
    return [compared(path, folder, words, steps, speeds) for words in MODES]


def run(path: Path, folder: Path, name: str, steps: int, words: Sequence[str]) -> list[dict[str, float]]:
    """Metrics of the training steps of one run."""
    overrides = [f"name={name}", f"train.steps={steps}", f"record.bundle={folder / name}", *words]
    code = run_job(str(path), overrides, 1)
    if code:
        raise MoeTrmError(f"run {name} ended with exit code {code}", where=str(folder))
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, float]] = [json.loads(line) for line in lines]
    return [row for row in rows if "time/step_s" in row][SKIPPED:]


def calibrate(path: Path, folder: Path, steps: int) -> Speeds:
    """The speeds of this machine, by a run with many requests in flight and one with few."""
    with watched() as clock:
        many = run(path, folder, "many", steps, [f"rollout.concurrency={MANY}"])
    few = run(path, folder, "few", steps, [f"rollout.concurrency={FEW}"])
    pass_s, row_s = decoding(
        [(sampling_s(many), *decoded(folder / "many", MANY)), (sampling_s(few), *decoded(folder / "few", FEW))]
    )
    lengths = recorded(str(folder / "many"))
    # What the learner waits beyond the sampling is the way of the batch to it.
    handed = max(0.0, mean(many, "wait") - mean(many, "rollout"))
    push_s = min(mean(many, "push"), mean(many, "sync"))
    others = mean(many, "step") - mean(many, "wait") - mean(many, "score") - push_s
    server, learner = cores(clock, many)
    return Speeds(pass_s, row_s, mean(many, "score"), others + handed, push_s, server, learner, lengths)


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
        passes.append(simulate([answers], 0.0, Fleet(1, slots, lambda _n: 1.0), Schedule(0)).ends_s[-1])
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


def cores(clock: SideClock, rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Cores that the servers keep busy while samples are in flight, and the learner while it does not wait."""
    sampling = training = server = learner = 0.0
    for row in rows:
        end = row["time/unix_s"]
        begun = end - row["time/step_s"]
        turn = begun + row["time/wait_s"]
        sampling, training = sampling + turn - begun, training + end - turn
        server += clock.between("server", begun, turn)
        learner += clock.between("learner", turn, end)
    return server / sampling, learner / training


def predicted(config: Config, speeds: Speeds, steps: int) -> tuple[float, float]:
    """Mean seconds of a counted step, and the share of it in which the learner waits."""
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    slots = config.rollout.server.max_running_requests
    fleet = Fleet(
        1,
        slots,
        lambda n: 1 / (speeds.pass_s + speeds.row_s * n),
        speeds.push_s,
        in_flight=float(config.rollout.concurrency),
        sharing=speeds.sharing,
    )
    base = anchor_passes(load_sync(config))
    train_s = speeds.train_s + speeds.score_s * anchor_passes(config) / base
    schedule = Mode.of(config).schedule(sends=config.sync.method == "distributed")
    found = simulate(speeds.lengths.batches(steps, samples), train_s, fleet, schedule)
    return (found.ends_s[-1] - found.ends_s[SKIPPED - 1]) / (steps - SKIPPED), found.learner_idle_later


def load_sync(config: Config) -> Config:
    """The same run in the mode whose seconds were measured."""
    pipeline = config.pipeline.model_copy(update={"mode": "sync", "max_staleness": None})
    return config.model_copy(update={"pipeline": pipeline})


def compared(path: Path, folder: Path, words: Sequence[str], steps: int, speeds: Speeds) -> Row:
    """The row of one mode. The interval is that of the measured mean, two standard errors wide on each side."""
    mode, *others = words
    overrides = [f"pipeline.mode={mode}", f"rollout.concurrency={MANY}", *others]
    expected, idle = predicted(load(str(path), overrides), speeds, steps)
    rows = run(path, folder, mode, steps, overrides)
    seconds = [row["time/step_s"] for row in rows]
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
        "pass ms": 1000 * speeds.pass_s,
        "row ms": 1000 * speeds.row_s,
    }


if __name__ == "__main__":
    sys.exit(main())
