"""The address and keys of a run's controller: a file of mode 0600 in the run's folder.

torch's rendezvous store and the sockets between ranks have no key: whoever reaches these ports may read and change what
is said there. So address, keys and the folder of weight pushes go through the file alone. Ranks tell each other only
the name of the attempt, by which they recognise an old file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moe_trm.errors import ConfigError
from moe_trm.runtime.private import read_private, write_private

FILE = "controller-access.json"
WAIT_S = 90.0
"""Longest time until a network file system shows a new file on another machine."""
POLL_S = 0.1


class Access(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and keys of a controller.

    Attributes:
        attempt: a name that no other start of this or another run has.
        endpoint: of its socket.
        key: that every request carries.
        public_key: of a controller that speaks CurveZMQ; empty for one on this machine.
        pushes: folder of the weight pushes; empty where they are broadcast.
    """

    attempt: str
    endpoint: str
    key: str
    public_key: str
    pushes: str


@contextmanager
def giving(run_dir: Path, access: Access) -> Iterator[None]:
    """The file replaces an earlier attempt's, and is there until the block ends."""
    path = run_dir / FILE
    write_private(path, msgspec.json.encode(access))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def await_access(run_dir: Path, attempt: str, *, wait_s: float = WAIT_S) -> Access:
    """The file of this attempt, once it is seen here. Raises `ConfigError` where it is not."""
    path, deadline = run_dir / FILE, time.monotonic() + wait_s
    while True:
        try:
            access = msgspec.json.decode(read_private(path), type=Access)
            if access.attempt == attempt:
                return access
            problem = "that of another attempt"
        except (OSError, msgspec.DecodeError) as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise ConfigError(
                "the first rank's file with the address of the controller is not here",
                where=str(path),
                got=problem,
                expected="a file of this attempt, of this user, that nobody else can read",
                fix="Let run_dir be a folder that all machines of the run share, mounted for the same user.",
            )
        time.sleep(POLL_S)
