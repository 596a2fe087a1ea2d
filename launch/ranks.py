"""torchrun for the ranks of this host, as `moe-trm train` uses it.

`python -m launch.ranks NUM_RANKS CONFIG [key=value ...]` does what
`torchrun --standalone --nproc-per-node NUM_RANKS --max-restarts R -m launch.train CONFIG [key=value ...]` does, with two differences:
a failed rank's own message is the last word, not torchrun's traceback; and SIGINT or SIGTERM lets the ranks finish their step and save,
however long that takes. A second one ends them.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_trm.config import load

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


def main(arguments: Sequence[str]) -> int:
    """Exit code of the rank that failed first, 128 + signal when asked to stop, 0 when all ranks did all their steps."""
    num_ranks, *rest = arguments
    # The ranks say in plain words what went wrong; torchrun's own report of it would bury them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=load(rest[0], rest[1:]).train.max_restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP",
        shutdown_timeout=SHUTDOWN_PATIENCE_S,
    )
    stop = Stop()
    try:
        elastic_launch(config, sys.executable)("-m", "launch.train", *rest)
    except ChildFailedError as error:
        if stop.number:
            return 128 + stop.number
        _, failure = error.get_first_failure()
        print(f"learner rank {failure.local_rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as asked:
        return 128 + asked.sigval
    return 128 + stop.number if stop.number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
