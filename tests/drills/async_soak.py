"""A long asynchronous run that is disturbed in every way, on a loaded machine.

`python -m tests.drills.async_soak [--steps 300] [--servers 2] [--eta 4] [--partial wait interrupt] [--load 10]
[--json FILE] [key=value ...]` trains the tiny model of `soak_job` in `pipeline.mode=async`, once for each `--partial`.
Servers are kept by `launch.rollout`. At random moments something happens (`disturbed_servers.FAULTS`):

- a server is killed, stopped for up to 25 s, or gets long requests that nobody waits for, or its keeper is stopped;
- all connections of a server are reset;
- the run, the servers and their keepers stand still together;
- the disk of the run's folder or the disk of the pushes is full for a while;
- the run is killed.

The run is started again by the same command where it was killed or met a full disk. Weights are pushed after every
step, so pushes meet all of that. It all happens where no other program is (`tests.drills.apart`).

A run holds when it does all its steps, its books balance at every step, every sample of every step was trained once, no
sample is older than eta, no answer was malformed, and the engine ratio is rounding at every step. The last shows that
what was trained on came from the weights of its label: a server that comes back serves the checkpoint's. `stale k3`
shows what other weights would do. No death is false: no server is started again or put out of service unless it was
killed or stopped for long, and the run ends only where it was killed or its disk was full. The exit status is 1 when a
run does not hold.
"""

from __future__ import annotations

import math
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import command_line
from benchmarks.short_run import metrics_of
from benchmarks.soak_job import write_job
from benchmarks.table import Row, report
from launch.job import learner_environment
from tests.drills.apart import run_isolated, small_disk
from tests.drills.disturbed_servers import FAULTS, Disturber, kept_servers, loaded
from tests.drills.resume_drill import books_balance

ENGINE_K3 = 1e-6
"""Nats per token that two float32 engines may differ by at the same weights."""
SETTINGS = (
    "pipeline.mode=async",
    "optimizer.lr=3e-5",
    "rollout.server.max_restarts=100000",
    "rollout.recovery_timeout_s=1200",
    "rollout.server.startup_timeout_s=900",
    "rollout.timeout_s=60",
    "checkpoint.every=5",
)
LOST = ("records/rejected/malformed", "records/rejected/engine_failed")
"""Reasons of rejection that no disturbance may cause."""
POLL_S = 0.2
SAMPLES = 16
"""Of a step of `soak_job`."""
DISK_MIB = 64
NO_ROOM = ("No space left on device", "the disk is full")
"""Words of a run that ends because its disk is full."""
STARTED_AGAIN, OUT_OF_SERVICE = "starting it again", "is out of service"
"""Words of a keeper and of the controller."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default: 300)")
    parser.add_argument("--servers", type=int, default=2, help="rollout servers (default: 2)")
    parser.add_argument("--eta", type=int, default=4, help="pipeline.max_staleness (default: 4)")
    parser.add_argument(
        "--partial", nargs="+", choices=("wait", "interrupt"), default=["wait", "interrupt"], help="one run for each"
    )
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between disturbances (default: 20)")
    parser.add_argument("--load", type=float, default=10.0, help="of the machine, at times (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances (default: 0)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders and all logs here")
    args = parser.parse_intermixed_args(argv)
    if (status := run_isolated("tests.drills.async_soak", sys.argv[1:] if argv is None else argv)) is not None:
        return status
    rows: list[Row] = []
    for partial in args.partial:
        settings = [*SETTINGS, f"pipeline.partial={partial}", f"pipeline.max_staleness={args.eta}", *args.overrides]
        with tempfile.TemporaryDirectory(prefix="moe-trm-soak-") as temporary:
            folder = (args.keep or Path(temporary)) / partial
            folder.mkdir(parents=True, exist_ok=True)
            started = time.perf_counter()
            with loaded(args.load) as loads:
                ran = soak(folder, settings, args.steps, args.servers, args.every, args.seed)
        rows.append(
            {
                "partial": partial,
                "seconds": round(time.perf_counter() - started),
                "load": f"{statistics.median(loads):.0f}, at most {max(loads):.0f}",
                **{name: ran.done[name] for name in FAULTS},
                **judged(ran, args.steps, args.eta),
            }
        )
    report("Asynchronous runs that are disturbed", rows, args.json)
    return 0 if all(row["verdict"] == "holds" for row in rows) else 1


@dataclass(frozen=True)
class Ran:
    """A run that was disturbed.

    Attributes:
        metrics: lines of `metrics.jsonl`.
        code: exit code of its last start.
        starts: times that it was started.
        unexplained: ends of it that no disturbance explains.
        restarts: of its servers, by their keepers.
        losses: times that the run put a server out of service, in all its starts.
        deadly: kills of servers, and stops that were long enough.
        done: disturbances by name.
    """

    metrics: Sequence[Mapping[str, Any]]
    code: int = 0
    starts: int = 1
    unexplained: int = 0
    restarts: int = 0
    losses: int = 0
    deadly: int = 0
    done: Counter[str] = field(default_factory=Counter)


@dataclass
class Kept:
    """`moe-trm train`, started again while its ends are explained."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    starts: int = 0
    unexplained: int = 0
    process: int = 0

    def run(self, room: threading.Event) -> int:
        """The exit code of the last start; `room`: see `Disturber`."""
        while True:
            begins = self.log.stat().st_size if self.log.exists() else 0
            with self.log.open("ab") as log:
                run = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
            self.starts, self.process = self.starts + 1, run.pid
            try:
                code = run.wait()
            finally:
                if run.poll() is None:
                    run.terminate()
                    run.wait()
            log_text = self.log.read_bytes()[begins:].decode(errors="replace")
            if code and code != -signal.SIGKILL and not any(words in log_text for words in NO_ROOM):
                print(log_text[-4000:], flush=True)
                self.unexplained += 1
            if not code or self.unexplained:
                return code
            room.wait()


def soak(folder: Path, settings: Sequence[str], steps: int, num_servers: int, every_s: float, seed: int) -> Ran:
    """Run once, to the end or to an end that no disturbance explains."""
    config, key = write_job(folder), secrets.token_hex(16)
    disks = [small_disk(folder / name, DISK_MIB) for name in ("runs", "pushes")]
    run_settings = [*settings, f"run_dir={disks[0]}", f"sync.dir={disks[1]}"]
    with kept_servers(config, run_settings, num_servers, key, folder) as servers:
        urls = ",".join(server.url for server in servers)
        command = [*run_settings, f"rollout.urls=[{urls}]", "name=soak", f"train.steps={steps}"]
        kept = Kept(
            [sys.executable, "-m", "moe_trm", "train", str(config), *command],
            learner_environment(key),
            folder / "run.log",
        )
        disturber = Disturber(servers, every_s, seed, lambda: kept.process, disks)
        over = threading.Event()

        def disturb() -> None:
            while not metrics_of(disks[0] / "soak"):  # nothing is disturbed before it began
                if over.wait(POLL_S):
                    return
            disturber.disturb()

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            code = kept.run(disturber.room)
        finally:
            over.set()
            disturber.end()
            thread.join()
    restarts = sum((folder / f"keeper-{number}.log").read_text().count(STARTED_AGAIN) for number in range(num_servers))
    run_dir = disks[0] / "soak"
    losses = (run_dir / "controller.log").read_text(errors="replace").count(OUT_OF_SERVICE)
    shutil.copytree(run_dir, folder / "soak")
    return Ran(
        metrics_of(run_dir), code, kept.starts, kept.unexplained, restarts, losses, disturber.deadly, disturber.done
    )


def judged(ran: Ran, steps: int, eta: int) -> Row:
    """Figures of a run, and its verdict: `holds`, or everything that does not."""
    trained = ran.metrics[1:]
    last: Mapping[str, Any] = trained[-1] if trained else {}
    age = max((row["rollout/age_max"] for row in trained), default=0.0)
    # metrics.jsonl has null for what is not finite.
    ratios = [math.inf if row["engine/k3_kl"] is None else row["engine/k3_kl"] for row in trained]
    wrong = sum(not ratio <= ENGINE_K3 for ratio in ratios)
    lost = sum(last.get(name, 0.0) for name in LOST)
    used = last.get("ledger/trained", 0.0) + last.get("ledger/rejected", 0.0)
    faults = {
        f"ended with exit code {ran.code}": ran.code != 0,
        f"{len(trained)} of {steps} steps": len(trained) != steps,
        "the books do not balance": not books_balance(trained),
        "samples are left over": bool(last.get("ledger/queued", 0.0) or last.get("ledger/in_flight", 0.0)),
        f"{used:.0f} samples were used": used != SAMPLES * steps,
        "samples beyond eta": age > eta,
        f"{wrong} steps on weights of another label": wrong > 0,
        "answers lost": lost > 0,
        f"{ran.restarts} servers started again": ran.restarts > ran.deadly,
        f"{ran.losses} servers out of service": ran.losses > ran.deadly,
        "the run ended by itself": ran.unexplained > 0,
    }
    return {
        "starts": ran.starts,
        "steps": len(trained),
        "deadly": ran.deadly,
        "restarts": ran.restarts,
        "losses": ran.losses,
        "trained": int(last.get("ledger/trained", 0.0)),
        "rejected": int(last.get("ledger/rejected", 0.0)),
        "dropped": int(last.get("ledger/dropped", 0.0)),
        "oldest": int(age),
        "engine k3": max(ratios, default=0.0),
        "stale k3": max((row.get("staleness/k3_kl") or 0.0 for row in trained), default=0.0),
        "verdict": "; ".join(fault for fault, holds in faults.items() if holds) or "holds",
    }


if __name__ == "__main__":
    sys.exit(main())
