"""A long run, watched from outside: does the memory of any process, or the number of its open files, grow with the steps?

`python -m benchmarks.soak CONFIG [key=value ...] [--steps 500] [--json FILE]` runs `moe-trm train` and looks at every process of it once a
second. Memory is the resident set less what is shared with other processes' files. The first quarter of the steps is warm-up; what is
reported is the change from the second quarter's median to the last quarter's, and the slope over all but the first quarter.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.resume_drill import metrics_of
from benchmarks.table import Row, report

PAUSE_S = 1.0
FLAT_SHARE = 0.02
"""A process is flat when its median memory changes by no more than this share between the second and the last quarter."""
MIB = 1 << 20


@dataclass(frozen=True)
class Look:
    """One process at one moment: the last finished step, bytes of private memory, open file descriptors."""

    step: int
    memory: int
    files: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default: 500)")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*args.overrides, f"run_dir={folder}", "name=soak", f"train.steps={args.steps}"]
        looks = watch(args.config, overrides, Path(folder) / "soak")
        rows = [row for name, seen in sorted(looks.items()) if (row := summary(name, seen, args.steps))]
        steps = metrics_of(Path(folder) / "soak")
    seconds = statistics.median(row["time/step_s"] for row in steps[1:])
    report(
        f"{len(steps) - 1} steps, median {seconds:.2f} s: memory and open files of each process, second against last quarter",
        rows,
        args.json,
    )
    return 0 if rows and len(steps) == args.steps + 1 and all(row["flat"] for row in rows) else 1


def watch(config: str, overrides: Sequence[str], run: Path) -> dict[str, list[Look]]:
    """Run the job to its end; what every process of it looked like, by name."""
    job = psutil.Popen([sys.executable, "-m", "moe_trm", "train", config, *overrides], stdout=subprocess.DEVNULL)
    names: dict[int, str] = {}
    looks: defaultdict[str, list[Look]] = defaultdict(list)
    while True:
        try:
            status = job.wait(PAUSE_S)
        except psutil.TimeoutExpired:
            step = len(metrics_of(run)) - 1
            for process in [job, *job.children(recursive=True)]:
                try:
                    name = names.setdefault(process.pid, _name(process, names))
                    memory = process.memory_info()
                    looks[name].append(Look(step, memory.rss - memory.shared, process.num_fds()))
                except psutil.Error:
                    continue
            continue
        if status:
            raise SystemExit(f"the run ended with exit code {status}")
        return looks


def summary(name: str, looks: Sequence[Look], steps: int) -> Row | None:
    """One process in figures; None for one that did not live through the run."""
    settled = [look for look in looks if look.step >= steps / 4]
    second = [look for look in settled if look.step < steps / 2]
    last = [look for look in settled if look.step >= 3 * steps / 4]
    if not second or not last:
        return None
    before, after = (statistics.median(look.memory for look in part) for part in (second, last))
    files = [int(statistics.median(look.files for look in part)) for part in (second, last)]
    at, memory = (np.array([getattr(look, key) for look in settled], float) for key in ("step", "memory"))
    (slope, _), covariance = np.polyfit(at, memory, 1, cov=True)
    return {
        "process": name,
        "MiB": after / MIB,
        "change_MiB": (after - before) / MIB,
        "MiB_per_100_steps": 100 * float(slope) / MIB,
        "standard_error": 100 * float(np.sqrt(covariance[0, 0])) / MIB,
        "files": files[1],
        "change_files": files[1] - files[0],
        "flat": after - before <= FLAT_SHARE * before and files[1] - files[0] <= 2,
    }


def _name(process: psutil.Process, names: dict[int, str]) -> str:
    """What the process is, with a number where there are several."""
    words = process.cmdline()
    known = ("launch.ranks", "launch.train", "moe_trm.rollout.service", "sglang.launch_server", "moe_trm")
    what = next((word for word in known if word in words), " ".join(words[:1])[-40:] or process.name())
    return f"{what} {sum(name.startswith(what) for name in names.values())}"


if __name__ == "__main__":
    sys.exit(main())
