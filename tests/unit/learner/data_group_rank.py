"""One rank of a data-parallel group: `data_group_rank.py OUT RANK WORLD`. Each rank has rows of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from moe_trm.learner.data_group import DataGroup


def rows(rank: int) -> torch.Tensor:
    """Values of as many rows as no other rank has."""
    return torch.arange(3 * rank + 1, dtype=torch.float32) + 100 * rank


def main() -> None:
    out, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    group = DataGroup(dist.group.WORLD, torch.device("cpu"))
    reduced = group.reduce({name: rows(rank).sum() for name in ("sum", "a:max", "b:min")})
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in reduced.items()}
    save_file({**found, "gathered": group.gather(rows(rank))}, out / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
