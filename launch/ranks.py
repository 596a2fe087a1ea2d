"""torchrun for the ranks of this host, as `moe-trm train` uses it.

`python -m launch.ranks NUM_RANKS CONFIG [key=value ...]` does the same as
`torchrun --standalone --nproc-per-node NUM_RANKS --max-restarts R -m launch.train CONFIG [key=value ...]`, with four
differences:

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_trm.config import load
from moe_trm.errors import REFUSED
from moe_trm.observe.report_page import ReportPage
from moe_trm.observe.run_outcome import record_failure
from moe_trm.observe.sinks import Guarded
from moe_trm.report import run_end
from moe_trm.runtime.output import outliving_readers

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
    code, why = run_with_restarts(int(num_ranks), ["-m", "launch.train", *rest], config.train.max_restarts, Stop())
    if code:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        leave_report(Path(config.run_dir) / config.name, why, written=config.observe.report)
    return code


def run_with_restarts(num_ranks: int, program: Sequence[str], max_restarts: int, stop: Stop) -> tuple[int, str]:
    """Run `python PROGRAM...` on the ranks, again when they died of something that may pass; the exit code, and why.

    Nothing is started again once somebody asked to stop.
    """
    why = ""
    # The ranks say in plain words what went wrong; torchrun's own report of it would bury them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for restarts in range(max_restarts + 1):
        try:
            elastic_launch(launch_config(num_ranks), sys.executable)(*program, *(["--restarted"] if restarts else []))
            failed: Mapping[int, ProcessFailure] = {}
        except ChildFailedError as error:
            failed = error.failures
        except SignalException as asked:
            return 128 + int(asked.sigval), f"asked to end at once, by {signal.Signals(asked.sigval).name}"
        if stop.number or not failed:
            break
        code, why = told(failed)
        print(why, file=sys.stderr)
        if code == REFUSED or restarts == max_restarts:
            return code, why
        print(f"starting the learner ranks again ({restarts + 1} of {max_restarts})", file=sys.stderr, flush=True)
    return (128 + stop.number if stop.number else 0), why


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


def told(failed: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Exit code of a failed group, and which rank ended first, and how. A refusal on any is why the others failed."""
    in_order = sorted(failed, key=lambda rank: failed[rank].timestamp)
    first = next((rank for rank in in_order if failed[rank].exitcode == REFUSED), in_order[0])
    code = failed[first].exitcode
    if code < 0:
        return 1, f"learner rank {first} was ended by {signal.Signals(-code).name}"
    return code, f"learner rank {first} ended with exit code {code}"


def leave_report(run_dir: Path, why: str, *, written: bool) -> None:
    """Write down what ended a run, and its report if one is to be `written`, where its first rank could not."""
    record_failure(run_dir, why)
    end, report = run_dir / run_end.FILE, run_dir / "report.html"
    if written and end.exists() and (not report.exists() or report.stat().st_mtime < end.stat().st_mtime):
        Guarded(ReportPage(run_dir), "report").close()


if __name__ == "__main__":
    with outliving_readers():
        sys.exit(main(sys.argv[1:]))
