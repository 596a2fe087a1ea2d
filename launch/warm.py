"""A process with everything imported that a run imports: it forks runs and their ranks.

A rank that imports torch, Megatron-Core and transformers itself needs seconds of a core before its first line of work.
`python -m launch.warm DESCRIPTOR [MODULE ...]` is that process (`moe_trm.runtime.warm`); further modules are imported
too. A CPU only: a context of CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.job import SINGLE_THREAD
from moe_trm.runtime.fork_server import serve
from moe_trm.runtime.forks import check_one_thread
from moe_trm.runtime.warm import WarmServer

IMPORTED = (
    "launch.hosts",
    "launch.ranks",
    "moe_trm.checkpoint.checkpoints",
    "moe_trm.cli",
    "moe_trm.doctor.preflight",
    "moe_trm.doctor.trial",
    "moe_trm.learner.build",
    "moe_trm.learner.megatron.build",
    "moe_trm.loop",
    "moe_trm.observe.build",
    "moe_trm.rollout.build",
    "moe_trm.rollout.client",
    "moe_trm.rollout.service",
    "moe_trm.rollout.sglang.watchdog",
    "moe_trm.runtime.forked_ranks",
    "moe_trm.runtime.gloo",
    "moe_trm.runtime.interruption",
    "moe_trm.step.push",
    "safetensors.torch",
)
"""Imports of `moe-trm train`, `launch.ranks` and `launch.train`. What is missing here is imported by whoever needs it.

Programs themselves are not in it: they run as `__main__`.
"""


def warm_server(log: Path) -> WarmServer:
    """A server of warm processes; `log` is for its own output."""
    return WarmServer("launch.warm", (), SINGLE_THREAD, log)


def main(arguments: Sequence[str]) -> int:
    """Import, then fork for others until standard input ends."""
    descriptor, *further = arguments
    from moe_trm.learner.megatron.notices import silence_known_notices

    silence_known_notices()
    for name in (*IMPORTED, *further):
        importlib.import_module(name)
    check_one_thread()
    # Collections in a fork would otherwise write to, and so copy, every page of what was imported.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as listener:
        serve(listener, sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
