"""torchrun for the ranks of this host, as `moe-trm train` uses it.

`python -m launch.ranks NUM_RANKS CONFIG [key=value ...]` does the same as
`torchrun --standalone --nproc-per-node NUM_RANKS --max-restarts R -m launch.train CONFIG [key=value ...]`, with five
differences:

- A failed rank's own message is the last word, not torchrun's traceback.
- An error that can only repeat uses up no restart.
- SIGINT or SIGTERM lets the ranks finish their step and save, however long that takes; a second one ends them.
- There is a report, however the ranks end.
- torchrun and the ranks meet in private files, not at ports that everybody reaches.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import REFUSED
from moe_trm.observe.report_page import ReportPage
from moe_trm.observe.sinks import Guarded
from moe_trm.runtime.output import outliving_readers
from moe_trm.runtime.private import Scratch

SHUTDOWN_PATIENCE_S = 10
"""Ranks that must go, because one of them died or a second signal came, get this long before they are killed."""


class Stop:
    """The first SIGINT or SIGTERM is passed on to the ranks, which end after their step; the second ends them.

    Where there is no rank yet, the first one ends the start.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._asked)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        if self.number or not ranks:
            self.number = number
            raise SignalException("asked to stop at once", signal.Signals(number))
        self.number = number
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Exit code: of the rank that failed first, 128 + signal when stopped, 0 when every rank did all its steps."""
    num_ranks, *rest = arguments
    config = load(rest[0], rest[1:])
    code = run_with_restarts(int(num_ranks), ["-m", "launch.train", *rest], config.train.max_restarts, Stop())
    if code:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        leave_report(config)
    return code


def run_with_restarts(num_ranks: int, program: Sequence[str], max_restarts: int, stop: Stop) -> int:
    """Run `python PROGRAM...` on the ranks, again when they died of something that may pass; the exit code.

    Nothing is started again once somebody asked to stop.
    """
    # The ranks say in plain words what went wrong; torchrun's own report of it would bury them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for restarts in range(max_restarts + 1):
        try:
            failed = launch(num_ranks, program, restarts)
        except SignalException as asked:
            return 128 + int(asked.sigval)
        if stop.number or not failed:
            break
        code, what = told(failed)
        print(what, file=sys.stderr)
        if code == REFUSED or restarts == max_restarts:
            return code
        print(f"starting the learner ranks again ({restarts + 1} of {max_restarts})", file=sys.stderr, flush=True)
    return 128 + stop.number if stop.number else 0


def launch(num_ranks: int, program: Sequence[str], restarts: int) -> Mapping[int, ProcessFailure]:
    """Run `python PROGRAM...` on the ranks once; those that failed.

    torchrun and the ranks meet in files that only this user reads and writes. torchrun's own way is a port that is open
    to everybody, and what is written there is unpickled.
    """
    with Scratch() as folder:
        store, restarted = ["--store", str(folder / "ranks")], ["--restarted"] if restarts else []
        try:
            elastic_launch(launch_config(num_ranks, folder / "torchrun"), sys.executable)(*program, *store, *restarted)
        except ChildFailedError as error:
            return error.failures
    return {}


def launch_config(num_ranks: int, file: Path) -> LaunchConfig:
    """One rendezvous, in a file of its own, on this host."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint=str(file),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP",
        shutdown_timeout=SHUTDOWN_PATIENCE_S,
    )


def told(failed: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Exit code of a failed group, and which rank ended first, and how. A refusal on any is why the others failed."""
    in_order = sorted(failed, key=lambda rank: failed[rank].timestamp)
    first = next((rank for rank in in_order if failed[rank].exitcode == REFUSED), in_order[0])
    code = failed[first].exitcode
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
    with outliving_readers():
        sys.exit(main(sys.argv[1:]))
