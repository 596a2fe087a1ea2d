"""torchrun for the ranks of this host, as `moe-trm train` uses it.

`python -m launch.ranks NUM_RANKS CONFIG [key=value ...]` does the same as
`torchrun --standalone --nproc-per-node NUM_RANKS --max-restarts R -m launch.train CONFIG [key=value ...]`, with five
differences:

- A failed rank's own message is the last word, not torchrun's traceback.
- An error that can only repeat uses up no restart.
- SIGINT or SIGTERM lets the ranks finish their update and save, however long that takes; a second one ends them.
- There is a report, however the ranks end.
- torchrun and the ranks meet in private files, not at ports that everybody reaches.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_trm.config import load
from moe_trm.errors import REFUSED
from moe_trm.observe.report_page import ReportPage
from moe_trm.observe.sinks import Guarded
from moe_trm.run_folder import run_end
from moe_trm.run_folder.run_end import record_failure
from moe_trm.runtime.interruption import ASKED, ECHO_S
from moe_trm.runtime.output import outliving_readers
from moe_trm.runtime.private import Scratch
from moe_trm.runtime.python import module_options

POLL_S = 0.05
SHUTDOWN_PATIENCE_S = 10
"""Ranks that must go, because one of them died or a second signal came, get this long before they are killed."""


class Stop:
    """The first SIGINT or SIGTERM is passed on to the ranks, which end after their update; the second ends them.

    A thread waits for them, and torchrun's own code is never interrupted: it would swallow what a handler raises. The
    ranks begin with both signals blocked, so that none is lost before their first instruction (`launch.train`). A rank
    that begins after a signal gets it all the same. SIGTERM that somebody else sends again within `ECHO_S` is the same
    request.
    """

    def __init__(self) -> None:
        self.number = 0
        self._direct = self._passed_on = 0
        self._first_s = -math.inf
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
        for target in (self._listen, self._pass_on):
            threading.Thread(target=target, daemon=True).start()

    def _listen(self) -> None:
        while True:
            info = signal.sigwaitinfo(ASKED)
            self.number = self.number or info.si_signo
            if info.si_pid == os.getppid():
                self._passed_on += 1
            elif info.si_signo != signal.SIGTERM or time.monotonic() - self._first_s > ECHO_S:
                self._direct, self._first_s = self._direct + 1, time.monotonic()

    @property
    def _times(self) -> int:
        """Requests so far: where everybody is sent a signal, `moe-trm train` passes on the same one."""
        return max(self._direct, self._passed_on)

    def _pass_on(self) -> None:
        """To each rank as often as it came; kill those that are left some time after the second."""
        signalled, kill_at = dict[tuple[int, float], int](), math.inf
        while True:
            time.sleep(POLL_S)
            for rank in psutil.Process().children() if self._times else ():
                with suppress(psutil.NoSuchProcess):
                    who = rank.pid, rank.create_time()
                    if signalled.get(who, 0) < self._times:
                        signalled[who] = signalled.get(who, 0) + 1
                        rank.send_signal(signal.SIGTERM)
                    if time.monotonic() > kill_at:
                        rank.kill()
            if self._times > 1 and kill_at == math.inf:
                kill_at = time.monotonic() + SHUTDOWN_PATIENCE_S


def main(arguments: Sequence[str]) -> int:
    """Exit code: of the rank that failed first, 128 + signal when stopped, 0 when every rank did all its steps."""
    num_ranks, *rest = arguments
    config = load(rest[0], rest[1:])
    program = module_options("launch.train", *rest)
    code, why = run_with_restarts(int(num_ranks), program, config.train.max_restarts, Stop())
    if code:
        leave_report(Path(config.run_dir) / config.name, why, written=config.observe.report)
    return code


def run_with_restarts(num_ranks: int, program: Sequence[str], max_restarts: int, stop: Stop) -> tuple[int, str]:
    """Run `python PROGRAM...` on the ranks, again when they died of something that may pass; the exit code, and why.

    Nothing is started again once somebody asked to stop.
    """
    # The ranks say in plain words what went wrong; torchrun's own report of it would bury them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for restarts in range(max_restarts + 1):
        failed = launch(num_ranks, program, restarts)
        if stop.number or not failed:
            break
        code, why = first_failure(failed)
        print(why, file=sys.stderr)
        if code == REFUSED or restarts == max_restarts:
            return code, why
        print(f"starting the learner ranks again ({restarts + 1} of {max_restarts})", file=sys.stderr, flush=True)
    if stop.number:
        return 128 + stop.number, f"asked to end at once, by {signal.Signals(stop.number).name}"
    return 0, ""


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
        logs_specs=DefaultLogsSpecs(log_dir=str(file.with_name("logs"))),
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP",
        shutdown_timeout=SHUTDOWN_PATIENCE_S,
    )


def first_failure(failed: Mapping[int, ProcessFailure]) -> tuple[int, str]:
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
