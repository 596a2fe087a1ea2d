"""Seconds until every rank has ended that was asked to, or that lost its controller, and whether its step was saved.

`python -m tests.drills.stop_times [--pairs] [--modes ...] [--backends ...] [--moments ...] [--by ...] [--json FILE]
[key=value ...]` starts two ranks with a controller and a scripted server for each cell of the table, brings them to the
moment, and sends the signal. `--pairs`: a few of the cells, in which each two of the four are seen together once.
Cells that FILE has are not run again. A rank that has failed has the other one asked to end, as by torchrun. What is
left after `KILL_S` gets a SIGKILL. The table holds when no process needs more than `LIMIT_S`, none is killed, and
whoever was asked to stop has written a checkpoint of the last step that is in its metrics; else the exit status is 1.

The moments last: the server takes a minute for a token or for a push, and the first rank takes `DWELL_S` for an update
or a checkpoint, for which the other one waits.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

from benchmarks.options import command_line
from benchmarks.short_run import metrics_of
from benchmarks.table import Row, report
from launch.job import free_port
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.runtime.ending import run_to_end
from tests.integration.jobs import write_config
from tests.integration.ranks import ForkedRanks

LIMIT_S, KILL_S, DWELL_S, WAIT_S, POLL_S, SETTLED_S = 10.0, 30.0, 2.0, 300.0, 0.02, 0.5
TESTS, KEY = Path(__file__).parents[1], "key-of-the-drill"
SCRIPTED = f"{TESTS / 'unit' / 'rollout' / 'scripted_backend.py'}:ScriptedBackend"
SETTINGS = [
    *(f"rollout.engine={SCRIPTED}", "replay.mode=none", "probe.every=0", "probe.save=false", "sampling_mask.mode=off"),
    *("rollout.top_p=1", "rollout.prompts_per_step=2", "correction.rules=[]", "task.eval_size=0", "train.steps=1000"),
    f"task.reward={TESTS / 'integration' / 'objective_support' / 'reward.py'}:reward",
]
BACKENDS = {"megatron": (), "deepspeed": ("learner.backend=deepspeed", "learner.parallel.expert=1")}
MODES = {
    "sync": (), "one-step": ("pipeline.mode=one_step",), "async": ("pipeline.mode=async", "pipeline.partial=interrupt"),
}  # fmt: skip
"""A push that waited for the slow answers would keep ranks from waiting for samples."""
MOMENTS = {
    "peer": (), "server": (), "sampling": ("--token-s=60", "--slow-from=24"), "update": (), "push": ("--load-s=60",),
    "checkpoint": (),
}  # fmt: skip
"""What the server does then. The ranks wait for one that has not come; for a server; then as the names say."""
SAVED = ("sampling", "update", "push", "checkpoint")
"""Moments at which there is something to save."""
SIGNALS = (
    "Ctrl-C", "SIGTERM to all", "SIGTERM to all, the controller first", "SIGTERM to all, twice",
    "SIGTERM to the controller", "SIGKILL of the controller",
)  # fmt: skip
TWICE_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the runs")
    for name, choices in (("modes", MODES), ("backends", BACKENDS), ("moments", MOMENTS), ("by", SIGNALS)):
        parser.add_argument(f"--{name}", nargs="+", choices=[*choices], default=[*choices])
    parser.add_argument("--pairs", action="store_true")
    args = parser.parse_intermixed_args(argv)
    every_cell = cells(args.backends, args.modes, args.moments, args.by)
    measured = args.json is not None and args.json.exists()
    rows: list[Row] = json.loads(args.json.read_text())["rows"] if measured else []
    seen = {tuple(row[axis] for axis in ("backend", "mode", "moment", "by")) for row in rows}
    try:
        for cell in paired(every_cell) if args.pairs else every_cell:
            if cell not in seen:
                rows.append(stopped(*cell, args.overrides))
                print(rows[-1], flush=True)
    finally:
        report("Seconds until the last process has ended", rows, args.json)
    return 0 if all(row["verdict"] == "holds" for row in rows) else 1


Cell = tuple[str, str, str, str]
"""Backend, mode, moment and signal."""


def cells(
    backends: Sequence[str] = tuple(BACKENDS),
    modes: Sequence[str] = tuple(MODES),
    moments: Sequence[str] = tuple(MOMENTS),
    signals: Sequence[str] = SIGNALS,
) -> list[Cell]:
    """The whole table. Before the ranks have met there is no controller."""
    product = itertools.product(backends, modes, moments, signals)
    return [cell for cell in product if cell[2] != "peer" or "controller" not in cell[3]]


def paired(table: Sequence[Cell]) -> list[Cell]:
    """Cells of the table that show each pair of its values; the next is always the one with most new pairs."""

    def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
        return set(itertools.combinations(enumerate(cell), 2))

    cover: list[Cell] = []
    missing = {pair for cell in table for pair in pairs(cell)}
    while missing:
        cover.append(max(table, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(cover[-1])
    return cover


def stopped(backend: str, mode: str, moment: str, by: str, overrides: Sequence[str] = ()) -> Row:
    """One cell of the table."""
    with tempfile.TemporaryDirectory(prefix="stop-times-") as temporary:
        folder = Path(temporary)
        make_checkpoint(folder / "start", shape=TinyShape(layers=2, hidden=32, experts=4, expert_ffn=16))
        config, port = write_config(folder, folder / "start"), free_port()
        settings = [*SETTINGS, *BACKENDS[backend], *MODES[mode], f"rollout.url=http://127.0.0.1:{port}"]
        saves = "checkpoint.every=1" if moment == "checkpoint" else "checkpoint.every=0"
        run = folder / "runs" / "live"
        program = [__file__, str(config), *settings, saves, *overrides]
        environment = {**os.environ, "MOE_TRM_API_KEY": KEY, "DRILL_MOMENT": moment, "DRILL_FOLDER": temporary}
        with (
            (folder / "log").open("ab") as log,
            nullcontext() if moment == "server" else serving(MOMENTS[moment], port),
            ForkedRanks(program, 2, environment, [(log.fileno(), log.fileno())] * 2) as ranks,
        ):
            processes = [psutil.Process(rank.pid) for rank in ranks.processes]
            if moment == "peer":
                processes.pop().suspend()
            await_moment(folder, moment, processes)
            controllers = [] if moment == "peer" else [controller_of(processes[0])]
            seconds, killed = end(processes, controllers, by)
            for ended in (measured := ranks.processes[: len(processes)]):
                ended.join()
            statuses = [str(ended.exitcode) for ended in measured]
        last = len(metrics_of(run)) - 1
        saved = 0 < last == newest_checkpoint(run) if moment in SAVED and "KILL" not in by else None
        if killed or seconds > LIMIT_S or saved is False:
            print((folder / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
        return {
            "backend": backend,
            "mode": mode,
            "moment": moment,
            "by": by,
            "seconds": round(seconds, 1),
            "killed": killed,
            "exit": " ".join(statuses),
            "saved": {True: "yes", False: "no", None: "–"}[saved],
            "verdict": "holds" if seconds <= LIMIT_S and not killed and saved is not False else "does not hold",
        }


def await_moment(folder: Path, moment: str, ranks: Sequence[psutil.Process]) -> None:
    """Return when every rank has been there for `SETTLED_S`."""
    begun = since = time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        if not all((folder / f"{moment}-{rank}").exists() for rank in range(len(ranks))):
            since = time.monotonic()
        if since - begun > WAIT_S or not all(is_there(rank) for rank in ranks):
            raise SystemExit(f"'{moment}' did not come\n{(folder / 'log').read_text(errors='replace')[-4000:]}")
        time.sleep(POLL_S)


def end(ranks: Sequence[psutil.Process], controllers: Sequence[psutil.Process], by: str) -> tuple[float, int]:
    """Send what ends them; seconds until the last is gone, and how many had to be killed."""
    number = {"Ctrl-C": signal.SIGINT, "SIGKILL of the controller": signal.SIGKILL}.get(by, signal.SIGTERM)
    receivers: Sequence[psutil.Process] = [*controllers, *ranks] if "first" in by else [*ranks, *controllers]
    receivers = ranks if by == "Ctrl-C" else receivers if "all" in by else controllers
    begun, killed, others_asked = time.monotonic(), 0, by != "SIGTERM to the controller" and "KILL" not in by
    for _ in range(2 if "twice" in by else 1):
        for process in receivers:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        time.sleep(TWICE_S if "twice" in by else 0.0)
    while left := [process for process in [*ranks, *controllers] if is_there(process)]:
        if not others_asked and any(rank not in left for rank in ranks):
            others_asked = True
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.terminate()
        if not killed and time.monotonic() - begun > KILL_S:
            killed = len(left)
            for process in left:
                process.kill()
        time.sleep(POLL_S)
    return time.monotonic() - begun, killed


def newest_checkpoint(run: Path) -> int:
    """The step of the newest complete checkpoint; 0 where there is none."""
    return max((int(path.name.rpartition("-")[2]) for path in run.glob("checkpoints/step-??????")), default=0)


@contextmanager
def serving(options: Sequence[str], port: int) -> Iterator[None]:
    """The scripted server."""
    program = [sys.executable, str(TESTS / "unit" / "rollout" / "script_server.py"), "--port", str(port)]
    environment = {**os.environ, "MOE_TRM_API_KEY": KEY}
    command = [*program, "--key-in", "MOE_TRM_API_KEY", *options]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait()


def is_there(process: psutil.Process) -> bool:
    """False for one that has ended, collected or not."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def controller_of(rank: psutil.Process) -> psutil.Process:
    """The controller that this rank started."""
    return next(child for child in rank.children() if "moe_trm.rollout.service" in child.cmdline())


def dwell(moment: str, call: Callable[..., Any], due: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """`call`, which says that the moment has come and takes its time on the first rank."""

    @wraps(call)
    def longer(*args: Any, **kwargs: Any) -> Any:
        marker = Path(os.environ["DRILL_FOLDER"]) / f"{moment}-{os.environ['RANK']}"
        if os.environ["DRILL_MOMENT"] == moment and due(*args, *kwargs.values()):
            marker.touch()
            if moment in ("update", "checkpoint") and os.environ["RANK"] == "0":
                time.sleep(DWELL_S)
        result = call(*args, **kwargs)
        if moment == "sampling":  # which of the answers is the slow one differs by mode
            marker.unlink(missing_ok=True)
        return result

    return longer


def rank() -> int:
    """A rank that says when the moment has come."""
    from launch import learner, train
    from moe_trm.learner.checkpoint.writer import BackgroundWriter
    from moe_trm.learner.deepspeed.learner import DeepSpeedLearner
    from moe_trm.learner.megatron.learner import MegatronLearner
    from moe_trm.rollout.client import RolloutClient

    replaced: list[tuple[Any, str, str, Callable[..., bool]]] = [
        (learner, "meet", "peer", lambda *_: True),
        (RolloutClient, "begin", "server", lambda *_: True),
        (RolloutClient, "next_batch", "sampling", lambda _, step, *__: step > 1),
        (MegatronLearner, "update", "update", lambda *_: True),
        (DeepSpeedLearner, "update", "update", lambda *_: True),
        (RolloutClient, "push", "push", lambda _, version, *__: bool(version)),
        (BackgroundWriter, "_write_together", "checkpoint", lambda *_: True),
    ]
    for owner, name, moment, due in replaced:
        setattr(owner, name, dwell(moment, getattr(owner, name), due))
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    run_to_end(rank if "DRILL_MOMENT" in os.environ else main)
