"""Gloo groups that share their devices: few threads, and sums as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys, json
from pathlib import Path
import torch, torch.distributed as dist
from moe_trm.runtime.gloo import share_gloo_device

rank, folder = int(sys.argv[1]), sys.argv[2]
share_gloo_device()
share_gloo_device()
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
groups = [dist.new_group([0, 1], backend="gloo") for _ in range(8)] + [dist.new_group([0]), dist.new_group([1])]
sums = []
for number, group in enumerate(groups):
    if rank in dist.get_process_group_ranks(group):
        value = torch.full((5,), float(10 * number + rank))
        dist.all_reduce(value, group=group)
        sums.append(value[0].item())
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(json.dumps({"sums": sums, "loops": names.count("gloo_tcp_loop")}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in Linux's /proc")
def test_ten_groups_have_one_loop_and_their_own_sums(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        for rank in (0, 1)
    ]
    found = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    shared = [20.0 * number + 1 for number in range(8)]
    assert [each["sums"] for each in found] == [[*shared, 80.0], [*shared, 91.0]]
    assert [each["loops"] for each in found] == [1, 1]
