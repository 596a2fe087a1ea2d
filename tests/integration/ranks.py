"""Ranks without their imports: forks of one process that has done them, instead of torchrun's own processes.

torchrun itself is tested where it is the subject: launching, restarting, killing.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO
from unittest.mock import patch

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launch.threads import SINGLE_THREAD
from moe_trm.runtime.lifeline import end_with_parent

ROOT = Path(__file__).parents[2]
POLL_S = 0.02
PATIENCE_S = 10.0
"""Seconds in which ranks may end by themselves once one has failed: they may have the better message."""


@dataclass(frozen=True)
class Ended:
    """The exit statuses of a job's ranks, and their output, the first rank's first."""

    statuses: list[int]
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return not any(self.statuses)

    @property
    def crashed(self) -> bool:
        """True when machine code of a rank crashed, in which nothing is ours."""
        return -signal.SIGSEGV in self.statuses


class ForkedRanks:
    """`python PROGRAM...` on ranks of this machine, as torchrun would start it. Leaving it kills those that still run.

    Args:
        program: `-m`, a module and its arguments, or a script and its arguments.
        num_ranks: how many, on a rendezvous of their own.
        environment: of each, beside its place.
        outputs: descriptors of output and errors of each rank.
        patience_s: for the other ranks to end by themselves once one has failed.
    """

    def __init__(
        self,
        program: Sequence[str],
        num_ranks: int,
        environment: Mapping[str, str],
        outputs: Sequence[tuple[int, int]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        context, own = multiprocessing.get_context("forkserver"), {**SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
        context.set_forkserver_preload(["tests.integration.preloaded"])
        with patch.dict(os.environ, own):
            forkserver.ensure_running()
        # The ranks meet here, as they do in torchrun's process.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {**environment, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "forked"}
        common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        self._patience_s, self._failed_at = patience_s, float("inf")
        self.processes = []
        for rank, output in enumerate(outputs):
            place = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipes = [Connection(os.dup(descriptor), readable=False) for descriptor in output]
            self.processes.append(context.Process(target=_live, args=([*map(str, program)], place, pipes)))
            self.processes[-1].start()

    def poll(self) -> int | None:
        """The exit status of a rank that failed, else 0; None while any runs."""
        statuses = [process.exitcode for process in self.processes]
        if any(statuses):
            self._failed_at = min(self._failed_at, time.monotonic())
            if time.monotonic() - self._failed_at > self._patience_s:
                self.send_signal(signal.SIGKILL)
        return None if None in statuses else next(filter(None, statuses), 0)

    def send_signal(self, number: int) -> None:
        """Send a signal to all that run."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def forked_learner(
    config_path: str, overrides: Sequence[str], ranks: int, environment: Mapping[str, str]
) -> ForkedRanks:
    """The learner of `launch.job.run_job` without torchrun."""
    sys.stdout.flush()
    return ForkedRanks(["-m", "launch.train", config_path, *overrides], ranks, environment, ranks * [(1, 2)])


def fork_ranks(
    program: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
    *,
    repeatable: bool = False,
) -> Ended:
    """Run `python PROGRAM...` on `num_ranks` ranks of this machine as torchrun would; waits for all of them.

    Args:
        program, num_ranks, patience_s: as for `ForkedRanks`.
        environment: instead of this process's.
        repeatable: it leaves nothing but its output, and runs once more, with a warning, where machine code crashed. A
            thread of torch's process groups (gloo) has done so once; `moe-trm train` restarts its ranks then.
    """
    with ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in ("out", "err")] for _ in range(num_ranks)]
        outputs = [(out.fileno(), err.fileno()) for out, err in files]
        given = os.environ if environment is None else environment
        with ForkedRanks(program, num_ranks, given, outputs, patience_s) as ranks:
            while ranks.poll() is None:
                time.sleep(POLL_S)
            statuses = [process.exitcode or 0 for process in ranks.processes]
        said = ["".join(_text(rank[number]) for rank in files) for number in range(2)]
    done = Ended(statuses, *said)
    if done.crashed and repeatable:
        warnings.warn(f"machine code of a rank crashed, and the job is run again: {done.stderr}", stacklevel=2)
        return fork_ranks(program, num_ranks, environment, patience_s)
    return done


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _live(program: Sequence[str], environment: Mapping[str, str], output: Sequence[Connection]) -> None:
    """In the fork: the rank."""
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    for number, pipe in enumerate(output, start=1):
        os.dup2(pipe.fileno(), number)
    faulthandler.enable(2)
    # Most programs of tests build a learner from its parts.
    sys.modules["moe_trm.learner.megatron.cpu_shim"].install()
    if program[0] == "-m":
        sys.argv = list(program[1:])
        sys.modules.pop(program[1], None)  # it is imported for what it imports, and begins anew
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        runpy.run_path(program[0], run_name="__main__")
