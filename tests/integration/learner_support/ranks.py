"""Runs a scenario of `scenarios.py` on real ranks under torchrun and reads back what they saved."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

SCENARIOS = Path(__file__).with_name("scenarios.py")


@dataclass(frozen=True)
class Ranks:
    """Finished ranks: `saved(name)` is what rank 0 (or another) saved under `name`."""

    folder: Path

    def saved(self, name: str, rank: int = 0) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}-{rank}.safetensors")

    def union(self, name: str, num_ranks: int) -> dict[str, Tensor]:
        """All ranks' tensors under `name`; each tensor is saved by one rank only."""
        parts = [self.saved(name, rank) for rank in range(num_ranks)]
        whole = {key: value for part in parts for key, value in part.items()}
        assert len(whole) == sum(map(len, parts))
        return whole


def run_ranks(folder: Path, checkpoint: Path, scenario: str, num_ranks: int, *options: str, limit_s: float = 120.0) -> Ranks:
    """Run `scenario` on `num_ranks` ranks; fails with their output when one of them does."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(SCENARIOS), scenario, str(checkpoint), str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return Ranks(folder)
