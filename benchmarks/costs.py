"""Costs of recording, replay, proof and correction on the quickstart's step, by switching them off one by one.

`python -m benchmarks.costs --checkpoint DIR [--rounds 3] [--steps 30] [--json FILE]` makes whole runs in turn: with
everything on, and without one part. A row has the seconds of a step and the CPU seconds of all processes of the run
(server, controller, ranks), and what the part costs of both: the median over the rounds of 1 - without / with. Probes
are off in all runs: what they cost is `probe.tokens`' choice. CPU seconds hardly depend on what else the machine does.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from benchmarks.options import command_line
from benchmarks.table import Row, report

CONFIG = Path("configs/quickstart.yaml")
SKIPPED = 4
"""Steps at the beginning that warm up."""
PAUSE_S = 0.05
WHOLE = "everything on"
WITHOUT: Mapping[str, tuple[str, ...]] = {
    WHOLE: (),
    "sampling masks": ("sampling_mask.mode=off",),
    "routes, their replay and its proof": ("replay.mode=none",),
    "correction": ("correction.rules=[]",),
    "proof of pushes": ("sync.verify=false",),
    "all of these": ("sampling_mask.mode=off", "replay.mode=none", "correction.rules=[]", "sync.verify=false"),
}
"""Parts and the settings without them."""


@dataclass(frozen=True)
class Cost:
    """Medians of the steps of one run: wall seconds, and CPU seconds of all its processes."""

    seconds: float
    cpu_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder, e.g. runs/quickstart-start")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run (default: 30)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(args.checkpoint, Path(folder), args.rounds, args.steps))
    report("Costs of a step's parts, from runs in turn", rows, args.json)
    return 0


def measured(checkpoint: str, folder: Path, rounds: int, steps: int) -> Iterator[Row]:
    """A row for each part."""
    found: dict[str, list[Cost]] = {name: [] for name in WITHOUT}
    for number in range(rounds):
        for name, overrides in WITHOUT.items():
            place = folder / f"{number}-{list(WITHOUT).index(name)}"
            found[name].append(run(checkpoint, place, steps, overrides))
    whole = found[WHOLE]
    for name, costs in found.items():
        row: Row = {
            "without": "-" if name == WHOLE else name,
            "step s": statistics.median(cost.seconds for cost in costs),
            "CPU s": statistics.median(cost.cpu_seconds for cost in costs),
        }
        if name != WHOLE:
            wall = [1 - cost.seconds / base.seconds for cost, base in zip(costs, whole, strict=True)]
            cpu = [1 - cost.cpu_seconds / base.cpu_seconds for cost, base in zip(costs, whole, strict=True)]
            row |= {
                "of the step": statistics.median(wall),
                "of the CPU": statistics.median(cpu),
                "lowest": min(cpu),
                "highest": max(cpu),
            }
        yield row


def run(checkpoint: str, folder: Path, steps: int, overrides: Sequence[str]) -> Cost:
    """One run of the quickstart's settings. Raises `SystemExit` when it fails."""
    settings = (f"model.checkpoint={checkpoint}", f"train.steps={steps}", "task.eval_size=0", "train.export=false")
    place = (f"run_dir={folder.parent}", f"name={folder.name}", "probe.every=0", "rollout.server.port=0")
    log_path = folder.with_suffix(".log")
    command = [sys.executable, "-m", "moe_trm", "train", str(CONFIG), *settings, *place, *overrides]
    with log_path.open("wb") as log, psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT) as job:
        begun = _cpu_at(job, folder, SKIPPED)
        ended = _cpu_at(job, folder, steps - 1)
        code = job.wait()
    if code or begun is None or ended is None:
        raise SystemExit(f"{' '.join(command)}\n{log_path.read_text()[-2000:]}")
    seconds = [float(row["time/step_s"]) for row in _rows(folder) if "time/step_s" in row]
    return Cost(statistics.median(seconds[SKIPPED:]), (ended - begun) / (steps - 1 - SKIPPED))


def _cpu_at(job: psutil.Popen, folder: Path, step: int) -> float | None:
    """CPU seconds of all processes so far, once `step` steps are done; None where the run ended before."""
    while sum("time/step_s" in row for row in _rows(folder)) < step:
        if job.poll() is not None:
            return None
        time.sleep(PAUSE_S)
    total = 0.0
    for process in [job, *job.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _rows(folder: Path) -> list[dict[str, float]]:
    """Of the lines that are whole."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [orjson.loads(line) for line in lines if line.endswith(b"\n")]


if __name__ == "__main__":
    sys.exit(main())
