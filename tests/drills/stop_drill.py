"""Stops a real run at 14 moments, from its first instruction to its steps, and counts all that is left 10 s later.

`python -m tests.drills.stop_drill [--only NUMBER ...] [--json FILE] [key=value ...]` trains a tiny model of `soak_job`
with a server, two learner ranks, a controller and agents that are commands. Each of these starts a process in a session
of its own, which nobody would find by its parent. `moe-trm train` gets SIGTERM or Ctrl-C, is killed, or loses a
process. The same command goes on from there. The last start runs to its end.

The drill runs where no other program is (`tests.drills.apart`), so everything that it finds is the run's: processes,
entries of /dev/shm, entries of `TMPDIR`, and files with the controller's key. The run holds when no process is left at
any moment, and no file either, but where `moe-trm train` itself was killed: it cannot clean up then, so the next start
does, and none is left after the last one. The exit status is 1 when it does not hold.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.options import command_line
from benchmarks.processes import role
from benchmarks.short_run import metrics_of
from benchmarks.soak_job import write_job
from benchmarks.table import Row, report
from launch.job import learner_environment
from moe_trm.rollout import access
from tests.drills.apart import run_isolated

LEFT_S = 10.0
"""Time after the end of `moe-trm train` in which all that it started has to be gone."""
WAIT_S = 600.0
"""Longest time until a moment comes, and until a run has ended."""
POLL_S = 0.02
TWICE_S = 1.5
"""Pause between two Ctrl-C; what comes at once is taken for the same one."""
SHARED = Path("/dev/shm")
NAME = "stopped"
MORE_STEPS = 2
"""Steps that the last start makes."""
ENDLESS = 1_000_000
AGENT = """
import json, os, subprocess, urllib.request
subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(os.environ["MOE_TRM_PROMPT"]) as file:
    prompt = json.load(file)["text"]
body = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 12}).encode()
key = os.environ["OPENAI_API_KEY"]
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
with urllib.request.urlopen(request) as got:
    text = json.load(got)["choices"][0]["text"]
with open(os.environ["MOE_TRM_REWARD"], "w") as file:
    json.dump(sum(character.isdigit() for character in text) / max(1, len(text)), file)
"""


@dataclass(frozen=True)
class Moment:
    """A moment of a run, and what happens to it.

    Attributes:
        name: in the table.
        sees: the process that has to be there (`benchmarks.processes.ROLES`); `step`: a step has to be done.
        delay_s: after that.
        by: the signal that stops it.
        victim: the process that gets a SIGKILL.
    """

    name: str
    sees: str
    delay_s: float
    by: str
    victim: str = "moe-trm train"

    @property
    def cleans(self) -> bool:
        """True for a stop after which `moe-trm train` can clean up."""
        return self.by != "SIGKILL" or self.victim != "moe-trm train"


MOMENTS = (
    Moment("the command imports", "moe-trm train", 0.3, "SIGTERM"),
    Moment("the command imports", "moe-trm train", 0.6, "SIGKILL"),
    Moment("the server's keeper imports", "server keeper", 0.3, "SIGTERM"),
    Moment("the server imports", "SGLang server", 3.0, "SIGKILL"),
    Moment("the server imports", "SGLang server", 3.0, "Ctrl-C"),
    Moment("torchrun imports", "torchrun", 1.0, "SIGKILL"),
    Moment("the ranks import", "learner rank", 1.0, "SIGTERM"),
    Moment("the controller imports", "rollout controller", 0.3, "SIGKILL"),
    Moment("the controller waits for the server", "rollout controller", 4.0, "SIGKILL"),
    Moment("a step", "step", 0.2, "SIGTERM"),
    Moment("a step", "step", 0.2, "SIGKILL"),
    Moment("a step", "step", 0.2, "Ctrl-C twice"),
    Moment("a step", "step", 0.2, "SIGKILL", "learner rank"),
    Moment("a step", "step", 0.2, "SIGKILL", "rollout controller"),
)


@dataclass(frozen=True)
class Leftovers:
    """All that a run left behind, by name."""

    processes: Sequence[str]
    shared: Sequence[str]
    temporary: Sequence[str]
    keys: Sequence[str]

    @property
    def files(self) -> list[str]:
        """Everything but processes."""
        return [*self.shared, *self.temporary, *self.keys]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help=f"moments, of 1 to {len(MOMENTS)}")
    args = parser.parse_intermixed_args(argv)
    if (code := run_isolated("tests.drills.stop_drill", sys.argv[1:] if argv is None else argv)) is not None:
        return code
    moments = [MOMENTS[number - 1] for number in args.only] if args.only else MOMENTS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="stop-drill-") as temporary:
        folder = Path(temporary)
        (folder / "tmp").mkdir()
        (folder / "agent.py").write_text(AGENT, encoding="utf-8")
        config = write_job(folder)
        for moment in moments:
            started = start(config, folder, ENDLESS, args.overrides)
            rows.append(stopped(moment, started, folder))
            print(rows[-1], flush=True)
        done = start(config, folder, len(metrics_of(folder / NAME)) + MORE_STEPS, args.overrides)
        code = done.wait()
        last = find_leftovers(folder, LEFT_S)
    holds = not last.processes and not last.files and code == 0
    rows.append(row_of("runs to its end", "", 0.0, code, last, "holds" if holds else f"left: {names_of(last)}"))
    report(f"All that is left {LEFT_S:g} s after a stop", rows, args.json)
    return 0 if all(row["verdict"] == "holds" for row in rows) else 1


def start(config: Path, folder: Path, steps: int, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    """`moe-trm train` as the leader of a group, as a shell starts it."""
    settings = [
        f"run_dir={folder}", f"name={NAME}", f"train.steps={steps}", "checkpoint.every=1", "task.reward=null",
        "rollout.server.startup_timeout_s=900",
        f'rollout.agent=["python","{folder / "agent.py"}"]', "checkpoint.allow_changes=true", "train.eval_every=0",
        *overrides,
    ]  # fmt: skip
    with (folder / "run.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "moe_trm", "train", str(config), *settings],
            env={**learner_environment(None), "TMPDIR": str(folder / "tmp")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def stopped(moment: Moment, run: subprocess.Popen[bytes], folder: Path) -> Row:
    """Wait for the moment, stop the run, and look for what is left."""
    await_moment(moment, run, folder)
    time.sleep(moment.delay_s)
    start_s = time.monotonic()
    if moment.by == "SIGTERM":
        run.terminate()
    elif moment.by == "SIGKILL":
        victim = next((process for process in other_processes() if name_of(process) == moment.victim), None)
        if victim is None:
            raise SystemExit(f"there is no {moment.victim}")
        victim.kill()
    else:
        os.killpg(run.pid, signal.SIGINT)
        if moment.by.endswith("twice"):
            time.sleep(TWICE_S)
            os.killpg(run.pid, signal.SIGINT)
    try:
        code = run.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{moment}: it did not end\n{(folder / 'run.log').read_text()[-4000:]}") from None
    ended = time.monotonic() - start_s
    leftovers = find_leftovers(folder, LEFT_S)
    holds = not leftovers.processes and not (moment.cleans and leftovers.files)
    by = moment.by + (f" of a {moment.victim}" if moment.victim != "moe-trm train" else "")
    return row_of(moment.name, by, ended, code, leftovers, "holds" if holds else f"left: {names_of(leftovers)}")


def row_of(name: str, by: str, ended_s: float, code: int, leftovers: Leftovers, verdict: str) -> Row:
    """One line of the table."""
    return {
        "moment": name,
        "stopped by": by,
        "ended after s": round(ended_s, 1),
        "exit code": code,
        "processes": len(leftovers.processes),
        "in /dev/shm": len(leftovers.shared),
        "in TMPDIR": len(leftovers.temporary),
        "keys": len(leftovers.keys),
        "verdict": verdict,
    }


def names_of(leftovers: Leftovers) -> str:
    """The names of all that is left."""
    return ", ".join([*leftovers.processes, *leftovers.files])


def await_moment(moment: Moment, run: subprocess.Popen[bytes], folder: Path) -> None:
    """Return when the process is there, or a step of this start is done."""
    steps_done, until = len(metrics_of(folder / NAME)), time.monotonic() + WAIT_S
    while True:
        if moment.sees == "step" and len(metrics_of(folder / NAME)) > max(1, steps_done):
            return
        if moment.sees != "step" and any(name_of(process) == moment.sees for process in other_processes()):
            return
        if run.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{moment} did not come\n{(folder / 'run.log').read_text()[-4000:]}")
        time.sleep(POLL_S)


def find_leftovers(folder: Path, within_s: float) -> Leftovers:
    """All that is left; looked for again until nothing is, or the time is over."""
    until = time.monotonic() + within_s
    while True:
        leftovers = Leftovers(
            [name_of(process) for process in other_processes()],
            [path.name for path in SHARED.iterdir()],
            [path.name for path in (folder / "tmp").iterdir()],
            [path.name for path in (folder / NAME).rglob(f"*{access.FILE}*")] if (folder / NAME).is_dir() else [],
        )
        if not (leftovers.processes or leftovers.files) or time.monotonic() > until:
            return leftovers
        time.sleep(POLL_S)


def other_processes() -> list[psutil.Process]:
    """All processes of this world but the drill and its init."""
    return [process for process in psutil.process_iter() if process.pid not in (1, os.getpid()) and name_of(process)]


def name_of(process: psutil.Process) -> str:
    """Its role; empty for one that has ended."""
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return role(process.cmdline())
    return ""


if __name__ == "__main__":
    sys.exit(main())
