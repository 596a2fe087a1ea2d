"""Forked ranks as torchrun's: their own group, environment, output and exit status, nothing of the job before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ranks import RankServer, rank_server

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


def test_a_server_that_was_ended_says_so(tmp_path: Path) -> None:
    server = RankServer()
    server.kill()
    with pytest.raises(RuntimeError, match="the rank server ended"):
        server.run([str(tmp_path / "program.py")], 1)
