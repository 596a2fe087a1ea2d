"""A sandbox for one sample, of Python and the kernel's own tools: namespaces, a file system in memory, rlimits.

A process of the sandbox sees no network but the session's address, no other processes, and one folder that it can write
to. `run` starts this file as the first process of new namespaces (`unshare`). Nothing inside can signal that process,
and when it ends, the kernel ends all others. Under root, commands run as a user that owns nothing outside.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

FOLDER = Path("/media")
"""Where the sandbox has its file system; what the host has there is hidden inside."""
WORK = FOLDER / "work"
START_S = 120.0
"""For what takes a fraction of a second on an idle machine."""
MAX_CONNECTIONS = 32
NAMESPACES = ("--net", "--pid", "--mount", "--ipc", "--mount-proc", "--fork", "--kill-child")
FIRST_USER = 1 << 30
"""Users of sandboxes under root: this number and those above, by the id of a process."""
RECURSIVE, READ_ONLY, CURRENT_FOLDER, MOUNT_SETATTR = 0x8000, 1, -100, 442
NOSUID_NODEV, SET_DUMPABLE, DROP_BOUNDING, NO_NEW_PRIVILEGES = 6, 4, 24, 38
UP = b"lo".ljust(16, b"\0") + (1).to_bytes(2, sys.byteorder).ljust(16, b"\0")
SET_FLAGS = 0x8914


class SandboxError(RuntimeError):
    """The sandbox could not be made, or ended without a result."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a sandbox. Memory, files and processor time are of each process, the others of all together."""

    seconds: float = 120.0
    test_seconds: float = 20.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    num_processes: int = 64
    num_open_files: int = 128


@dataclass(frozen=True)
class Repair:
    """A folder of files by name, the names of its tests, and the command that passes if it is repaired."""

    files: Mapping[str, str]
    tests: Sequence[str]
    test: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """Exit statuses of the agent and of the test; None: it was ended at its limit of time."""

    agent: int | None
    test: int | None


def run(
    command: Sequence[str], repair: Repair, environment: Mapping[str, str], base_url: str, bounds: Bounds
) -> Outcome:
    """Give the folder to `command`, then run its test. Only `base_url`, on loopback, can be reached.

    Raises `SandboxError`.
    """
    job = {
        "command": list(command),
        "repair": asdict(repair),
        "environment": dict(environment),
        "bounds": asdict(bounds),
        "address": _address(base_url),
        "user": FIRST_USER | os.getpid() if os.geteuid() == 0 else None,
    }
    unshare = ["unshare", *NAMESPACES, *(() if os.geteuid() == 0 else ("--map-root-user",))]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [*unshare, sys.executable, "-I", __file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            return asyncio.run(_outcome(ours, job, base_url, bounds))
        except (OSError, ValueError, TimeoutError) as error:
            raise SandboxError(f"the sandbox ended without a result: {error!r}") from error
        finally:
            process.kill()
            process.wait()


def _address(base_url: str) -> tuple[str, int]:
    parts = urlsplit(base_url)
    if not (parts.hostname or "").startswith("127.") or parts.port is None:
        raise SandboxError(
            f"only an address on 127.0.0.1 can be handed in, not {base_url}: set agent.host to 127.0.0.1"
        )
    return str(parts.hostname), parts.port


async def _outcome(channel: socket.socket, job: Mapping[str, Any], base_url: str, bounds: Bounds) -> Outcome:
    """Hands the job in, then serves the sandbox's connections to the session's address until the result comes."""
    channel.settimeout(START_S)
    channel.sendall(json.dumps(job).encode() + b"\n")
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        raise SandboxError("namespaces cannot be made here; see what the sandbox wrote to stderr")
    slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with slots:
            try:
                far_reader, far_writer = await asyncio.open_connection(*_address(base_url))
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
            except ConnectionError:
                pass
            finally:
                writer.close()

    # It listens inside: a socket stays in the network that it was made in.
    server = await asyncio.start_server(relay, sock=socket.socket(fileno=descriptors[0]))
    results, _ = await asyncio.open_connection(sock=channel)
    try:
        line = await asyncio.wait_for(results.readline(), bounds.seconds + bounds.test_seconds + START_S)
    finally:
        server.close()
    return Outcome(**json.loads(line))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    finally:
        writer.close()


class Inside:
    """The first process of the sandbox: it makes the folder, starts agent and test, and ends what they leave."""

    def __init__(self, job: Mapping[str, Any], channel: socket.socket) -> None:
        self._job, self._channel = job, channel
        self._bounds, self._repair = Bounds(**job["bounds"]), Repair(**job["repair"])
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        """One sample."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        # Not even its memory can be read by others.
        self._checked("prctl", SET_DUMPABLE, 0, 0, 0, 0)
        self._mount()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            self._checked("ioctl", any_socket.fileno(), SET_FLAGS, UP)
        with socket.create_server(tuple(self._job["address"]), backlog=MAX_CONNECTIONS) as listener:
            socket.send_fds(self._channel, [b"+"], [listener.fileno()])
        if self._written(self._repair.files) != 0:
            raise SandboxError("the files of the repair cannot be written")
        agent = self._ended(lambda: self._start(self._job["command"], self._job["environment"]), self._bounds.seconds)
        # The agent may have changed its own test. If it left no room for the test, the test fails.
        test = self._written(self._repair.tests)
        if test == 0:
            environment = {name: value for name, value in self._job["environment"].items() if name in ("PATH", "LANG")}
            test = self._ended(lambda: self._start(self._repair.test, environment), self._bounds.test_seconds)
        self._channel.sendall(json.dumps(asdict(Outcome(agent, test))).encode() + b"\n")

    def _checked(self, name: str, *arguments: object) -> None:
        """A call of the C library. Raises `OSError`."""
        if getattr(self._libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")

    def _mount(self) -> None:
        attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        self._checked("syscall", MOUNT_SETATTR, CURRENT_FOLDER, b"/", RECURSIVE, attributes, size)
        options = f"size={self._bounds.disk_bytes},nr_inodes=20000,mode=755".encode()
        self._checked("mount", b"sandbox", bytes(FOLDER), b"tmpfs", NOSUID_NODEV, options)
        for folder in (WORK, FOLDER / "home", FOLDER / "tmp"):
            folder.mkdir()
            self._hand_over(folder)

    def _hand_over(self, path: Path) -> None:
        if self._job["user"] is not None:
            os.chown(path, self._job["user"], self._job["user"], follow_symlinks=False)

    def _written(self, names: Iterable[str]) -> int | None:
        """Files of the repair in place of what is there, written with no more rights than the agent has."""

        def write() -> None:
            for name in names:
                path = WORK / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.write_text(self._repair.files[name], encoding="utf-8")

        return self._ended(write, START_S)

    def _ended(self, action: Callable[[], None], limit_s: float) -> int | None:
        """Exit status of a process without rights that does this, after which nothing of it is left.

        None: it took too long.
        """
        pid = os.fork()
        if pid == 0:
            self._become(action)
        status, until = None, time.monotonic() + limit_s
        while status is None and (left_s := until - time.monotonic()) > 0:
            ended, value = os.waitpid(-1, os.WNOHANG)
            if ended == pid:
                status = os.waitstatus_to_exitcode(value)
            elif not ended:
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                return status

    def _become(self, action: Callable[[], None]) -> NoReturn:
        """Does this within the limits, and ends this process."""
        status = 127
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.setsid()
            os.chdir(WORK)
            self._limit()
            self._give_rights_up()
            action()
            status = 0
        except OSError as error:
            print(f"in the sandbox: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)

    def _limit(self) -> None:
        bounds = self._bounds
        for limit, value in (
            (resource.RLIMIT_AS, bounds.memory_bytes),
            (resource.RLIMIT_FSIZE, bounds.file_bytes),
            (resource.RLIMIT_CPU, int(bounds.seconds) + 1),
            (resource.RLIMIT_NPROC, bounds.num_processes),
            (resource.RLIMIT_NOFILE, bounds.num_open_files),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))

    def _give_rights_up(self) -> None:
        for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            self._checked("prctl", DROP_BOUNDING, capability, 0, 0, 0)
        self._checked("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        user = self._job["user"]
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        folders = {"HOME": str(FOLDER / "home"), "TMPDIR": str(FOLDER / "tmp"), "PWD": str(WORK)}
        os.execvpe(command[0], [*command], {**environment, **folders})


def main() -> None:
    """The first process of a sandbox; its argument is the descriptor of its channel."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with channel.makefile("rb") as lines:
        job = json.loads(lines.readline())
    Inside(job, channel).run()


if __name__ == "__main__":
    main()
