"""A process that has imported SGLang, of which rollout servers on a CPU are forks.

Importing SGLang takes a small server longer than all else at its start. `python -m moe_trm.rollout.sglang.warm
DESCRIPTOR` is that process (`moe_trm.runtime.warm`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.sglang.environment import child_environment
from moe_trm.runtime.fork_server import live
from moe_trm.runtime.warm import WarmServer

IMPORTS = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler")
"""Imports of a server before it knows its model. The program itself is not in it: it runs as `__main__`."""


def warm_engine(log: Path) -> WarmServer:
    """A server of warm rollout servers; `log` is for its own output. It begins at `address()`."""
    # An empty key is none: a fork shows the environment that this process began with.
    environment = {**child_environment(os.environ, cpu=True), API_KEY_VARIABLE: ""}
    return WarmServer("moe_trm.rollout.sglang.warm", (), environment, log)


def main(arguments: Sequence[str]) -> NoReturn:
    """Import, then fork for others until standard input ends."""
    [descriptor] = arguments
    for name in IMPORTS:
        import_module(name)
    live(int(descriptor))


if __name__ == "__main__":
    main(sys.argv[1:])
