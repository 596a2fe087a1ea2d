"""Costs of recording, replay, proof and correction on the quickstart's step, by switching them off one by one.

`python -m benchmarks.costs --checkpoint DIR [--rounds 6] [--steps 16] [--json FILE]` makes short runs in turn. Each run
without a part stands between two with everything on, and is compared with their mean. Every other round is in the
opposite order. The learning rate is 0, so that all runs sample from the same policy. Ranks are forks of one process.
Two servers run, of which one has no recorder of routes: runs without routes sample from it. One waits while the other
works.

A row has the seconds of a step, and the CPU seconds of all processes of the run (server, controller, ranks) for 1,000
sampled tokens. Beside them is what the part costs: medians over the rounds of `1 - without / with`, and for the CPU a
95% interval of the mean. CPU seconds depend less on neighbours than wall clock, and still grow by a third where ten
processes share two cores: measure on an idle machine. Probes are off in all runs: what they cost is `probe.tokens`'
choice.
"""

from __future__ import annotations

import itertools
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import orjson
import psutil

from benchmarks.options import command_line
from benchmarks.table import Row, report
from launch.warm import warm_server
from moe_trm.config import load
from moe_trm.report.intervals import paired
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.sglang import supervisor
from moe_trm.runtime.warm import WarmProcess

CONFIG = Path("configs/quickstart.yaml")
SKIPPED = 4
"""Steps at the beginning that warm up."""
PAUSE_S = 0.01
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
SETTINGS = (
    "optimizer.lr=0.0",
    "probe.every=0",
    "task.eval_size=0",
    "train.export=false",
    "checkpoint.every=0",
    "observe.report=false",
)


@dataclass(frozen=True)
class Cost:
    """One run: the median of its steps' wall seconds, and CPU seconds of all its processes for 1,000 sampled tokens."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Place:
    """Where runs are made: the process that forks them, the server of each kind, and the key of both."""

    folder: Path
    checkpoint: str
    warm: str
    warm_pid: int
    servers: Mapping[bool, supervisor.Server]
    """By whether the server records routes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder, e.g. runs/quickstart-start")
    parser.add_argument("--rounds", type=int, default=6, help="runs without each part (default: 6)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run (default: 16)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, place(args.checkpoint, Path(folder)) as here:
        found = measured(lambda name, number: run(here, name, number, args.steps), args.rounds)
    report("Costs of a step's parts, from runs in turn", list(rows(found)), args.json)
    return 0


def measured(make: Callable[[str, int], Cost], rounds: int) -> dict[str, list[tuple[Cost, Cost]]]:
    """By part, round by round: the mean of the whole runs before and after, and the run without it.

    `make(name, number)` makes the run without the part `name`; the numbers of runs differ.
    """
    number = itertools.count()
    make(EVERYTHING, next(number)), make(WHOLE, next(number))  # servers and files warm up
    found: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in WITHOUT if name != WHOLE}
    before = make(WHOLE, next(number))
    for turn in range(rounds):
        for name in list(found)[:: -1 if turn % 2 else 1]:
            cost, after = make(name, next(number)), make(WHOLE, next(number))
            found[name].append((_mean(before, after), cost))
            before = after
    return found


def _mean(one: Cost, other: Cost) -> Cost:
    return Cost((one.seconds + other.seconds) / 2, (one.cpu_seconds + other.cpu_seconds) / 2)


def rows(found: Mapping[str, Sequence[tuple[Cost, Cost]]]) -> Iterator[Row]:
    """A row for each part, after one of the whole runs."""
    yield {"without": "-", **_medians([base for pairs in found.values() for base, _ in pairs])}
    for name, pairs in found.items():
        wall = [1 - cost.seconds / base.seconds for base, cost in pairs]
        cpu = [1 - cost.cpu_seconds / base.cpu_seconds for base, cost in pairs]
        row: Row = {"without": name, **_medians([cost for _, cost in pairs])}
        row |= {"of the step": statistics.median(wall), "of the CPU": statistics.median(cpu)}
        if (interval := paired(cpu).interval) is not None:
            row |= {"CPU from": interval[0], "CPU to": interval[1]}
        yield row


def _medians(costs: Sequence[Cost]) -> Row:
    return {
        "step s": statistics.median(cost.seconds for cost in costs),
        "CPU s / 1,000 tokens": statistics.median(cost.cpu_seconds for cost in costs),
    }


@contextmanager
def place(checkpoint: str, folder: Path) -> Iterator[Place]:
    """Servers and the process of warm ranks, inside the `with`."""
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        warm = stack.enter_context(warm_server(folder / "warm.log"))
        address = warm.address()
        servers = {records: stack.enter_context(serving(checkpoint, folder, key, records)) for records in (True, False)}
        assert warm.pid is not None
        yield Place(folder, checkpoint, address, warm.pid, servers)


@contextmanager
def serving(checkpoint: str, folder: Path, key: str, records: bool) -> Iterator[supervisor.Server]:
    """A server with or without the recorder of routes, which the product always starts."""
    command = supervisor.launch_command

    def bare(*args: object, **options: object) -> list[str]:
        return [word for word in command(*args, **options) if word != RECORDER]  # type: ignore[arg-type]

    config = load(CONFIG, [f"model.checkpoint={checkpoint}", "rollout.server.port=0"])
    with nullcontext() if records else patch.object(supervisor, "launch_command", bare):
        server = supervisor.start_server(config, folder / f"server-{records}.log", key)
    try:
        yield server
    finally:
        server.stop()


def run(place: Place, name: str, number: int, steps: int) -> Cost:
    """One run of the quickstart's settings without the part `name`. Raises `SystemExit` when it fails."""
    server = place.servers["replay.mode=none" not in WITHOUT[name]]
    folder = place.folder / f"{number}"
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
    tokens = sum(row["response/length_mean"] for row in counted) * answers_of_a_step()
    seconds = statistics.median(row["time/step_s"] for row in counted)
    return Cost(seconds, 1000 * (ended - begun) / tokens)


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
