"""Jobs that are all alive at once and take turns: all but one are stopped while that one makes a step.

Runs that follow each other are as different as the host is from minute to minute. Steps in turn are seconds apart, so
whatever slows the host slows neighbouring steps of all jobs alike. A job is a tree of processes: some that the
benchmark started, and all that these started. A turn goes from SIGCONT for the tree to the moment when the job's next
step stands in its file. The tree then gets SIGSTOP.

CPU seconds of a turn are those of all processes of the tree from stop to stop, by the kernel's clock of each process:
nanoseconds, of all its threads. A process that begins and ends within a turn is not in them.

What a job does after the end of its step and before it is stopped belongs to its next turn, and so do samples that a
server makes ahead. All turns of a job begin and end so: nothing is left out or counted twice.

A turn also knows what the machine did meanwhile: how much of the processors' time the host gave to other machines, and
how busy they were with processes that are not of the job. Both slow a step down, and are no fault of the job.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

import orjson

from benchmarks.table import Row
from moe_trm.runtime.lifeline import Lifeline

STEP = "time/step_s"
"""Key of the lines of a job's file that stand for a step."""
POLL_S = 0.001
"""Pause between two looks at the file of the job whose turn it is: how late its end is seen at most."""
ALIVE_S = 0.1
"""Pause between two looks at whether it lives."""
END_S = 10.0
"""Longest wait for killed processes to be gone."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Grain of what the kernel tells of the whole machine."""
LAST_BYTES = 2000


class Process(Protocol):
    """The first process of a tree, as `subprocess.Popen` and `launch.child.Child` are."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, after the end."""


@dataclass(frozen=True)
class Turn:
    """One step of a job.

    Attributes:
        seconds: of the wall clock.
        cpu_seconds: of all its processes.
        row: what the job wrote of the step.
        stolen: share of the time in which the machine had work that its host gave to other machines.
        others: processors that other processes of the machine kept busy, on average.
        cpu_of: of the CPU seconds, those of each process, by its command line.
    """

    seconds: float
    cpu_seconds: float
    row: Mapping[str, Any]
    stolen: float = 0.0
    others: float = 0.0
    cpu_of: Mapping[str, float] = field(default_factory=dict)

    @property
    def host(self) -> tuple[float, float]:
        """What the machine was like, as positive numbers that are 1 on an idle one: for `benchmarks.turn_ratios`."""
        return 1 - self.stolen, 1 + self.others


Rounds = Sequence[Sequence[tuple[str, Turn]]]
"""Turns by round, each with the name of its arm."""


class Tree:
    """The processes of a job: `roots`, and all that processes of the tree start."""

    def __init__(self, roots: Sequence[int]) -> None:
        living = _living()
        self._members = {pid: living[pid].begun for pid in roots if pid in living}

    @property
    def pids(self) -> frozenset[int]:
        """Of the processes that the last stop found."""
        return frozenset(self._members)

    def stop(self) -> None:
        """Stop every process, also those that were started since: it looks until it finds no other one."""
        new = set(self._members)
        while new:
            _send(new, signal.SIGSTOP)
            living = _living()
            self._members = {
                pid: begun for pid, begun in self._members.items() if pid in living and living[pid].begun == begun
            }
            new = {pid for pid, one in living.items() if one.parent in self._members} - self._members.keys()
            self._members |= {pid: living[pid].begun for pid in new}

    def go_on(self) -> None:
        """Let every process go on."""
        _send(self._members, signal.SIGCONT)

    def kill(self) -> None:
        """End every process, and wait until all are gone. None escapes: a stopped one starts no other."""
        self.stop()
        _send(self._members, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        while _living().keys() & self._members and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def cpu_seconds(self) -> dict[int, float]:
        """By process id, CPU seconds of each process since its start; one that has ended is left out."""
        found = {}
        for pid in self._members:
            with suppress(OSError):
                found[pid] = time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names
        return found

    def commands(self) -> dict[int, str]:
        """By process id, the command line of each process; one that has ended is left out."""
        found = {}
        for pid in self._members:
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found


class Guard:
    """Ends stopped processes when this one is killed (`benchmarks.turn_guard`)."""

    def __init__(self) -> None:
        # Isolated and without site-packages, it is up in milliseconds and small.
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("turn_guard.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
        self._pids: frozenset[int] = frozenset()

    def watch(self, pids: frozenset[int]) -> None:
        """Look after these processes, in place of others."""
        if pids != self._pids:
            self._pids = pids
            assert self._process.stdin is not None
            self._process.stdin.write(" ".join(map(str, sorted(pids))) + "\n")

    def release(self) -> None:
        """End it, and nothing else."""
        self.watch(frozenset())
        self._process.communicate()


class _Living(NamedTuple):
    """A process: its parent, and when it was started, in the kernel's ticks."""

    parent: int
    begun: int


def _living() -> dict[int, _Living]:
    """By process id, every process of the machine that has not ended."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, *words = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if state not in b"XZ":
                found[int(name)] = _Living(int(words[0]), int(words[18]))
    return found


class Arm:
    """A job that makes a step when it is its turn, and is stopped else. A context manager: leaving it ends the job.

    Args:
        name: for messages.
        processes: its first ones.
        steps: file to which the job appends a line of JSON for each step, with the key `time/step_s`.
        logs: where its last words are.
    """

    def __init__(self, name: str, processes: Sequence[Process], steps: Path, logs: Sequence[Path]) -> None:
        self.name = name
        self._processes, self._path, self._logs = processes, steps, logs
        self._tree = Tree([process.pid for process in processes])
        self._guard = Guard()
        self._read, self._cpu = 0, dict[int, float]()

    @property
    def pids(self) -> frozenset[int]:
        """Of all its processes, at the end of its last turn."""
        return self._tree.pids

    def warm_up(self, steps: int) -> None:
        """Let it start and make `steps` steps, then stop it. Raises `SystemExit` when it ends before."""
        self._await(steps)
        self._stop()

    def turn(self) -> Turn:
        """Its next step.

        Raises `SystemExit` with its last words when it ends, and when it did not wait for its turn or made several
        steps in it: somebody else has sent it a signal.
        """
        if ahead := self._new_rows():
            self._refuse(f"made {len(ahead)} steps out of its turn")
        machine, begun = _machine(), time.perf_counter()
        self._tree.go_on()
        rows = self._await(1)
        seconds, now, before = time.perf_counter() - begun, _machine(), self._cpu
        self._stop()
        if len(rows) > 1:
            self._refuse(f"made {len(rows)} steps in one turn")
        spent = {pid: until - before.get(pid, 0.0) for pid, until in self._cpu.items()}
        cpu_seconds = sum(spent.values())
        stolen, busy = now.stolen_s - machine.stolen_s, now.busy_s - machine.busy_s
        others, cpu_of = max(0.0, busy - cpu_seconds) / seconds, dict[str, float]()
        for pid, command in self._tree.commands().items():
            cpu_of[command] = cpu_of.get(command, 0.0) + spent.get(pid, 0.0)
        return Turn(seconds, cpu_seconds, rows[0], stolen / max(stolen + busy, TICK_S), others, cpu_of)

    def _stop(self) -> None:
        self._tree.stop()
        self._guard.watch(self._tree.pids)
        self._cpu = self._tree.cpu_seconds()

    def _await(self, steps: int) -> list[Mapping[str, Any]]:
        """The rows of the next `steps` steps, or of more."""
        rows: list[Mapping[str, Any]] = []
        looked = time.monotonic()
        while len(rows) < steps:
            if found := self._new_rows():
                rows += found
                continue
            if time.monotonic() - looked > ALIVE_S:
                if any(process.poll() is not None for process in self._processes):
                    self._refuse("has ended")
                looked = time.monotonic()
            time.sleep(POLL_S)
        return rows

    def _new_rows(self) -> list[Mapping[str, Any]]:
        """Rows of steps in the lines that are whole and were not read yet."""
        if not self._path.exists() or self._path.stat().st_size == self._read:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._read += sum(map(len, lines))
        return [row for row in map(orjson.loads, lines) if STEP in row]

    def _refuse(self, what: str) -> None:
        words = [f"{path}\n{path.read_text(errors='replace')[-LAST_BYTES:]}" for path in self._logs if path.exists()]
        raise SystemExit("\n".join([f"{self.name}: it {what}", *words]))

    def __enter__(self) -> Arm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tree.kill()
        self._guard.release()
        for process in self._processes:
            process.wait(END_S)


class _Machine(NamedTuple):
    """CPU seconds of all processors since the machine has begun: that its host took, and of all its processes."""

    stolen_s: float
    busy_s: float


def _machine() -> _Machine:
    user, nice, system, _idle, _iowait, _irq, _softirq, stolen, *_ = (
        int(word) * TICK_S for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return _Machine(stolen, user + nice + system)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def rounds_of(
    arms: Mapping[str, Arm], rounds: int, often: Mapping[str, int] | None = None, skipped: int = 1
) -> Iterator[list[tuple[str, Turn]]]:
    """Rounds in which every arm has its turns, in an order that is drawn anew for each round with a fixed seed.

    Args:
        arms: by name; each has made its first steps and is stopped.
        rounds: how many are given.
        often: turns of an arm in a round, where it is not 1.
        skipped: rounds before these, which warm up.
    """
    draw = random.Random(0)
    names = [name for name in arms for _ in range((often or {}).get(name, 1))]
    for number in range(skipped + rounds):
        draw.shuffle(names)
        made = [(name, arms[name].turn()) for name in names]
        if number >= skipped:
            yield made


def turns_of(found: Rounds) -> list[Row]:
    """Every turn in its order, for a file."""
    return [
        {
            "round": number,
            "arm": name,
            "seconds": turn.seconds,
            "cpu_seconds": turn.cpu_seconds,
            "length": turn.row["response/length_mean"],
            "longest": turn.row["response/length_max"],
            "stolen": turn.stolen,
            "others": turn.others,
        }
        for number, made in enumerate(found)
        for name, turn in made
    ]


@contextmanager
def started(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """A process in a session of its own, inside the `with`. It is killed with its group, also when this one is."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    lifeline = Lifeline(process.pid)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        lifeline.release()


@contextmanager
def ending_all() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit` inside the `with`, so that jobs are ended as they are on Ctrl-C."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
