"""Ranks that are forks of their launcher, as `moe-trm train` starts them where there is no CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch import preload, ranks
from moe_trm.config.schema import Config
from moe_trm.errors import REFUSED

PROGRAM = """
import os, sys
from pathlib import Path
import launch.train
from launch import ranks

folder, status = Path(sys.argv[1]), int(sys.argv[2])

def main(arguments):
    life, rank = "second" if "--restarted" in arguments else "first", os.environ["RANK"]
    (folder / f"{life}-{rank}").write_text(Path("/proc/self/cmdline").read_text())
    return status if life == "first" else 0

launch.train.main = main
print(ranks.run_with_restarts(2, ["config.yaml"], 1, ranks.Stop(), forks=True))
"""


def test_a_rank_ends_with_the_status_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "setproctitle", None)  # this process keeps its name
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("SPT_NOENV", "1")
    given: list[list[str]] = []
    monkeypatch.setattr("launch.train.main", given.append)
    ranks.rank("config.yaml", "a=b")
    monkeypatch.setattr("launch.train.main", lambda _arguments: REFUSED)
    with pytest.raises(SystemExit) as ended:
        ranks.rank("config.yaml")
    assert (given, ended.value.code) == ([["config.yaml", "a=b"]], REFUSED)


def test_where_cuda_is_present_ranks_import_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imported {name}"))
    assert not preload.preload(Config.model_validate({"model": {"checkpoint": "somewhere"}}))


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code", "lives"), [(0, 0, 1), (5, 0, 2), (REFUSED, REFUSED, 1)])
def test_forked_ranks_are_started_again_unless_they_refuse(tmp_path: Path, status: int, code: int, lives: int) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), str(status)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(code)
    names = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(names) == [f"{life}-{rank}" for life in ("first", "second")[:lives] for rank in range(2)]
    assert all("launch.train" in name for name in names.values()), "a rank has its own name in lists of processes"
