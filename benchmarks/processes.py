"""Memory, open files, sockets and threads of a job's processes, read from the kernel (Linux) once a second."""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PAUSE_S = 1.0
ROLES = {
    "launch.rollout": "server keeper",
    "launch.ranks": "torchrun",
    "launch.train": "learner rank",
    "moe_trm.rollout.service": "rollout controller",
    "moe_trm.runtime.functions.worker": "reward function",
    "sglang.launch_server": "SGLang server",
    "moe_trm": "moe-trm train",
}
"""Short name of a process, by the module on its command line."""


@dataclass(frozen=True)
class Reading:
    """One process at one moment.

    Attributes:
        step: the last finished one.
        memory: bytes that only this process keeps in use: its anonymous pages, and its share of shared memory. File
            pages, which the kernel drops when it wants to, are left out.
        resident: bytes of its resident set, files and all.
        files, sockets, threads: how many are open.
    """

    step: int
    memory: int
    resident: int
    files: int
    sockets: int
    threads: int


def watch(
    command: Sequence[str], step: Callable[[], int], after_readings: Callable[[], object]
) -> list[tuple[str, list[Reading]]]:
    """Run `command` to its end. Returns the name and the measurements of each of its processes.

    Args:
        command: of the job.
        step: the last finished step.
        after_readings: called after each round of readings.

    Raises:
        SystemExit: the job failed.
    """
    job = psutil.Popen(list(command), stdout=subprocess.DEVNULL)
    readings: defaultdict[psutil.Process, list[Reading]] = defaultdict(list)
    names: dict[psutil.Process, str] = {}
    while job.poll() is None:
        finished_step = step()
        for process in [psutil.Process(job.pid), *job.children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                # A process names itself when it is up.
                names[process] = role(process.cmdline())
                readings[process].append(reading_of(process, finished_step))
        after_readings()
        with suppress(psutil.TimeoutExpired):
            job.wait(PAUSE_S)
    if job.returncode:
        raise SystemExit(f"the run ended with exit code {job.returncode}")
    return [(names[process], readings[process]) for process in readings]


def reading_of(process: psutil.Process, step: int) -> Reading:
    """`process` now. Raises `psutil.Error` or `OSError` where it is gone."""
    proc = Path(f"/proc/{process.pid}")
    rollup = {
        key.rstrip(":"): int(size) << 10
        for key, size, *_ in (line.split() for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    }
    opened = [str(link.readlink()) for link in (proc / "fd").iterdir() if link.is_symlink()]
    return Reading(
        step=step,
        memory=rollup["Pss_Anon"] + rollup["Pss_Shmem"],
        resident=rollup["Rss"],
        files=len(opened),
        sockets=sum(target.startswith("socket:") for target in opened),
        threads=process.num_threads(),
    )


def role(words: Sequence[str]) -> str:
    """Short name of the process with this command line; a process that took a name has it in one word."""
    words = [part for word in words for part in word.split()]
    line = " ".join(words)
    if short_name := next((name for module, name in ROLES.items() if module in words), None):
        return short_name
    if line.startswith("sglang::"):
        return f"SGLang {line.removeprefix('sglang::').split()[0]}"
    for part, name in (
        ("lifeline.py", "lifeline"),
        ("resource_tracker", "resource tracker"),
        ("spawn_main", "spawned"),
    ):
        if part in line:
            return name
    return line[-40:] or "unnamed"


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number where several are the same."""
    several, met = Counter(names), Counter[str]()
    unique = []
    for name in names:
        unique.append(f"{name} {met[name]}" if several[name] > 1 else name)
        met[name] += 1
    return unique
