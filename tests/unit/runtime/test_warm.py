"""Forks of a warm process: as processes of their own, whoever of the three ends first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moe_trm.errors import RunError
from moe_trm.runtime.forks import fork
from moe_trm.runtime.warm import WarmProcess, WarmServer

LIGHT = "tests.unit.runtime.light_server"
ROOT = Path(__file__).parents[3]
HERE = {"PYTHONPATH": str(ROOT)}
"""The module is found wherever a test stands."""
TELLS = """
import json, os, signal, sys
left_over = getattr(sys, "left_over", None)
sys.left_over = "x"
found = {"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "input": sys.stdin.read(),
         "left_over": left_over, "leader": os.getsid(0) == os.getpid(),
         "terminates": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}
print(json.dumps(found))
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
SLEEPS = """
import os, pathlib, signal, subprocess, sys, time
_, path, *further = sys.argv
if further and further[0].isdigit():
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(int(further[0])))
pids = [os.getpid()]
if further == ["child"]:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    pids.append(child.pid)
pathlib.Path(path).write_text(" ".join(map(str, pids)))
while True:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    with WarmServer(LIGHT, environment=HERE) as server:
        yield server


def pids_in(path: Path) -> list[int]:
    """Numbers that a sleeping program wrote, once it has."""
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def wait_until_gone(*pids: int) -> None:
    """Fails by the test's own limit."""
    while not all(map(gone, pids)):
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """A zombie that nobody has collected is gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("status", [0, 3])
def test_a_program_has_what_it_was_given_and_nothing_of_the_one_before(
    server: WarmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "input").write_text("asked")
    monkeypatch.chdir(tmp_path)
    large = "x" * 200_000
    for _ in range(2):
        with (
            (tmp_path / "input").open() as given,
            (tmp_path / "output").open("w") as output,
            (tmp_path / "errors").open("w") as errors,
        ):
            descriptors = (given.fileno(), output.fileno(), errors.fileno())
            program = [str(tmp_path / "tells.py"), str(status), "a b"]
            with WarmProcess(server.address(), program, {"ONLY": large}, descriptors) as process:
                assert process.wait() == status
        assert process.poll() == status
        assert (tmp_path / "errors").read_text() == "an error\n"
        assert json.loads((tmp_path / "output").read_text()) == {
            "argv": [str(status), "a b"],
            "environment": {"ONLY": large},
            "folder": str(tmp_path),
            "input": "asked",
            "left_over": None,
            "leader": True,
            "terminates": True,
        }


def test_signals_reach_it_and_only_it(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    one, other = (
        WarmProcess(server.address(), [str(tmp_path / "sleeps.py"), str(tmp_path / name), *handled])
        for name, handled in (("one", ["7"]), ("other", []))
    )
    with other, one:
        pids_in(tmp_path / "one")
        pids_in(tmp_path / "other")
        assert one.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.01)
        one.send_signal(signal.SIGTERM)
        assert one.wait() == 7
        one.send_signal(signal.SIGTERM)
        assert other.poll() is None
        other.send_signal(signal.SIGTERM)
        assert other.wait() == -signal.SIGTERM


def test_killed_its_group_goes_with_it_and_the_server_stays(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    process = WarmProcess(server.address(), [str(tmp_path / "sleeps.py"), str(tmp_path / "pids"), "child"])
    pids, served_by = pids_in(tmp_path / "pids"), server.pid
    assert pids[0] == process.pid
    process.kill()
    assert process.returncode == -signal.SIGKILL
    wait_until_gone(*pids)
    with WarmProcess(server.address(), ["-m", "this"], descriptors=(0, 2, 2)) as after:
        assert after.wait() == 0
    assert server.pid == served_by


def test_an_error_is_told_as_by_the_interpreter(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise KeyError('in the fork')\n")
    with (tmp_path / "errors").open("w") as errors:
        assert (
            WarmProcess(server.address(), [str(tmp_path / "fails.py")], descriptors=(0, 1, errors.fileno())).wait() == 1
        )
    assert "KeyError: 'in the fork'" in (tmp_path / "errors").read_text()


CLIENT = """
import sys, time
from moe_trm.runtime.warm import WarmProcess
process = WarmProcess(sys.argv[1], sys.argv[2:])
time.sleep(600)
"""


def test_it_goes_with_its_client(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    program = [str(tmp_path / "sleeps.py"), str(tmp_path / "pids"), "child"]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.address(), *program], cwd=ROOT)
    pids = pids_in(tmp_path / "pids")
    client.kill()
    client.wait()
    wait_until_gone(*pids)


OWNER = f"""
import sys, time
from moe_trm.runtime.warm import WarmProcess, WarmServer
server = WarmServer({LIGHT!r}, environment={HERE!r})
process = WarmProcess(server.address(), sys.argv[1:])
print(server.pid, flush=True)
time.sleep(600)
"""


def test_killed_with_its_programs_an_owner_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    program = [str(tmp_path / "sleeps.py"), str(tmp_path / "pids"), "child"]
    with subprocess.Popen([sys.executable, "-c", OWNER, *program], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        served_by, pids = int(owner.stdout.readline()), pids_in(tmp_path / "pids")
        owner.kill()
    wait_until_gone(served_by, *pids)


def test_a_server_that_dies_takes_its_programs_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with WarmServer(LIGHT, environment=HERE) as server:
        address = server.address()
        process = WarmProcess(address, [str(tmp_path / "sleeps.py"), str(tmp_path / "pids")])
        (pid,) = pids_in(tmp_path / "pids")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        wait_until_gone(pid)
        with pytest.raises(RunError, match="forks warm ranks started none"):
            WarmProcess(address, ["-m", "this"])
        with WarmProcess(server.address(), ["-m", "this"], descriptors=(0, 2, 2)) as after:
            assert after.wait() == 0


def test_a_process_with_threads_does_not_fork() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait, name="another")
    other.start()
    try:
        with pytest.raises(RunError, match="several threads cannot fork"):
            fork(lambda: 0)
    finally:
        over.set()
        other.join()
