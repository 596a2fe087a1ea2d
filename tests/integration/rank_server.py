"""A process that has torch, Megatron-Core and transformers imported and forks learner ranks.

Run as `python -m tests.integration.rank_server`.

A rank that imports them itself needs six seconds of a core before its first line of work. Requests are lines of JSON on
stdin, see `RankServer.run`; each is answered by one line of exit statuses on stdout. It ends when stdin does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_trm.runtime.lifeline import end_with_parent

PRELOADED = (
    "moe_trm.learner.build",
    "moe_trm.learner.megatron.build",
    "moe_trm.loop",
    "moe_trm.observe.build",
    "moe_trm.rollout.build",
    "moe_trm.rollout.client",
    "moe_trm.rollout.service",
    "moe_trm.step.push",
    "moe_trm.models.tiny.checkpoint",
    "safetensors.torch",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""Imports of ranks. A rank imports what is missing here by itself."""


def preload() -> None:
    """Import everything, as a rank does before it starts to work."""
    from moe_trm.learner.megatron import cpu_shim
    from moe_trm.learner.megatron.notices import silence_known_notices
    from moe_trm.runtime.gloo import share_gloo_device

    silence_known_notices()
    cpu_shim.install()
    share_gloo_device()
    for name in PRELOADED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == threading.active_count() == 1, f"{threads} threads: a fork would lose all but one"


def statuses(ranks: Sequence[int], patience_s: float) -> list[int]:
    """Exit status of each process, negative for a signal; those that outlive a failed one for long are killed.

    Args:
        ranks: the processes.
        patience_s: for the others to end by themselves once one has failed: they may have the better message.
    """
    left, found = list(ranks), dict[int, int]()
    deadline = float("inf")
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            left.remove(pid)
            found[pid] = os.waitstatus_to_exitcode(status)
            if found[pid] and deadline == float("inf"):
                deadline = time.monotonic() + patience_s
        elif time.monotonic() > deadline:
            for each in left:
                os.kill(each, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    return [found[pid] for pid in ranks]


def become_rank(job: dict[str, Any], rank: int) -> None:
    """In the fork: take the environment and the output files of rank `rank`, and leave the server's pipes."""
    end_with_parent()
    folder, size = Path(job["folder"]), job["num_ranks"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    )


def run_program(program: Sequence[str]) -> int:
    """`python PROGRAM...` in this process; its exit status."""
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - told as the interpreter would have told it
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> None:
    """End this fork without the teardown of all it inherited, which takes a second; its own exit handlers run."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
    preload()
    # Collections in a fork would otherwise write to, and so copy, every page of what was imported.
    gc.collect()
    gc.freeze()
    answers.write("ready\n")
    for line in sys.stdin:
        job = json.loads(line)
        ranks = []
        for rank in range(job["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                os.close(answers.fileno())
                become_rank(job, rank)
                leave(run_program(job["program"]))
            ranks.append(pid)
        answers.write(json.dumps(statuses(ranks, job["patience_s"])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
