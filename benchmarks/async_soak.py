"""A long asynchronous run on servers that are killed, paused and kept busy, beside processes that burn the cores.

`python -m benchmarks.async_soak [--steps 300] [--servers 2] [--eta 4] [--partial wait interrupt] [--json FILE]
[key=value ...]` trains the tiny model of `soak_job` in `pipeline.mode=async`, once for each `--partial`. Servers are
kept by `launch.rollout`. At random moments one is killed, or stopped for a while, or its keeper is stopped, or it gets
long requests that nobody waits for, or all its connections are reset. Weights are pushed after every step, so pushes
meet all of that.

A run holds when it does all its steps, its books balance at every step, no sample is older than eta, no answer was
malformed, and the engine ratio is rounding at every step. The last shows that what was trained on came from the weights
of its label: a server that comes back serves those of the checkpoint. `stale k3` shows what other weights would do. The
exit status is 1 when a run does not hold.
"""

from __future__ import annotations

import math
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.disturbed_servers import FAULTS, Disturber, kept_servers, neighbours
from benchmarks.options import command_line
from benchmarks.resume_drill import books_balance, metrics_of
from benchmarks.soak_job import write_job
from benchmarks.table import Row, report
from launch.job import learner_environment

ENGINE_K3 = 1e-6
"""Nats per token that two float32 engines may differ by at the same weights."""
SETTINGS = (
    "pipeline.mode=async",
    "optimizer.lr=3e-5",
    "rollout.server.max_restarts=100000",
    "rollout.recovery_timeout_s=1200",
    "rollout.server.startup_timeout_s=900",
    "rollout.timeout_s=60",
)
LOST = ("records/rejected/malformed", "records/rejected/engine_failed")
"""Reasons of rejection that no disturbance may cause."""


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
    parser.add_argument("--neighbours", type=int, default=1, help="processes that burn a core (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances (default: 0)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders and all logs here")
    args = parser.parse_intermixed_args(argv)
    rows: list[Row] = []
    for partial in args.partial:
        settings = [*SETTINGS, f"pipeline.partial={partial}", f"pipeline.max_staleness={args.eta}", *args.overrides]
        with tempfile.TemporaryDirectory(prefix="moe-trm-soak-") as temporary:
            folder = (args.keep or Path(temporary)) / partial
            folder.mkdir(parents=True, exist_ok=True)
            started = time.perf_counter()
            with neighbours(args.neighbours):
                code, done = soak(folder, settings, args.steps, args.servers, args.every, args.seed)
            metrics = metrics_of(folder / "soak")
            if code:
                print((folder / "run.log").read_text(errors="replace")[-4000:], flush=True)
        rows.append(
            {
                "partial": partial,
                "seconds": round(time.perf_counter() - started),
                **{name: done[name] for name in FAULTS},
                **judged(metrics, code, args.steps, args.eta),
            }
        )
    report("Asynchronous runs on disturbed servers", rows, args.json)
    return 0 if all(row["verdict"] == "holds" for row in rows) else 1


def soak(
    folder: Path, settings: Sequence[str], steps: int, num_servers: int, every_s: float, seed: int
) -> tuple[int, Counter[str]]:
    """Run once; its exit code, and the disturbances."""
    config, key = write_job(folder), secrets.token_hex(16)
    own = [*settings, f"run_dir={folder}"]
    with kept_servers(config, own, num_servers, key, folder) as servers:
        urls = ",".join(server.url for server in servers)
        command = [*own, f"rollout.urls=[{urls}]", "name=soak", f"train.steps={steps}"]
        with (folder / "run.log").open("wb") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "moe_trm", "train", str(config), *command],
                env=learner_environment(key),
                stdout=log,
                stderr=log,
            )
        disturber = Disturber(servers, every_s, seed)
        thread = threading.Thread(target=disturber.run)
        try:
            while run.poll() is None and not metrics_of(folder / "soak"):  # nothing is disturbed before it began
                time.sleep(0.2)
            thread.start()
            code = run.wait()
        finally:
            disturber.end()
            if thread.is_alive():
                thread.join()
            if run.poll() is None:
                run.terminate()
                run.wait()
    return code, disturber.done


def judged(metrics: Sequence[Mapping[str, Any]], code: int, steps: int, eta: int) -> Row:
    """Figures of a run, and its verdict: `holds`, or everything that does not."""
    trained = metrics[1:]
    last: Mapping[str, Any] = trained[-1] if trained else {}
    age = max((row["rollout/age_max"] for row in trained), default=0.0)
    # metrics.jsonl has null for what is not finite.
    ratios = [math.inf if row["engine/k3_kl"] is None else row["engine/k3_kl"] for row in trained]
    wrong = sum(not ratio <= ENGINE_K3 for ratio in ratios)
    lost = sum(last.get(name, 0.0) for name in LOST)
    faults = {
        f"ended with exit code {code}": code != 0,
        f"{len(trained)} of {steps} steps": len(trained) != steps,
        "the books do not balance": not books_balance(trained),
        "samples are left over": bool(last.get("ledger/queued", 0.0) or last.get("ledger/in_flight", 0.0)),
        "samples beyond eta": age > eta,
        f"{wrong} steps on weights that were not those of their label": wrong > 0,
        "answers lost": lost > 0,
    }
    return {
        "steps": len(trained),
        "losses": int(last.get("rollout/losses", 0.0)),
        "recoveries": int(last.get("rollout/recoveries", 0.0)),
        "reissued": int(last.get("rollout/reissued", 0.0)),
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
