"""Forked ranks as torchrun's: their own group, environment, output and exit status, nothing of the job before."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from moe_trm.runtime.warm import WarmProcess
from tests.integration.jobs import still_running
from tests.integration.ranks import rank_server

PROGRAM = """
import os, sys, torch, torch.distributed as dist
left_over = getattr(torch, "left_over", 0)
torch.left_over = 1
dist.init_process_group("gloo")
mine = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(mine)
print(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {mine.item():.0f} {left_over} {sys.argv[1:]}")
dist.destroy_process_group()
sys.exit(int(sys.argv[1]) * int(os.environ["RANK"]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_each_job_has_a_group_and_processes_of_its_own(tmp_path: Path, status: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for _ in range(2):
        done = rank_server().run([str(tmp_path / "program.py"), str(status), "x"], 2)
        assert done.statuses == [0, status]
        assert done.ok is (status == 0)
        assert done.stdout.splitlines() == [f"{rank} of 2: 1 0 ['{status}', 'x']" for rank in range(2)]


def test_an_error_is_told_and_ranks_that_wait_for_the_failed_one_are_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise KeyError('rank one')\ntime.sleep(1000)\n"
    )
    done = rank_server().run([str(tmp_path / "program.py")], 2, patience_s=0.5)
    assert done.statuses == [-9, 1]
    assert "KeyError: 'rank one'" in done.stderr


CRASH = """
import os, signal, sys
from pathlib import Path
before = Path(sys.argv[1])
if not before.exists():
    before.touch()
    os.kill(os.getpid(), signal.SIGSEGV)
print("again")
"""


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_crash_of_machine_code_is_told_with_its_stack(tmp_path: Path, repeatable: bool) -> None:
    (tmp_path / "program.py").write_text(CRASH)
    program = [str(tmp_path / "program.py"), str(tmp_path / "before")]
    if repeatable:
        with pytest.warns(UserWarning, match=r"crashed(.|\n)*Segmentation fault(.|\n)*program.py"):
            done = rank_server().run(program, 1, repeatable=True)
        assert done.ok
        assert done.stdout == "again\n"
    else:
        done = rank_server().run(program, 1)
        assert done.statuses == [-signal.SIGSEGV]
        assert "Segmentation fault" in done.stderr


IMPORTS = """
import json, sys
before = set(sys.modules)
import launch.train, moe_trm.learner.megatron.build
mine = {name for name in set(sys.modules) - before if name.split(".")[0] in ("torch", "megatron", "transformers")}
print(json.dumps(sorted(mine)))
"""


def test_a_rank_has_nothing_heavy_left_to_import(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(IMPORTS)
    assert json.loads(rank_server().run([str(tmp_path / "imports.py")], 1).stdout) == []


GROUP = """
import sys
from moe_trm.runtime.forked_ranks import run_ranks
print(run_ranks([sys.argv[1], sys.argv[2]], 2, patience_s=600), flush=True)
"""
RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not (pathlib.Path(sys.argv[1]) / "fail").exists():
        time.sleep(0.01)
    sys.exit(3)
time.sleep(600)
"""


def started(folder: Path) -> tuple[WarmProcess, list[int]]:
    """A group of two ranks of which one fails when the file `fail` is there, and their process ids."""
    (folder / "group.py").write_text(GROUP)
    (folder / "rank.py").write_text(RANK)
    with (folder / "output").open("w") as output:
        program = [str(folder / "group.py"), str(folder / "rank.py"), str(folder)]
        group = WarmProcess(rank_server().warm.address(), program, descriptors=(0, output.fileno(), 2))
    paths = [folder / str(rank) for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in paths):
        assert group.poll() is None
        time.sleep(0.01)
    return group, [int(path.read_text()) for path in paths]


def test_when_one_fails_the_others_are_asked_to_end(tmp_path: Path) -> None:
    """In the order of ends, so that the first one tells why."""
    group, _ = started(tmp_path)
    with group:
        (tmp_path / "fail").touch()
        assert group.wait() == 0
    assert (tmp_path / "output").read_text() == "{1: 3, 0: 5}\n"


def test_killed_a_group_leaves_no_rank(tmp_path: Path) -> None:
    group, pids = started(tmp_path)
    family = psutil.Process(group.pid).children(recursive=True)
    assert {process.pid for process in family} > set(pids), "the ranks, and the store where they meet"
    psutil.Process(group.pid).send_signal(signal.SIGKILL)
    assert group.wait() == -signal.SIGKILL
    assert not still_running(family, 60)
