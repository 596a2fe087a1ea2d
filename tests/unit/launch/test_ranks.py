"""Ranks that are forks of their launcher, as `moe-trm train` starts them where there is no CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch import preload, ranks
from launch.job import learner_environment
from moe_trm.config.schema import Config
from moe_trm.errors import REFUSED

PROGRAM = """
import sys
from pathlib import Path
from launch import ranks

folder, status = Path(sys.argv[1]), sys.argv[2]
run = lambda number, program: ranks.as_forks(number, [str(folder / "rank.py"), str(folder), status, *program[2:]])
print(ranks.run_with_restarts(run, 2, ["config.yaml"], 1, ranks.Stop()))
"""
RANK = """
import os, sys
from pathlib import Path

folder, status, *arguments = sys.argv[1:]
life = "second" if "--restarted" in arguments else "first"
(Path(folder) / f"{life}-{os.environ['RANK']}").write_text(Path("/proc/self/cmdline").read_text())
sys.exit(int(status) if life == "first" else 0)
"""


def test_where_cuda_is_present_ranks_import_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imported {name}"))
    assert not preload.preload(Config.model_validate({"model": {"checkpoint": "somewhere"}}))


@pytest.mark.parametrize("threads", [0, 1])
def test_a_process_with_threads_forks_no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int) -> None:
    for number in range(1 + threads):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preload, "THREADS", tmp_path)
    monkeypatch.setattr(preload, "import_all", lambda names: None)
    assert preload.preload(Config.model_validate({"model": {"checkpoint": "somewhere"}})) == (not threads)


@pytest.mark.parametrize(
    ("failed", "told"),
    [
        ({1: -9, 0: 1}, (1, "learner rank 1 was ended by SIGKILL")),
        ({1: -9, 0: REFUSED}, (REFUSED, f"learner rank 0 ended with exit code {REFUSED}")),
        ({0: 3, 1: -15}, (3, "learner rank 0 ended with exit code 3")),
    ],
)
def test_the_first_rank_that_failed_is_told_and_a_refusal_before_it(
    failed: dict[int, int], told: tuple[int, str]
) -> None:
    assert ranks.told(failed) == told


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code", "lives"), [(0, 0, 1), (5, 0, 2), (REFUSED, REFUSED, 1)])
def test_forked_ranks_are_started_again_unless_they_refuse(tmp_path: Path, status: int, code: int, lives: int) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), str(status)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=learner_environment(None))
    assert done.stdout.splitlines()[-1] == str(code)
    names = {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix != ".py"}
    assert sorted(names) == sorted(f"{life}-{rank}" for life in ("first", "second")[:lives] for rank in range(2))
    assert all("rank.py" in name for name in names.values()), "a rank has its own name in lists of processes"
