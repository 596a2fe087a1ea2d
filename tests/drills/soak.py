"""A long run, observed from outside: growth of its processes and of its files over the steps.

`python -m tests.drills.soak [key=value ...] [--config FILE] [--steps 500] [--json FILE]` runs `moe-trm train` and
measures every process of it once a second. Without a configuration of your own, a tiny model is trained on a live
SGLang server, with a reward function, probes, checkpoints, evaluations and two learner ranks (`soak_job`).
`record.bundle=DIR` records it. `rollout.engine=bundle rollout.bundle=DIR` runs on the recording, without a server.

The verdict on each process is the result of `growth` for its memory. It is `handles` when the process ends with more
files, sockets or threads than in the second quarter of the steps. The exit status is 1 when one of our processes, the
run folder or the pushes grow. SGLang's growth is only shown.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import numpy as np

from benchmarks.options import command_line
from benchmarks.processes import Reading, numbered, watch
from benchmarks.short_run import metrics_of
from benchmarks.soak_job import write_job
from benchmarks.table import Row, report
from tests.drills.growth import Line, growth

NAME = "soak"
PUSHES = Path("/dev/shm")
LOGS = ("*.log", "*.jsonl", "*.html", "transcripts/*")
"""Files that a run appends to at each step; they are expected to grow."""
SPARE_HANDLES = 2
"""A file or thread more or less at the moment of a reading is no growth."""
GOOD = ("flat", "levels off")
MIN_STEPS = 100
"""Fewer are over before every block of `growth` was read."""
MIB = 1 << 20


@dataclass
class Kept:
    """Measurements of one folder: the last finished step, bytes and files at each."""

    readings: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, step: int, paths: Iterable[Path]) -> None:
        sizes = [size for path in paths if (size := _size(path)) is not None]
        self.readings.append((step, sum(sizes), len(sizes)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run, e.g. train.steps=6")
    parser.add_argument("--config", type=Path, help="YAML configuration of another job than the built-in one")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default: 500)")
    args = parser.parse_intermixed_args(argv)
    if args.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}")
    with tempfile.TemporaryDirectory(prefix="moe-trm-soak-") as temporary:
        folder = Path(temporary)
        config, run = args.config or write_job(folder), folder / NAME
        settings = [*args.overrides, f"run_dir={folder}", f"name={NAME}", f"train.steps={args.steps}"]
        kept = {"run folder without logs": Kept(), "pushes in shared memory": Kept()}

        def step() -> int:
            return steps_in(run / "metrics.jsonl")

        def read_files() -> None:
            kept["run folder without logs"].add(step(), state_files(run))
            pushed = [file for root in PUSHES.glob(f"moe-trm-*-{NAME}") for file in files_in(root)]
            kept["pushes in shared memory"].add(step(), pushed)

        readings = watch([sys.executable, "-m", "moe_trm", "train", str(config), *settings], step, read_files)
        metrics = metrics_of(run)
    rows = [row for name, seen in readings if (row := process_row(name, seen, args.steps))]
    for row, name in zip(rows, numbered([str(row["process"]) for row in rows]), strict=True):
        row["process"] = name
    rows += [row for name, place in kept.items() if (row := place_row(name, place, args.steps))]
    seconds = statistics.median(row["time/step_s"] for row in metrics[1:])
    held = max(row["ledger/queued"] + row["ledger/in_flight"] for row in metrics[1:])
    title = (
        f"{len(metrics) - 1} steps, median {seconds:.2f} s; at most {held:.0f} samples held between steps. Growth in "
        "MiB per 100 steps, "
        "with its standard error, after the first quarter of the steps and over the second half; handles gained since "
        "the second quarter"
    )
    raw = [{"process": name, "looks": [astuple(reading) for reading in seen]} for name, seen in readings]
    report(title, rows, args.json, {"look": [column.name for column in fields(Reading)], "processes": raw})
    ours = [row for row in rows if not str(row["process"]).startswith("SGLang")]
    return 0 if len(metrics) == args.steps + 1 and all(row["verdict"] in GOOD for row in ours) else 1


def process_row(name: str, readings: Sequence[Reading], steps: int) -> Row | None:
    """One process in figures; None for one that did not live through the run."""
    row = _growth_row(name, [reading.step for reading in readings], [reading.memory for reading in readings], steps)
    if row is None:
        return None
    second, last = _quarters(readings, steps)
    row["RSS MiB"], gained = _median(reading.resident for reading in last) / MIB, {}
    for handle in ("files", "sockets", "threads"):
        earlier, later = (_median(getattr(reading, handle) for reading in part) for part in (second, last))
        gained[handle] = int(later - earlier)
        row[handle] = f"{later:.0f}{f' {gained[handle]:+}' if gained[handle] else ''}"
    if any(more > SPARE_HANDLES for more in gained.values()):
        row["verdict"] = f"{row['verdict']}, handles"
    return {**row, "verdict": row.pop("verdict")}


def place_row(name: str, kept: Kept, steps: int) -> Row | None:
    """The same of files on a disk."""
    row = _growth_row(name, [reading[0] for reading in kept.readings], [reading[1] for reading in kept.readings], steps)
    files = _median(number for step, _, number in kept.readings if step >= 3 * steps / 4) if row else 0
    return row and {
        **row,
        "RSS MiB": "",
        "files": f"{files:.0f}",
        "sockets": "",
        "threads": "",
        "verdict": row.pop("verdict"),
    }


def steps_in(path: Path) -> int:
    """The last finished step; the first line is what was measured before the first."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def state_files(run: Path) -> list[Path]:
    """Files of the state that the run needs to continue: all of its files but the logs."""
    return [path for path in files_in(run) if not any(path.relative_to(run).match(pattern) for pattern in LOGS)]


def files_in(folder: Path) -> list[Path]:
    """All files under `folder`, some of which may be gone again by now."""
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def _growth_row(name: str, steps: Sequence[int], values: Sequence[int], num_steps: int) -> Row | None:
    trend = growth(np.array(steps, np.float64), np.array(values, np.float64), num_steps)
    if trend is None:
        return None
    return {
        "process": name,
        "MiB": _median(value for step, value in zip(steps, values, strict=True) if step >= 3 * num_steps / 4) / MIB,
        "growth": _rate(trend.settled),
        "late growth": _rate(trend.late),
        "verdict": trend.verdict,
    }


def _rate(line: Line) -> str:
    """MiB per 100 steps."""
    return f"{100 * line.slope / MIB:.3f} ± {100 * line.error / MIB:.3f}"


def _quarters(readings: Sequence[Reading], steps: int) -> tuple[list[Reading], list[Reading]]:
    second = [reading for reading in readings if steps / 4 <= reading.step < steps / 2]
    return second, [reading for reading in readings if reading.step >= 3 * steps / 4]


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _size(path: Path) -> int | None:
    """Bytes of a file; None for what is gone again."""
    try:
        return path.stat().st_size
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
