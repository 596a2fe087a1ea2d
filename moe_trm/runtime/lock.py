"""Locks that the kernel holds: one process at a time works in a folder, and a dead process locks no other out.

A lock is a `flock` on a file, which ends with its process, however that ends. The file tells others who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from moe_trm.errors import RunError
from moe_trm.runtime.private import open_private, private_folder

POLL_S = 0.1
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock. `since`: unix time."""

    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.since, UTC)
        return f"process {self.pid} on {self.host}, since {when:%Y-%m-%d %H:%M:%S} UTC"


@contextmanager
def held_alone(path: Path, work: str, *, patience_s: float = 0.5, fix: str = "") -> Iterator[None]:
    """Hold the lock of the file `path` inside the `with`. Its folder is made, and the file stays.

    Where the file system has no locks, a warning says so and nothing is held. A lock that is held may come free within
    `patience_s`: processes that were killed are still ending. Else `RunError` says what its holder does (`work`, such
    as "trains into this folder") and what the user can do beside waiting (`fix`).
    """
    try:
        private_folder(path.parent)
        # No child inherits the descriptor, or the lock would outlive this process.
        file = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunError(
            "this folder cannot be written",
            where=str(path.parent),
            got=error.strerror or str(error),
            expected="a folder that this user may write, on a file system that takes writes",
            fix="Make it writable, or choose another run_dir or name.",
        ) from error
    try:
        _take(file, path, work, patience_s, fix)
        os.truncate(file, 0)
        os.pwrite(file, msgspec.json.encode(Holder(socket.gethostname(), os.getpid(), time.time())), 0)
        yield
    finally:
        os.close(file)


def holder_of(path: Path) -> Holder | None:
    """The process that holds the lock `path` now; None where no process does, or where that cannot be known."""
    try:
        file = open_private(path, os.O_RDONLY)
    except (OSError, RunError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder_of(file) or Holder("an unknown machine", 0, 0.0)
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _take(file: int, path: Path, work: str, patience_s: float, fix: str) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() < until:
                time.sleep(POLL_S)
                continue
            raise RunError(
                f"another process {work}",
                where=str(path.parent),
                got=_holder_of(file) or "a process that has not said who it is",
                expected="one at a time",
                fix=f"Wait for it, or stop it{f', or {fix}' if fix else ''}.",
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "the file system of %s has no locks (%s): nothing keeps a second process away", path.parent, error
            )
            return


def _holder_of(file: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(file, 4096, 0), type=Holder)
    except msgspec.DecodeError:
        return None
