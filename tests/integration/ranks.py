"""Ranks without their start: forks of a process that has imported everything, instead of torchrun's own processes.

torchrun itself is tested where it is the subject: whole runs, launching, restarting, killing.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.threads import SINGLE_THREAD
from moe_trm.runtime.warm import WarmProcess, WarmServer

ROOT = Path(__file__).parents[2]
PATIENCE_S = 10.0
"""Seconds in which ranks may end by themselves once one has failed: they may have the better message."""
FURTHER = (
    "moe_trm.learner.megatron.cpu_shim",
    "moe_trm.models.tiny.checkpoint",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""Imports of ranks in tests beside those of ranks in runs."""


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


class RankServer:
    """A server of warm ranks; it does one job after another and ends with this process."""

    def __init__(self) -> None:
        self.warm = WarmServer("launch.warm", FURTHER, {**SINGLE_THREAD, "PYTHONPATH": str(ROOT)})
        atexit.register(self.warm.close)

    def run(
        self,
        program: Sequence[str],
        num_ranks: int,
        environment: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
        *,
        repeatable: bool = False,
    ) -> Ended:
        """Run `python PROGRAM...` on `num_ranks` ranks of this machine as torchrun would; waits for all of them.

        Args:
            program: `-m`, a module and its arguments, or a script and its arguments.
            num_ranks: how many ranks, on a rendezvous of their own.
            environment: instead of this process's.
            patience_s: for the other ranks to end by themselves once one has failed.
            repeatable: it leaves nothing but its output, and runs once more, with a warning, where machine code
                crashed. A thread of torch's process groups (gloo) has done so once; `moe-trm train` restarts its
                ranks then.
        """
        own = {**(os.environ if environment is None else environment), **SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
        done = self._run(program, num_ranks, own, patience_s)
        if done.crashed and repeatable:
            warnings.warn(f"machine code of a rank crashed, and the job is run again: {done.stderr}", stacklevel=2)
            done = self._run(program, num_ranks, own, patience_s)
        return done

    def _run(self, program: Sequence[str], num_ranks: int, own: Mapping[str, str], patience_s: float) -> Ended:
        with tempfile.TemporaryDirectory(prefix="moe-trm-ranks-") as folder:
            group = ["-m", "tests.integration.rank_group", str(num_ranks), str(patience_s), folder]
            # Where a test runs out of time, its ranks are ended.
            with WarmProcess(self.warm.address(), [*group, *map(str, program)], own) as running:
                status = running.wait()
            if status:
                raise RuntimeError(f"the ranks could not be run: exit status {status}")
            statuses = json.loads((Path(folder) / "statuses").read_text())
            said = [
                "".join((Path(folder) / f"{name}-{rank}").read_text(errors="replace") for rank in range(num_ranks))
                for name in ("stdout", "stderr")
            ]
        return Ended(statuses, *said)


_servers: list[RankServer] = []


def rank_server() -> RankServer:
    """This process's server, started when it is first asked for."""
    if not _servers:
        _servers.append(RankServer())
    return _servers[-1]
