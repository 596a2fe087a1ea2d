"""Ranks with micro-batches of their own: each gets the rows of all, in the order of the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.unit.learner.data_group_rank import rows

RANK = Path(__file__).with_name("data_group_rank.py")
WORLD = 2


def test_every_rank_gets_the_rows_of_every_other(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), str(tmp_path), str(rank), str(WORLD)]) for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * WORLD
    own = [rows(rank) for rank in range(WORLD)]
    assert not set(own[0].tolist()) & set(own[1].tolist())
    for rank in range(WORLD):
        found = load_file(tmp_path / f"{rank}.safetensors")
        assert torch.equal(found["gathered"], torch.cat(own))
        sums = [float(values.sum()) for values in own]
        assert [float(found[name]) for name in ("sum", "a:max", "b:min")] == [sum(sums), max(sums), min(sums)]
