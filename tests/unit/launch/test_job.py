"""`moe-trm train`: who ends whom, which exit code is told, and what a signal does at each moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import job, rollout_process
from launch.hosts import push_place
from launch.job import Signals, wait_for, watch
from launch.rollout_process import RolloutProcess
from moe_trm.cli import main as moe_trm
from moe_trm.config.schema import Config
from moe_trm.rollout import access
from moe_trm.run_folder import history
from moe_trm.run_folder.run_end import LEARNER_LOCK, RunEnd, write_end
from moe_trm.runtime.lock import held_alone
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.runtime.private import Scratch
from tests.unit.launch.interrupted import assert_ends_with_one_line
from tests.unit.processes import wait_until_dead

PROGRAM = """
import sys, time
import launch.job
def starting(*args): print("starting", flush=True); time.sleep(60)
launch.job.run_job = starting
from moe_trm.cli import main
sys.exit(main(["train", "config.yaml"]))
"""


IMPORTING = """
import sys, time, types
from moe_trm import cli
def importing(name):
    print("importing", flush=True)
    try:
        time.sleep(60)
    except BaseException:  # as an extension module may that calls back into Python
        pass
    print("went on", flush=True)
    return types.SimpleNamespace(configure=lambda parser: None, run=lambda args: 0)
cli.importlib = types.SimpleNamespace(import_module=importing)
sys.exit(cli.main(["train"]))
"""
CHECKING = """
import sys, time
import launch.job
def checks(*args): print("checking", flush=True); time.sleep(60)
launch.job.load_here = checks
from moe_trm.cli import main
sys.exit(main(["train", "config.yaml"]))
"""


@pytest.mark.parametrize(
    ("program", "said", "told"),
    [
        (IMPORTING, "importing", "interrupted"),
        (PROGRAM, "starting", "interrupted"),
        (CHECKING, "checking", "stopped before anything was started"),
    ],
)
def test_ctrl_c_while_starting_ends_it_at_once_with_one_line(program: str, said: str, told: str) -> None:
    """Also where code that is imported catches everything."""
    assert_ends_with_one_line(program, said, told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_a_check_swallows_starts_nothing(number: signal.Signals) -> None:
    with Signals() as signals:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert signals.begin() == number


@contextmanager
def begun() -> Iterator[Signals]:
    """Of a job that has started something."""
    with Signals() as signals:
        assert not signals.begin()
        yield signals


@pytest.mark.parametrize(("number", "count"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_sigterm_that_is_repeated_is_one_request_and_ctrl_c_is_two(number: signal.Signals, count: int) -> None:
    with begun() as signals:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert signals.count == count


def child(code: str) -> OwnedProcess:
    return OwnedProcess([sys.executable, "-I", "-S", "-c", code], {})


WAITS = "import time; time.sleep(600)"
READY = "print('starting', flush=True); print('rollout server ready at', flush=True); "
SERVED = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "


def server(monkeypatch: pytest.MonkeyPatch, code: str) -> RolloutProcess:
    """A server that runs this instead of `launch.rollout`."""
    monkeypatch.setattr(rollout_process, "rollout_command", lambda *_: [sys.executable, "-I", "-S", "-c", code])
    return RolloutProcess("c", [], "key")


@pytest.mark.parametrize(("code", "status"), [(0, 0), (4, 4), (-9, 128 + 9)])
def test_the_exit_code_is_that_of_the_learner(code: int, status: int) -> None:
    ends = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    with begun() as signals, child(ends) as learner:
        assert watch(learner, signals) == status


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("raise SystemExit(0)", 1)])
def test_a_server_that_does_not_start_ends_the_learner(monkeypatch: pytest.MonkeyPatch, code: str, status: int) -> None:
    with begun() as signals, server(monkeypatch, code) as started, child(WAITS) as learner:
        assert watch(learner, signals, started) == status
    assert learner.poll() == -signal.SIGKILL
    with begun() as signals, server(monkeypatch, code) as started:
        assert wait_for(started, signals) == status


def test_a_learner_that_refuses_ends_the_start_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun() as signals, server(monkeypatch, WAITS) as started, child("raise SystemExit(2)") as learner:
        assert watch(learner, signals, started) == 2
    assert started._process.poll() == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_server_starts_ends_all_at_once(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    with begun() as signals, server(monkeypatch, WAITS) as started, child(WAITS) as learner:
        signal.raise_signal(number)
        assert watch(learner, signals, started) == 128 + number
    assert learner.poll() == -signal.SIGKILL
    with begun() as signals, server(monkeypatch, WAITS) as started:
        signal.raise_signal(number)
        assert wait_for(started, signals) == 128 + number


def test_a_server_that_is_ready_is_asked_to_end_after_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun() as signals, server(monkeypatch, f"{SERVED}{READY}time.sleep(600)") as started:
        assert wait_for(started, signals) is None
        with child("raise SystemExit(0)") as learner:
            assert watch(learner, signals, started) == 0
        assert started.ready
        assert started.failed is None
    assert started._process.poll() == 0


STOPPED = """
import sys
from moe_trm.runtime.owned_process import OwnedProcess
from launch.job import Signals, watch
from moe_trm.runtime.output import outliving_readers
command = [sys.executable, "-I", "-S", *sys.argv[1:]]
with outliving_readers(), Signals() as signals, OwnedProcess(command, {}) as learner:
    signals.begin()
    print("begun", flush=True)
    sys.exit(watch(learner, signals))
"""
SAVES = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def save(number, frame):
    time.sleep(0.5)
    (folder / "saved").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
(folder / "learns").touch()
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_reader_is_gone_saves_all_the_same(tmp_path: Path, number: signal.Signals) -> None:
    """As after `moe-trm train ... | head`, or when the terminal of a log is closed."""
    (tmp_path / "saves.py").write_text(SAVES)
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "saves.py"), str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    assert job.stdout.readline() == b"begun\n"
    job.stdout.close()
    while not (tmp_path / "learns").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(number)
    assert job.wait(60) == 128 + number
    assert (tmp_path / "saved").exists()


def test_a_job_that_is_killed_takes_its_children_along(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    held = f"child = OwnedProcess([sys.executable, '-c', {code!r}], {{}})"
    program = f"import sys, time; from moe_trm.runtime.owned_process import OwnedProcess; {held}; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program]) as job:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert job.poll() is None
            time.sleep(0.01)
        job.kill()
    assert wait_until_dead([int((tmp_path / "pid").read_text())], 60)


KILLED = """
import os, sys
from pathlib import Path
from moe_trm.runtime.private import Scratch
held = [Scratch(Path(place)) for place in sys.argv[1:]]
os.kill(os.getpid(), 9)
"""


def test_what_killed_ranks_left_goes_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a living process holds, and nothing while ranks are left."""
    monkeypatch.setattr(history, "END_OF_KILLED_S", 0.2)
    run, places = tmp_path / "run", [tmp_path / name for name in ("tmp", "pushes", "never made")]
    run.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, *map(str, places[:2])], check=False)
    for name in (access.FILE, f".{access.FILE}.half"):
        (run / name).touch()
    with Scratch(tmp_path / "other") as other:
        living = other.rename(places[0] / other.name)
        with held_alone(run / LEARNER_LOCK, "trains into this folder"):
            job.tidy(run, places)
        assert [len(list(place.iterdir())) for place in (*places[:2], run)] == [2, 1, 3]
        job.tidy(run, places)
        assert [path.name for place in (*places[:2], run) for path in place.iterdir()] == [living.name, LEARNER_LOCK]
        living.rename(other)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a job of which nothing may be checked, opened or started."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something began")

    given = {"name": "run", "run_dir": str(tmp_path), "model": {"checkpoint": "m"}, "train": {"steps": 2}}
    made = Config.model_validate(given)
    monkeypatch.setattr(job, "load_here", lambda *_: (made, ()))
    for name in ("check_start", "RolloutProcess", "under_torchrun"):
        monkeypatch.setattr(job, name, never)
    monkeypatch.setattr(history, "END_OF_KILLED_S", 0.2)
    return made


def test_a_job_tidies_up_however_its_ranks_ended(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After their end, in the places that they use."""
    done = list[object]()

    @contextmanager
    def ranks(*_: object) -> Iterator[None]:
        yield
        done.append("ranks")

    monkeypatch.setattr(job, "check_start", lambda *_, **__: None)
    monkeypatch.setattr(job, "RolloutProcess", ranks)
    monkeypatch.setattr(job, "watch", lambda *_: 137)
    monkeypatch.setattr(job, "tidy", lambda *given: done.append(given))
    monkeypatch.setattr(config.rollout.__class__, "starts_server", False)
    pushes = push_place(config.sync, tmp_path / "run", on_one_host=True)
    assert job.run_job("config.yaml", [], start=ranks) == 137  # type: ignore[arg-type]
    assert done == ["ranks", (tmp_path / "run", {Path(tempfile.gettempdir()), pushes})]


@pytest.mark.parametrize("lock", [job.LOCK, LEARNER_LOCK])
def test_a_second_job_in_a_folder_is_refused_before_it_starts_anything(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str], lock: str
) -> None:
    """Also where the first one's ranks were started by torchrun itself."""
    with held_alone(tmp_path / "run" / lock, "trains into this folder"):
        assert moe_trm(["train", "config.yaml"]) == 2
    told = capsys.readouterr().err
    assert "another process trains into this folder" in told
    assert f"process {os.getpid()} on " in told
    assert "choose another `name` or `run_dir`" in told
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {job.LOCK, LEARNER_LOCK}


def test_a_finished_run_is_told_and_nothing_is_started(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    history.begin(run, config.dump(), first_step=0, branched=None)
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    write_end(run, RunEnd("finished", 2, time.time()))
    assert moe_trm(["train", "config.yaml"]) == 0
    assert "nothing is left to do" in capsys.readouterr().out
