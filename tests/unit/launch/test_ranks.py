"""torchrun's ranks as `moe-trm train` starts them: restarts, exit codes, and a stop at every moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch import ranks
from launch.job import learner_environment
from moe_trm.errors import REFUSED

PROGRAM = """
import sys, time
from launch import ranks
stop = ranks.Stop()
print("listening", flush=True)
launch = ranks.elastic_launch
def launched(*args):
    try:
        time.sleep(1.0 if sys.argv[-1] == "swallows" else 0.0)
    except Exception:  # as torchrun's own code does in places
        pass
    return launch(*args)
ranks.elastic_launch = launched
print(ranks.run_with_restarts(2, sys.argv[1:], 1, stop)[0])
"""
RANK = """
import os, sys
from pathlib import Path

folder, status, *arguments = sys.argv[1:]
life = "second" if "--restarted" in arguments else "first"
(Path(folder) / f"{life}-{os.environ['RANK']}").touch()
sys.exit(int(status) if life == "first" else 0)
"""
STOPPED = """
import os, signal, sys, time
from pathlib import Path

folder, saves = Path(sys.argv[1]), sys.argv[2] == "saves"
signal.signal(signal.SIGTERM, lambda *_: (folder / f"saved-{os.environ['RANK']}").touch() or sys.exit(0))
if not saves:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
(folder / f"begun-{os.environ['RANK']}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("failed", "outcome"),
    [
        ({1: -9, 0: 1}, (1, "learner rank 1 was ended by SIGKILL")),
        ({1: -9, 0: REFUSED}, (REFUSED, f"learner rank 0 ended with exit code {REFUSED}")),
        ({0: 3, 1: -15}, (3, "learner rank 0 ended with exit code 3")),
    ],
)
def test_the_first_rank_that_failed_is_told_and_a_refusal_before_it(
    failed: dict[int, int], outcome: tuple[int, str]
) -> None:
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in failed.items()}
    for failure, when in zip(failures.values(), (10, 20), strict=True):
        failure.timestamp = when
    assert ranks.first_failure(failures) == outcome


def started(folder: Path, rank: str, *words: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(rank)
    program = [sys.executable, "-c", PROGRAM, str(folder / "rank.py"), str(folder), *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=learner_environment(None))


@pytest.mark.parametrize(
    ("status", "code", "lives"),
    [
        pytest.param(0, 0, 1, marks=pytest.mark.slow),
        pytest.param(5, 0, 2, marks=pytest.mark.slow),
        (REFUSED, REFUSED, 1),
    ],
)
def test_ranks_are_started_again_unless_they_refuse(tmp_path: Path, status: int, code: int, lives: int) -> None:
    said, _ = started(tmp_path, RANK, str(status)).communicate()
    assert said.splitlines()[-1] == str(code)
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py")
    assert names == sorted(f"{life}-{rank}" for life in ("first", "second")[:lives] for rank in range(2))


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "swallows", "imports", "saves"])
def test_a_stop_is_never_lost(tmp_path: Path, moment: str) -> None:
    """Before there is a rank (torchrun catches everything there), while ranks cannot save yet, and when they can."""
    with started(tmp_path, STOPPED, moment) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "listening\n"
        while moment in ("imports", "saves") and len(list(tmp_path.glob("begun-*"))) < 2:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=60)
    assert said.splitlines()[-1] == str(128 + signal.SIGTERM)
    assert len(list(tmp_path.glob("saved-*"))) == (2 if moment == "saves" else 0)


COUNTS = """
import os, signal, sys, time
from pathlib import Path

heard, folder = [], Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
(folder / f"begun-{os.environ['RANK']}").touch()
while not heard:
    time.sleep(0.02)
time.sleep(2.0)
(folder / f"heard-{os.environ['RANK']}").write_text(str(len(heard)))
"""


def test_a_signal_to_every_process_of_a_job_is_one_request(tmp_path: Path) -> None:
    """`moe-trm train` passes on what its launcher was sent as well, and a service manager may send it again."""
    with started(tmp_path, COUNTS) as program:
        while len(list(tmp_path.glob("begun-*"))) < 2:
            time.sleep(0.02)
        program.send_signal(signal.SIGTERM)
        again = f"import os, time; os.kill({program.pid}, 15); time.sleep(0.3); os.kill({program.pid}, 15)"
        subprocess.run([sys.executable, "-c", again], check=True)
        program.wait(120)
    assert [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)] == ["1", "1"]
