"""Ranks that load a published checkpoint and write it back: `published.py CHECKPOINT OUT [EXPERT_PARALLEL]`.

What each rank read is saved for the test to judge: bytes of tensors that were alive at once, and in all.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.megatron import build
from moe_trm.learner.megatron.model import global_tensors
from tests.integration.learner_support.groups import leave_groups


class Counting(HfCheckpoint):
    """Counts the bytes of what it has read and what of it still exists."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.read_bytes = self.alive = self.most = 0

    def plain(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        return self._counted(super().plain(name, parts))

    def _counted(self, tensor: Tensor) -> Tensor:
        self.read_bytes += tensor.nbytes
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def main(checkpoint: str, out: Path, expert: int) -> None:
    leave_groups()
    made = list[Counting]()

    def counting(folder: str | Path) -> Counting:
        made.append(Counting(folder))
        return made[0]

    vars(build)["HfCheckpoint"] = counting
    config = {
        "model": {"checkpoint": checkpoint},
        "learner": {"parallel": {"expert": expert}, "dtype": "bfloat16"},
        "train": {"export_form": "published"},
    }
    learner = build.build_megatron_learner(Config.model_validate(config))
    [source] = made
    facts = {
        "read_bytes": source.read_bytes,
        "most_bytes": source.most,
        "own_bytes": sum(tensor.nbytes for _, tensor in global_tensors(learner._chunks)),
        "layers": list(learner.model_moe_layer_ids),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
    learner.export_checkpoint(str(out / "published"))
    build.close_learner()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
