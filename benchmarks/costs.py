"""Costs of recording, replay, proof and correction on the quickstart's step, by switching them off one by one.

`python -m benchmarks.costs --checkpoint DIR [--rounds 4] [--steps 10] [--json FILE]` makes short runs. A round has
every part once switched off, all of them twice, and runs with everything on between; every other round is in the
opposite order. The learning rate is 0, so that all runs sample from the same policy. Ranks are forks of one process.
Two servers run, of which one has no recorder of routes: runs without routes sample from it. One waits while the other
works. They are started anew after every other round, because two processes that do the same may differ by a percent.

A run has the seconds of a step, and the CPU seconds of all processes (server, controller, ranks) for 1,000 sampled
tokens. How long answers are is chance, and moves both by more than a part does. So logarithms of all runs together are
explained by least squares: what is switched off, the round, and the logarithms of the mean and the longest answer. The
95% intervals are Student's, from what is left of all runs. CPU seconds depend less on neighbours than wall clock, and
still grow by a third where ten processes share two cores: measure on an idle machine.

`sync.verify=false` leaves a push as it is and asks for no proof: the digests that ranks make of their tensors stay.
Probes are off in all runs: what they cost is `probe.tokens`' choice.
Without masks the server draws tokens in the same way, from the same sorted weights, because the quickstart's vocabulary
is below the 4,096 ids that a mask may have; the learner scores over the vocabulary.

Without routes the router chooses as it does under replay: replay asks it for its choice, too, to count flips, and skips
nothing. The replayer stays attached with nothing to prove: its hooks and one exchange of empty counts for each update
are in all runs. So are the metrics of mismatch, which `correction.rules=[]` leaves as they are.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import orjson
import psutil

from benchmarks.options import command_line
from benchmarks.table import Row, report
from launch.warm import warm_server
from moe_trm.config import load
from moe_trm.report.intervals import Interval, t_quantile
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.sglang import supervisor
from moe_trm.runtime.warm import WarmProcess

CONFIG = Path("configs/quickstart.yaml")
SKIPPED = 3
"""Steps at the beginning that warm up."""
PAUSE_S = 0.02
RECORDER = "--enable-return-routed-experts"
WHOLE = "everything on"
ROUTES = "routes, their replay and its proof"
EVERYTHING = "all of these"
WITHOUT: Mapping[str, tuple[str, ...]] = {
    WHOLE: (),
    "sampling masks": ("sampling_mask.mode=off",),
    ROUTES: ("replay.mode=none",),
    "correction": ("correction.rules=[]",),
    "proof of pushes": ("sync.verify=false",),
    EVERYTHING: ("sampling_mask.mode=off", "replay.mode=none", "correction.rules=[]", "sync.verify=false"),
}
"""Parts and the settings without them."""
ROUND = (
    WHOLE, "sampling masks", EVERYTHING, ROUTES, WHOLE, "correction", EVERYTHING, "proof of pushes", WHOLE,
)  # fmt: skip
"""Runs of a round: most of those that all others are compared with, then of the sum."""
ROUNDS_OF_SERVERS = 2
SETTINGS = (
    "optimizer.lr=0.0",
    "probe.every=0",
    "task.eval_size=0",
    "train.export=false",
    "checkpoint.every=0",
    "observe.report=false",
)


@dataclass(frozen=True)
class Run:
    """One run: the median of its steps' wall seconds, and CPU seconds of all its processes for 1,000 sampled tokens.

    `length` is the mean length of its answers in tokens, and `longest` the mean of the longest ones of its steps.
    """

    seconds: float
    cpu_seconds: float
    length: float
    longest: float


@dataclass(frozen=True)
class Share:
    """The part of the whole that something takes, with its 95% interval."""

    value: float
    interval: Interval


Make = Callable[[str, int], Run]
"""Makes the run without a part; the numbers of runs differ."""


@dataclass(frozen=True)
class Place:
    """Where runs are made, how long they are, and the process that forks them."""

    folder: Path
    checkpoint: str
    steps: int
    warm: str
    warm_pid: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder, e.g. runs/quickstart-start")
    parser.add_argument("--rounds", type=int, default=4, help=f"of {len(ROUND)} runs each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, warm_server(Path(name) / "warm.log") as warm:
        address = warm.address()
        assert warm.pid is not None
        here = Place(Path(name), args.checkpoint, args.steps, address, warm.pid)
        found = measured(lambda: serving(here), args.rounds)
    report("Costs of a step's parts, from runs in turn", list(rows(found)), args.json, {"runs": details(found)})
    return 0


def measured(serve: Callable[[], AbstractContextManager[Make]], rounds: int) -> list[list[tuple[str, Run]]]:
    """Round by round, each run with what was switched off. `serve` starts new servers, and makes runs with them."""
    number = itertools.count()
    found: list[list[tuple[str, Run]]] = []
    for first in range(0, rounds, ROUNDS_OF_SERVERS):
        with serve() as make:
            make(EVERYTHING, next(number)), make(WHOLE, next(number))  # servers and files warm up
            for turn in range(first, min(first + ROUNDS_OF_SERVERS, rounds)):
                order = ROUND[:: -1 if turn % 2 else 1]
                found.append([(name, make(name, next(number))) for name in order])
    return found


def shares(found: Sequence[Sequence[tuple[str, Run]]], value: Callable[[Run], float]) -> dict[str, Share]:
    """By part, `1 - without / with`: the logarithms of `value` by least squares over all runs."""
    runs = [(turn, name, run) for turn, made in enumerate(found) for name, run in made]
    parts = [name for name in WITHOUT if name != WHOLE]
    chance = np.log([[run.length, run.longest] for _, _, run in runs])
    design = np.column_stack(
        [
            *(np.array([float(name == part) for _, name, _ in runs]) for part in parts),
            *(np.array([float(turn == each) for turn, _, _ in runs]) for each in range(len(found))),
            chance - chance.mean(0),
        ]
    )
    values = np.log([value(run) for _, _, run in runs])
    effects, _, rank, _ = np.linalg.lstsq(design, values)
    left, degrees = values - design @ effects, len(runs) - int(rank)
    spread = np.sqrt(np.diag(np.linalg.pinv(design.T @ design)) * (left @ left) / degrees) * t_quantile(degrees)
    return {
        part: Share(1 - math.exp(effect), (1 - math.exp(effect + reach), 1 - math.exp(effect - reach)))
        for part, effect, reach in zip(parts, effects[: len(parts)], spread[: len(parts)], strict=True)
    }


def rows(found: Sequence[Sequence[tuple[str, Run]]]) -> Iterator[Row]:
    """A row for each part, after one of the whole runs."""
    of_step, of_cpu = shares(found, lambda run: run.seconds), shares(found, lambda run: run.cpu_seconds)
    for name in WITHOUT:
        own = [run for made in found for part, run in made if part == name]
        row: Row = {
            "without": "-" if name == WHOLE else name,
            "runs": len(own),
            "step s": statistics.median(run.seconds for run in own),
            "CPU s / 1,000 tokens": statistics.median(run.cpu_seconds for run in own),
        }
        if name != WHOLE:
            row |= _columns("step", of_step[name]) | _columns("CPU", of_cpu[name])
        yield row


def _columns(what: str, share: Share) -> Row:
    return {f"of the {what}": share.value, f"{what} from": share.interval[0], f"{what} to": share.interval[1]}


def details(found: Sequence[Sequence[tuple[str, Run]]]) -> list[Row]:
    """Every run, for the file."""
    return [{"round": turn, "without": name, **asdict(run)} for turn, made in enumerate(found) for name, run in made]


@contextmanager
def serving(place: Place) -> Iterator[Make]:
    """Servers of both kinds, inside the `with`, and runs with them."""
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        servers = {records: stack.enter_context(server_of(place, key, records)) for records in (True, False)}

        def make(name: str, number: int) -> Run:
            return run(place, servers["replay.mode=none" not in WITHOUT[name]], name, number)

        yield make


@contextmanager
def server_of(place: Place, key: str, records: bool) -> Iterator[supervisor.Server]:
    """A server with or without the recorder of routes, which the product always starts."""
    command = supervisor.launch_command

    def bare(*args: object, **options: object) -> list[str]:
        return [word for word in command(*args, **options) if word != RECORDER]  # type: ignore[arg-type]

    config = load(CONFIG, [f"model.checkpoint={place.checkpoint}", "rollout.server.port=0"])
    with nullcontext() if records else patch.object(supervisor, "launch_command", bare):
        server = supervisor.start_server(config, place.folder / f"server-{records}.log", key)
    try:
        yield server
    finally:
        server.stop()


def run(place: Place, server: supervisor.Server, name: str, number: int) -> Run:
    """One run of the quickstart's settings without the part `name`. Raises `SystemExit` when it fails."""
    folder, steps = place.folder / f"{number}", place.steps
    settings = [*SETTINGS, *WITHOUT[name], f"model.checkpoint={place.checkpoint}", f"train.steps={steps}"]
    settings += [f"run_dir={folder.parent}", f"name={folder.name}", f"rollout.url={server.url}"]
    command = ["-m", "moe_trm", "train", str(CONFIG), *settings, "--warm-ranks", place.warm]
    environment = {**os.environ, API_KEY_VARIABLE: server.api_key}
    log_path = folder.with_suffix(".log")
    roots = (place.warm_pid, server.process.pid)
    with (
        log_path.open("wb") as log,
        WarmProcess(place.warm, command, environment, (0, log.fileno(), log.fileno())) as job,
    ):
        begun = cpu_at(job, folder, SKIPPED, roots)
        ended = cpu_at(job, folder, steps, roots)
        code = job.wait()
    if code or begun is None or ended is None:
        raise SystemExit(f"{' '.join(command)}\n{log_path.read_text()[-2000:]}")
    counted = steps_of(folder)[SKIPPED:]
    lengths = [row["response/length_mean"] for row in counted]
    return Run(
        statistics.median(row["time/step_s"] for row in counted),
        1000 * (ended - begun) / (sum(lengths) * answers_of_a_step()),
        statistics.fmean(lengths),
        statistics.fmean(row["response/length_max"] for row in counted),
    )


def answers_of_a_step() -> int:
    rollout = load(CONFIG, ["model.checkpoint=unused"]).rollout
    return rollout.prompts_per_step * rollout.group_size


def cpu_at(job: WarmProcess, folder: Path, step: int, roots: Sequence[int]) -> float | None:
    """CPU seconds of `roots` and all that they started, once `step` steps are done; None where the run ended before."""
    path, size = folder / "metrics.jsonl", 0
    while True:
        ended = job.poll() is not None
        now = path.stat().st_size if path.exists() else 0
        if now != size and len(steps_of(folder)) >= step:
            return cpu_seconds(roots)
        if ended:
            return None
        size = now
        time.sleep(PAUSE_S)


def cpu_seconds(roots: Sequence[int]) -> float:
    total = 0.0
    for root in map(psutil.Process, roots):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of finished steps, of the lines that are whole."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = [orjson.loads(line) for line in lines if line.endswith(b"\n")]
    return [row for row in found if "time/step_s" in row]


if __name__ == "__main__":
    sys.exit(main())
