"""Runs scenarios on real ranks and reads back what they saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.integration.ranks import fork_ranks

SCENARIOS = Path(__file__).with_name("scenarios.py")


@dataclass(frozen=True)
class Ranks:
    """The results of finished ranks, by run and name."""

    folder: Path
    num_ranks: int

    def saved(self, run: str, name: str, rank: int = 0) -> dict[str, Tensor]:
        """The result that one rank saved under `name`."""
        return load_file(self.folder / run / f"{name}-{rank}.safetensors")

    def union(self, run: str, name: str) -> dict[str, Tensor]:
        """The results of all ranks under `name`, where each key is saved by one rank only."""
        return _disjoint([self.saved(run, name, rank) for rank in range(self.num_ranks)])

    def exported(self, run: str, name: str) -> dict[str, Tensor]:
        """The Hugging Face tensors of an exported folder; no tensor was written twice."""
        return _disjoint([load_file(path) for path in sorted((self.folder / run / name).glob("*.safetensors"))])


def _disjoint(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    whole = {key: value for part in parts for key, value in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


def run_ranks(folder: Path, checkpoint: Path, num_ranks: int, *runs: str, script: Path = SCENARIOS) -> Ranks:
    """Do `runs` of `script` on `num_ranks` ranks one after the other; fails with their output when one fails."""
    done = fork_ranks([str(script), str(checkpoint), str(folder), *runs], num_ranks)
    assert done.ok, f"{script.name} {runs}: {done.statuses}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return Ranks(folder, num_ranks)
