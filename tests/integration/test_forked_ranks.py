"""Forked ranks as torchrun's: a group of their own, environment, output and exit status, nothing of the job before."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.integration.ranks import fork_ranks

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
        done = fork_ranks([str(tmp_path / "program.py"), str(status), "x"], 2)
        assert done.statuses == [0, status]
        assert done.ok is (status == 0)
        assert done.stdout.splitlines() == [f"{rank} of 2: 1 0 ['{status}', 'x']" for rank in range(2)]


def test_an_error_is_told_and_ranks_that_wait_for_the_failed_one_are_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise KeyError('rank one')\ntime.sleep(1000)\n"
    )
    done = fork_ranks([str(tmp_path / "program.py")], 2, patience_s=0.5)
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
            done = fork_ranks(program, 1, repeatable=True)
        assert done.ok
        assert done.stdout == "again\n"
    else:
        done = fork_ranks(program, 1)
        assert done.statuses == [-signal.SIGSEGV]
        assert "Segmentation fault" in done.stderr


IMPORTS = """
import json, sys
before = set(sys.modules)
import launch.learner, moe_trm.learner.megatron.build
mine = {name for name in set(sys.modules) - before if name.split(".")[0] in ("torch", "megatron", "transformers")}
print(json.dumps([sorted(mine), "torch._inductor.compile_fx" in sys.modules]))
"""


def test_a_rank_has_nothing_heavy_left_to_import_and_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(IMPORTS)
    assert json.loads(fork_ranks([str(tmp_path / "imports.py")], 1).stdout) == [[], False]
