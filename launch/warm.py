"""A process with everything imported that a run imports: it forks runs and their ranks.

A rank that imports torch, Megatron-Core and transformers itself needs seconds of a core before its first line of work.
`python -m launch.warm DESCRIPTOR [MODULE ...]` is that process (`moe_trm.runtime.warm`); further modules are imported
too. A CPU only: a context of CUDA does not survive a fork.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launch.threads import SINGLE_THREAD
from moe_trm.runtime.fork_server import live
from moe_trm.runtime.warm import WarmServer

JOB = (
    "launch.job",
    "launch.ranks",
    "moe_trm.cli",
    "moe_trm.doctor.preflight",
    "moe_trm.doctor.trial",
    "moe_trm.rollout.servers.watchdog",
)
"""Imports of `moe-trm train` and of `launch.ranks`; programs themselves run as `__main__`."""


def warm_server(log: Path) -> WarmServer:
    """A server of warm processes; `log` is for its own output. It begins at `address()`, and this imports little."""
    return WarmServer("launch.warm", (), SINGLE_THREAD, log)


def main(arguments: Sequence[str]) -> NoReturn:
    """Import, then fork for others until standard input ends."""
    from launch.preload import LEARNERS, RANK, import_all

    descriptor, *further = arguments
    import_all((*JOB, *RANK, LEARNERS["megatron"], *further))
    live(int(descriptor))


if __name__ == "__main__":
    main(sys.argv[1:])
