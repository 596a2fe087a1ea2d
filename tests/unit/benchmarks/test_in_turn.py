"""Jobs in turn, with small processes: one goes on, all others are stopped, and none is left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.in_turn import Arm, Turn, _Machine, ending_all, rounds_of, started

PATIENCE_S = 20.0
FREE = 2
"""Steps of a job at its start; it then makes one for each SIGCONT."""
JOB = f"""
import json, os, signal, subprocess, sys, threading, time
begun = sys.argv[1:]
steps = open(begun[0], "a", buffering=1)
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
PARENT = [sys.executable, "-c", "import subprocess, sys, time; subprocess.Popen(" + repr(SLEEP) + "); time.sleep(1000)"]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])

def work():
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass

for number in range(1000):
    if number >= {FREE}:
        signal.sigwait([signal.SIGCONT])
    before = time.process_time()
    thread = threading.Thread(target=work)
    thread.start()
    work()
    thread.join()
    if number == 3 and "fork" in begun:
        subprocess.Popen(PARENT, start_new_session=True)
    if number == 3 and "die" in begun:
        sys.exit("my last words")
    spent = time.process_time() - before
    line = json.dumps({{"step": number, "time/step_s": 1.0, "spent": spent, "pid": os.getpid()}})
    steps.write(json.dumps({{"eval": number}}) + "\\n")
    steps.write(line[:9])
    steps.write(line[9:] + "\\n")
"""


@contextmanager
def job(folder: Path, name: str, *ways: str) -> Iterator[Arm]:
    """A job that is warmed up and stopped."""
    steps, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    command = [sys.executable, "-c", JOB, str(steps), *ways]
    with started(command, log) as process, Arm(name, [process], steps, [log]) as arm:
        arm.warm_up(FREE)
        yield arm


def state(pid: int) -> str:
    """A letter of the kernel's; empty for a process that is gone or a zombie."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in "XZ" else found


def states(arms: list[Arm]) -> set[str]:
    """Of all their processes, once they had time to follow a signal."""
    found: set[str] = set()
    for _ in range(1000):
        found = {state(pid) for arm in arms for pid in arm.pids}
        if found == {"T"}:
            break
        time.sleep(0.005)
    return found


def test_one_makes_a_step_and_all_are_stopped_between_turns(tmp_path: Path) -> None:
    with ExitStack() as stack:
        arms = [stack.enter_context(job(tmp_path, name)) for name in "ab"]
        assert states(arms) == {"T"}
        for number in range(FREE, FREE + 3):
            for arm in arms:
                turn = arm.turn()
                assert turn.row["step"] == number, "every step is in one turn"
                assert {turn.row["pid"]} == arm.pids
                assert turn.cpu_seconds >= turn.row["spent"] >= 0.03, "both threads count"
                [(command, spent)] = turn.cpu_of.items()
                assert command.startswith(sys.executable)
                assert f"{arm.name}.jsonl" in command
                assert spent == turn.cpu_seconds
                assert turn.seconds > 0
                assert 0 <= turn.stolen <= 1
                assert turn.others >= 0
            assert states(arms) == {"T"}
        pids = [pid for arm in arms for pid in arm.pids]
    assert not any(map(state, pids))


def test_a_tree_that_grows_in_its_turn_is_stopped_and_ended_whole(tmp_path: Path) -> None:
    with job(tmp_path, "a", "fork") as arm:
        arm.turn()
        assert len(arm.pids) == 1
        while len(arm.pids) < 3:  # the grandchild may need some turns to start
            arm.turn()
        assert states([arm]) == {"T"}
        pids = arm.pids
    assert not any(map(state, pids)), "those in a session of their own, too"


def test_an_arm_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with job(tmp_path, "a", "die") as arm:
        arm.turn()
        with pytest.raises(SystemExit, match=r"a: it has ended(.|\n)*my last words"):
            arm.turn()


def test_a_step_out_of_turn_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, "a") as arm:
        [pid] = arm.pids
        os.kill(pid, signal.SIGCONT)
        steps = tmp_path / "a.jsonl"
        while steps.read_text().count("time/step_s") <= FREE or not steps.read_text().endswith("\n"):
            time.sleep(0.005)
        with pytest.raises(SystemExit, match="out of its turn"):
            arm.turn()


class Counted(Arm):
    """An arm without processes."""

    def __init__(self, name: str, made: list[str]) -> None:
        self.name, self._made = name, made

    def turn(self) -> Turn:
        self._made.append(self.name)
        return Turn(float(len(self._made)), 0.0, {})


def test_rounds_have_every_turn_in_an_order_of_their_own() -> None:
    def made() -> tuple[list[str], list[list[tuple[str, Turn]]]]:
        order: list[str] = []
        arms = {name: Counted(name, order) for name in "abcd"}
        return order, list(rounds_of(arms, 5, {"a": 2}, skipped=2))

    order, rounds = made()
    assert len(order) == 7 * 5
    assert [name for one in rounds for name, _ in one] == order[2 * 5 :]
    names = ["".join(name for name, _ in one) for one in rounds]
    assert all(sorted(each) == list("aabcd") for each in names)
    assert len(set(names)) > 1
    assert made()[0] == order, "the same command has the same order"


def test_what_the_machine_did_meanwhile_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(10.0, 100.0), (11.0, 107.0)])
    monkeypatch.setattr("benchmarks.in_turn._machine", lambda: _Machine(*next(looks)))
    with job(tmp_path, "a") as arm:
        turn = arm.turn()
    assert turn.stolen == 1 / 8
    assert turn.others == (7.0 - turn.cpu_seconds) / turn.seconds
    assert turn.host == (1 - turn.stolen, 1 + turn.others)


BENCHMARK = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
from benchmarks.in_turn import ending_all, rounds_of
from tests.unit.benchmarks.test_in_turn import job
folder = Path(sys.argv[1])
with ending_all(), job(folder, "a", "fork") as a, job(folder, "b") as b:
    for _ in rounds_of({"a": a, "b": b}, 1000):
        if len(a.pids) == 3:
            (folder / "pids").write_text(" ".join(map(str, [*a.pids, *b.pids])))
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interrupted_benchmark_leaves_no_process(tmp_path: Path, number: int, status: int) -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, str(tmp_path)], env=here, stderr=subprocess.PIPE)
    pids = tmp_path / "pids"
    while not pids.exists() or len(pids.read_text().split()) < 4:
        assert benchmark.poll() is None
        time.sleep(0.01)
    benchmark.send_signal(number)
    benchmark.communicate()
    assert benchmark.returncode == status
    assert not any(state(int(pid)) for pid in pids.read_text().split())


def test_a_killed_benchmark_leaves_no_process(tmp_path: Path) -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, str(tmp_path)], env=here)
    pids = tmp_path / "pids"
    while not pids.exists() or len(pids.read_text().split()) < 4:
        assert benchmark.poll() is None
        time.sleep(0.01)
    benchmark.kill()
    benchmark.wait()
    left = [int(pid) for pid in pids.read_text().split()]
    deadline = time.monotonic() + PATIENCE_S
    while any(map(state, left)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [pid for pid in left if state(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_signals_mean_what_they_did_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_all():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
