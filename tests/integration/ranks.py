"""Ranks without their start: forks of a process that has imported everything, instead of torchrun's own processes.

torchrun itself is tested where it is the subject: whole runs, launching, restarting, killing.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launch.job import SINGLE_THREAD

ROOT = Path(__file__).parents[2]
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


class RankServer:
    """A running `rank_server`; it does one job after another and ends with this process."""

    def __init__(self) -> None:
        environment = {**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rank_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._answer() == "ready"
        atexit.register(self.kill)

    def run(
        self,
        program: Sequence[str],
        num_ranks: int,
        environment: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Ended:
        """Run `python PROGRAM...` on `num_ranks` ranks of this machine as torchrun would; waits for all of them.

        Args:
            program: `-m`, a module and its arguments, or a script and its arguments.
            num_ranks: how many ranks, on a rendezvous of their own.
            environment: instead of this process's.
            patience_s: for the other ranks to end by themselves once one has failed.
        """
        # Its own port, which the system chooses while it is bound: nobody else can get it in between.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"forked-{store.port}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GROUP_RANK": "0",
            "PYTHONPATH": str(ROOT),
        }
        with tempfile.TemporaryDirectory(prefix="moe-trm-ranks-") as folder:
            job = {
                "program": [str(word) for word in program],
                "num_ranks": num_ranks,
                "folder": folder,
                "patience_s": patience_s,
                "environment": {**(os.environ if environment is None else environment), **SINGLE_THREAD, **meeting},
            }
            try:
                statuses = json.loads(self._ask(json.dumps(job)))
            except BaseException:  # a test that ran out of time: its ranks are still there
                self.kill()
                raise
            said = [
                "".join((Path(folder) / f"{name}-{rank}").read_text(errors="replace") for rank in range(num_ranks))
                for name in ("stdout", "stderr")
            ]
        return Ended(statuses, *said)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it is gone, as the missing answer will tell
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = "" if self._process.stdout.closed else self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the rank server ended with exit status {self._process.wait()}")
        return line.strip()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and its ranks at once. Safe to call twice."""
        self._process.kill()
        self._process.communicate()


_servers: list[RankServer] = []


def rank_server() -> RankServer:
    """This process's server, started when it is first asked for, and again where it was killed."""
    if not _servers or not _servers[-1].alive:
        _servers.append(RankServer())
    return _servers[-1]
