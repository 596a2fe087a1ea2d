"""Starts and stops one rollout server as a child process: the command line is the engine's (`ServerBackend.launch`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path
from typing import IO

import torch

from moe_trm.config.choices import server_device
from moe_trm.config.schema import RolloutConfig, ServerConfig
from moe_trm.errors import CheckpointError, EngineError
from moe_trm.rollout.servers.backend import Launch, Served, ServerBackend, backend_of
from moe_trm.rollout.servers.placement import gpus_of, place, servers_here
from moe_trm.rollout.servers.port import held_port
from moe_trm.runtime.lifeline import members, signal_group
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.runtime.patience import patient
from moe_trm.runtime.private import Scratch, append_private

LAST_BYTES = 1 << 18
"""End of the log in which an error is looked for."""
POLL_S = 0.25
"""Pause between two looks at a process or a port that is not ready yet."""
KEPT_OUTPUT_BYTES = 16 * 2**20
"""Most of the server's output that is kept beside its log, apart from what has not been copied yet."""
COPIED_BYTES = 2**20
"""Most bytes of it that are copied at once."""
HEALTH_S = 20.0
"""Longest wait for a health check of a server that starts; SGLang's own gives up after 20 s."""
SHARED = "/dev/shm/"
SEMAPHORES = "sem.mp-*"
"""Named semaphores of Python's multiprocessing, as of a progress bar's lock in a spawned process."""
KILL_PATIENCE_S = 5.0
"""Longest wait for killed processes to disappear."""


@dataclass
class Server:
    """A running server: its address, its key, and its process group.

    The group is stopped as a whole, at the latest when this process ends. `log_begin` is the size of the log at its
    start: what is before that, others wrote. `backend` is the engine's, and `grace_s` the time in which it may end by
    itself. `scratch` goes with it.
    """

    url: str
    api_key: str
    log_path: Path
    process: OwnedProcess
    log_pump: threading.Thread
    backend: ServerBackend
    scratch: Scratch
    grace_s: float = 0.0
    log_begin: int = 0
    leaves: str = ""
    _adopted: set[Path] = field(default_factory=set)

    def answers(self, path: str, timeout_s: float) -> bool:
        """True when a GET with the key succeeds."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.api_key}"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def poll(self) -> int | None:
        """Exit status of the server, None while it runs."""
        return self.process.poll()

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and every process it started. Safe to call twice.

        Its main process is asked first; after `grace_s` seconds the group is killed. Python's resource tracker is of
        the group, so what it would have removed is removed here.
        """
        self.adopt_mapped()
        if self.poll() is None:
            # Only the main process: workers that end on their own look like a crash to it, and it waits to write a
            # diagnosis.
            self.process.terminate()
            self.process.group_ends_within(grace_s)
        if signal_group(self.process.pid, signal.SIGKILL):
            self.process.group_ends_within(KILL_PATIENCE_S)
        self.process.wait()
        self.scratch.remove()
        self.process.release()
        self.log_pump.join(timeout=KILL_PATIENCE_S)

    def adopt_mapped(self) -> None:
        """Let the shared memory that its processes would leave behind go with `scratch`.

        A file is known by its number: a semaphore is mapped under another name than the one it gets afterwards.
        """
        inodes = set()
        for process in members(self.process.pid):
            with suppress(OSError):
                for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                    if SHARED in line:
                        inodes.add(int(line.split()[4]))
        if inodes:
            for file in Path(SHARED).iterdir():
                if file not in self._adopted and any(fnmatch(file.name, name) for name in (SEMAPHORES, self.leaves)):
                    with suppress(OSError):  # another process has just removed it
                        if file.stat().st_ino in inodes:
                            self.scratch.adopt(file)
                            self._adopted.add(file)

    def last_words(self) -> str:
        """The errors that the server wrote, or else its last lines; once it has ended, all of them."""
        if self.poll() is not None:
            self.log_pump.join(timeout=KILL_PATIENCE_S)
        with self.log_path.open("rb") as log:
            log.seek(max(self.log_begin, os.fstat(log.fileno()).st_size - LAST_BYTES))
            return last_words(log.read().decode(errors="replace"))


def start_server(served: Served, log_path: Path, api_key: str, *, cancelled: threading.Event | None = None) -> Server:
    """Start the server of `rollout.server` with `model.checkpoint` and wait until it generates.

    Its output goes to `log_path` with the key masked. Once `cancelled` is set, it stops waiting and ends the server.

    Raises:
        CheckpointError: the checkpoint folder does not exist, or the engine does not know its weights.
        ConfigError: settings or weights that the engine cannot serve, or too few GPUs.
        EngineError: the port is taken, the server died while starting, or it was not ready within `startup_timeout_s`.
    """
    checkpoint = Path(served.model.checkpoint).resolve()
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            "no checkpoint to serve",
            where="config key model.checkpoint",
            got=str(checkpoint),
            expected="a folder with config.json",
        )
    backend, settings = backend_of(served.rollout.engine), served.rollout.server
    backend.check(served)
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = Scratch()
    try:
        with (
            held_port(settings.host, settings.port) as port,
            backend.launch(served, port, api_key, scratch.path) as launch,
        ):
            placed = replace(launch, environment={**launch.environment, **_gpus(served.rollout, port)})
            server = _spawn(placed, backend, settings.host, port, log_path, api_key, scratch)
            try:
                _wait_until_ready(server, settings.startup_timeout_s, cancelled or threading.Event())
            except BaseException:
                server.stop(grace_s=1.0)
                raise
            server.adopt_mapped()
    except BaseException:
        scratch.remove()
        raise
    return server


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that CUDA shows to this process, as CUDA_VISIBLE_DEVICES names them; none where there is no CUDA."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(names[:number]) if len(names) >= number > 0 and names[0] else tuple(map(str, range(number)))


def _gpus(rollout: RolloutConfig, port: int) -> Mapping[str, str]:
    """CUDA_VISIBLE_DEVICES of the server at `port`, which numbers its GPUs from 0. Raises `ConfigError`."""
    gpus = visible_gpus()
    if not gpus or on_cpu(rollout.server):
        return {}
    num_servers, number = servers_here(rollout, port)
    placed = place(len(gpus), gpus_of(rollout), num_servers=num_servers, shared=rollout.colocate)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[gpu] for gpu in placed.servers[number])}


def on_cpu(settings: ServerConfig) -> bool:
    """True when the server runs without CUDA."""
    return server_device(settings, cuda=torch.cuda.is_available())[0] == "cpu"


def _spawn(
    launch: Launch,
    backend: ServerBackend,
    host: str,
    port: int,
    log_path: Path,
    api_key: str,
    scratch: Scratch,
) -> Server:
    log = append_private(log_path, buffering=0)
    log_begin = log.tell()
    # A file, not a pipe: a full pipe would stop the server whenever this process is stopped or slow.
    with tempfile.NamedTemporaryFile(prefix="moe-trm-output-") as output:
        source = open(output.name, "rb", buffering=0)  # noqa: SIM115 - the log pump closes it
        # The server appends, so that a file that was emptied begins anew.
        written = os.open(output.name, os.O_WRONLY | os.O_APPEND)
    process = OwnedProcess(launch.command, launch.environment, input=subprocess.DEVNULL, output=written, errors=written)
    pump = threading.Thread(
        target=_pump,
        args=(process, source, written, log, api_key.encode()),
        daemon=True,
        name="rollout-log",
    )
    pump.start()
    address = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    url = f"http://{address}:{port}"
    return Server(url, api_key, log_path, process, pump, backend, scratch, launch.grace_s, log_begin, launch.leaves)


def _pump(process: OwnedProcess, source: FileIO, written: int, log: IO[bytes], secret: bytes) -> None:
    """Copy the server's output to `log` until it ends, without the key, which an engine may print.

    `source` is an unnamed file that only this user can read, `written` the descriptor by which the server writes it.
    The file is emptied once much of it has been copied.
    """
    lost = 0

    def write(data: bytes) -> None:
        """Write to the log. The copy goes on when the disk is full, and says what is missing once there is room."""
        nonlocal lost
        data = data.replace(secret, b"***")
        note = b"[%d bytes are missing here: this log could not be written]\n" % lost if lost else b""
        taken = 0
        with suppress(OSError):
            taken = log.write(note + data) or 0  # may be a part: the last bytes of the disk
        lost = (lost if taken < len(note) else 0) + len(data) - max(0, taken - len(note))

    with source, log:
        partial, over = b"", False
        while not over:
            over = process.poll() is not None  # looked at before the last copy, which so misses nothing
            while data := source.read(COPIED_BYTES):
                lines, newline, partial = (partial + data).rpartition(b"\n")
                write(lines + newline)
            if source.tell() > KEPT_OUTPUT_BYTES and source.tell() == os.fstat(written).st_size:
                os.truncate(written, 0)
                source.seek(0)
            if not over:
                time.sleep(POLL_S)
        write(partial)
    os.close(written)


def _wait_until_ready(server: Server, timeout_s: float, cancelled: threading.Event) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = server.poll()
        if status is not None:
            raise EngineError(
                f"the rollout server died while starting ({_ended(status)})",
                where=str(server.log_path),
                got=server.last_words(),
                expected=f"a server that answers {server.backend.health_path}",
                fix="Mend what it says; the whole log and every argument of the server are in the file above.",
            )
        if server.answers(server.backend.health_path, timeout_s=patient(HEALTH_S)):
            return
        if cancelled.wait(POLL_S):
            raise EngineError("the rollout server was not needed any more", where=str(server.log_path))
    raise EngineError(
        "the rollout server did not become ready",
        where=str(server.log_path),
        got=server.last_words(),
        expected=f"an answer on {server.url}{server.backend.health_path} within {timeout_s:g} s",
        fix="Raise rollout.server.startup_timeout_s if the model is large; else the log tells why.",
    )


def _ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (", by itself after an error or for want of memory" if name == "SIGKILL" else "")


MOST_ERRORS = 3
"""Errors that are told, the last ones: what comes first may have passed, and what comes last may be a consequence."""
MOST_LINES = 8
"""Lines of one message, or of an output without any error."""
LONGEST_LINE = 400
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("The above exception was", "During handling of the above exception")
WRONG_OPTION = re.compile(r"^[\w. /-]+: error: ")
RAISED = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Failure|Warning)\b")
STAMP = re.compile(r"^\[\d{4}-")
ARGUMENTS = ("server_args=", "ServerArgs(", "usage: ", "server_args ")


def last_words(output: str) -> str:
    """The errors in `output`, at most three; where there is none, the last lines that are no arguments.

    SGLang prints all of its arguments on one line, and before a wrong option all the options that it knows. What a user
    needs is the last line of each traceback, or what comes after `error:`.
    """
    lines = output.splitlines()
    errors = [*dict.fromkeys(_errors(lines))]
    if errors:
        return "\n".join(errors[-MOST_ERRORS:])
    return _text([line for line in lines if not line.startswith(ARGUMENTS) and "server_args=" not in line])


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """The message of each traceback, one per chain, and of each refused command line."""
    for number, line in enumerate(lines):
        if WRONG_OPTION.match(line):
            yield _text([line])
        elif line.rstrip().endswith(TRACEBACK) and (raised := _raised(lines, number + 1)):
            yield raised


def _raised(lines: Sequence[str], start: int) -> str:
    """The message under the traceback whose frames begin at `start`; empty where another one of its chain follows."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end][0].isspace()):
        end += 1
    message = []
    for line in lines[end:]:
        if STAMP.match(line) or line.rstrip().endswith(TRACEBACK) or line.startswith(CHAINED):
            break
        message.append(line)
    rest = lines[end + len(message) :]
    if not message or not RAISED.match(message[0]) or (rest and rest[0].startswith(CHAINED)):
        return ""
    while not message[-1].strip():
        message.pop()
    return _text(message[:MOST_LINES])


def _text(lines: Sequence[str]) -> str:
    return "\n".join(line[:LONGEST_LINE] for line in lines[-MOST_LINES:])
