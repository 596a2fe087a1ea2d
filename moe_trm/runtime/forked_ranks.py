"""The ranks of a job on this machine as forks of this process, in place of torchrun and its processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from moe_trm.runtime.forks import fork, run_program

POLL_S = 0.02
"""Pause between two looks at the ranks."""


def run_ranks(
    program: Sequence[str], num_ranks: int, *, patience_s: float, asks: bool = True, folder: Path | None = None
) -> dict[int, int]:
    """Run `python PROGRAM...` on `num_ranks` ranks as torchrun would; the exit status of each, in the order of ends.

    A rank has torchrun's variables, and a rendezvous of its job alone. None outlives this call, or this process.

    Args:
        program: `-m`, a module and its arguments, or a script and its arguments.
        num_ranks: how many.
        patience_s: for the others to end by themselves once one has failed, and for all once this call is interrupted.
        asks: SIGTERM tells the others that one has failed, as torchrun does.
        folder: of files `stdout-RANK` and `stderr-RANK`; None: the ranks share this process's output.
    Returns:
        By rank, the exit status: negative for a signal that ended it.
    Raises:
        RunError: this process has several threads and cannot fork.
    """
    with _meeting() as port:
        group = _Group(
            [fork(partial(_live, program, _place(rank, num_ranks, port), folder)) for rank in range(num_ranks)]
        )
        try:
            group.wait(patience_s, asks)
        finally:
            group.end(patience_s)
    return group.ended


class _Group:
    """Ranks that run, and `ended`: the exit status of each that does not any more, in the order of ends."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = dict(enumerate(pids))
        self.ended: dict[int, int] = {}

    def wait(self, patience_s: float, asks: bool) -> None:
        """Return when all have ended, or when patience with the others of a failed one is over."""
        deadline = float("inf")
        while self._running() and time.monotonic() < deadline:
            if deadline == float("inf") and any(self.ended.values()):
                deadline = time.monotonic() + patience_s
                if asks:
                    self._tell(signal.SIGTERM)
            time.sleep(POLL_S)

    def end(self, patience_s: float) -> None:
        """End those that are left: SIGTERM and patience if none has failed, then SIGKILL."""
        if not any(self.ended.values()):
            self._tell(signal.SIGTERM)
            deadline = time.monotonic() + patience_s
            while self._running() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        while self._running():
            self._tell(signal.SIGKILL)
            time.sleep(POLL_S)

    def _running(self) -> Mapping[int, int]:
        """Process ids by rank."""
        for rank, pid in self._pids.items():
            if rank not in self.ended:
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)
        return {rank: pid for rank, pid in self._pids.items() if rank not in self.ended}

    def _tell(self, number: int) -> None:
        for pid in self._running().values():
            with suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(pid, number)


def _place(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"forked-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _live(program: Sequence[str], place: Mapping[str, str], folder: Path | None) -> int:
    """In the fork: the rank."""
    os.environ.update(place)
    if folder is not None:
        for number, name in ((1, "stdout"), (2, "stderr")):
            path = folder / f"{name}-{place['RANK']}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    return run_program(program)


@contextmanager
def _meeting() -> Iterator[int]:
    """The port of a store for one rendezvous, inside the `with`.

    A process of its own keeps it: it has a thread, and a process with threads cannot fork.
    """
    reading, writing = os.pipe()
    keeper = fork(partial(_keep_store, writing), deaf=True)
    os.close(writing)
    try:
        with os.fdopen(reading) as said:
            yield int(said.readline())
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def _keep_store(writing: int) -> int:
    """In the fork: the store, until this process is killed. Its port goes to `writing`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Its own socket, bound before anyone knows the port: nobody else can get it in between.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        descriptor = listener.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    os.write(writing, f"{store.port}\n".encode())
    os.close(writing)
    while True:
        signal.pause()
