"""torchrun for the ranks of this host, as `moe-trm train` uses it.

`python -m launch.ranks NUM_RANKS CONFIG [key=value ...]` does the same as
`torchrun --standalone --nproc-per-node NUM_RANKS --max-restarts R -m launch.train CONFIG [key=value ...]`, with five
differences:

- Without CUDA the ranks are forks of this process, which has imported everything (`launch.preload`).
- A failed rank's own message is the last word, not torchrun's traceback.
- An error that can only repeat uses up no restart.
- SIGINT or SIGTERM lets the ranks finish their step and save, however long that takes; a second one ends them.
- There is a report, however the ranks end.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch.preload import preload
from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import REFUSED
from moe_trm.observe.report_page import ReportPage
from moe_trm.observe.sinks import Guarded
from moe_trm.runtime.forked_ranks import run_ranks

SHUTDOWN_PATIENCE_S = 10
"""Ranks that must go, because one of them died or a second signal came, get this long before they are killed."""


class Stop:
    """The first SIGINT or SIGTERM is passed on to the ranks, which end after their step; the second ends them."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._asked)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            raise SignalException("asked to stop at once", signal.Signals(number))
        self.number = number
        for rank in psutil.Process().children():
            rank.send_signal(signal.SIGTERM)


Run = Callable[[int, Sequence[str]], Mapping[int, int]]
"""Runs `python PROGRAM...` on so many ranks; by failed rank the exit code, in the order of ends."""


def under_torchrun(num_ranks: int, program: Sequence[str]) -> Mapping[int, int]:
    """The ranks as processes that torchrun starts."""
    # The ranks say in plain words what went wrong; torchrun's own report of it would bury them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(launch_config(num_ranks), sys.executable)(*program)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return {rank: failure.exitcode for rank, failure in failures}
    return {}


def as_forks(num_ranks: int, program: Sequence[str]) -> Mapping[int, int]:
    """The ranks as forks of this process."""
    ended = run_ranks(program, num_ranks, patience_s=SHUTDOWN_PATIENCE_S)
    return {rank: status for rank, status in ended.items() if status}


def main(arguments: Sequence[str]) -> int:
    """Exit code: of the rank that failed first, 128 + signal when stopped, 0 when every rank did all its steps."""
    num_ranks, *rest = arguments
    config, stop = load(rest[0], rest[1:]), Stop()
    try:
        run = as_forks if preload(config) else under_torchrun
        code = run_with_restarts(run, int(num_ranks), rest, config.train.max_restarts, stop)
    except SignalException as asked:
        code = 128 + asked.sigval
    if code:
        leave_report(config)
    return code


def run_with_restarts(run: Run, num_ranks: int, arguments: Sequence[str], max_restarts: int, stop: Stop) -> int:
    """Run the ranks, again when they died of something that may pass and nobody asked them to stop; the exit code."""
    for restarts in range(max_restarts + 1):
        failed = run(num_ranks, ["-m", "launch.train", *arguments, *(["--restarted"] if restarts else [])])
        if stop.number or not failed:
            break
        code, what = told(failed)
        print(what, file=sys.stderr)
        if code == REFUSED or restarts == max_restarts:
            return code
        print(f"starting the learner ranks again ({restarts + 1} of {max_restarts})", file=sys.stderr, flush=True)
    return 128 + stop.number if stop.number else 0


def launch_config(num_ranks: int) -> LaunchConfig:
    """One rendezvous, of its own, on this host."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP",
        shutdown_timeout=SHUTDOWN_PATIENCE_S,
    )


def told(failed: Mapping[int, int]) -> tuple[int, str]:
    """Exit code of a failed group, and which rank ended how. A refusal on any rank is why the others failed."""
    first = next((rank for rank, code in failed.items() if code == REFUSED), next(iter(failed)))
    code = failed[first]
    if code < 0:
        return 1, f"learner rank {first} was ended by {signal.Signals(-code).name}"
    return code, f"learner rank {first} ended with exit code {code}"


def leave_report(config: Config) -> None:
    """Write the report of a run whose first rank was ended before it could."""
    run_dir = Path(config.run_dir) / config.name
    metrics, report = run_dir / "metrics.jsonl", run_dir / "report.html"
    if not config.observe.report or not metrics.exists():
        return
    if not report.exists() or report.stat().st_mtime < metrics.stat().st_mtime:
        Guarded(ReportPage(run_dir), "report").close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
