"""Ranks that load a published checkpoint and write it back:
`published.py CHECKPOINT OUT EXPERT_PARALLEL [BACKEND]`.

What each rank read is saved for the test to judge: bytes of tensors that were alive at once, and in all.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.learner.hf_checkpoint import HfCheckpoint


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


def megatron(checkpoint: str, out: Path, expert: int) -> None:
    """Build on Megatron-Core, save what was read, and export in the published form."""
    from moe_trm.learner.megatron import build
    from moe_trm.learner.megatron.model import global_tensors
    from tests.integration.learner_support.groups import leave_groups

    leave_groups()
    made = counting(build)
    learner = build.build_megatron_learner(config(checkpoint, parallel={"expert": expert}))
    own = sum(tensor.nbytes for _, tensor in global_tensors(learner._chunks))
    save(out, made[0], own_bytes=own, layers=list(learner.model_moe_layer_ids))
    learner.export_checkpoint(str(out / "published"))
    build.close_learner()


def deepspeed(checkpoint: str, out: Path) -> None:
    """The same on ZeRO-3, with the most bytes of whole parameters beside the one that is read."""
    from moe_trm.learner.deepspeed import build, partitioned

    made, read_into, beside = counting(build), partitioned.read_into, [0]

    def watched(whole: Tensor, causal: Any, name: str, source: HfCheckpoint) -> None:
        held = [one for key, one in causal.named_parameters() if key != name]
        beside.append(sum(one.untyped_storage().nbytes() for one in held if one.untyped_storage().nbytes() > 16))
        read_into(whole, causal, name, source)

    vars(partitioned)["read_into"] = watched
    learner = build.build_deepspeed_learner(config(checkpoint, backend="deepspeed", deepspeed={"zero_stage": 3}))
    parameters = list(learner._engine.module.parameters())
    own = sum(one.ds_tensor.nbytes for one in parameters)
    largest = max(one.ds_numel * one.ds_tensor.element_size() for one in parameters)
    save(out, made[0], own_bytes=own, beside_bytes=max(beside), parameter_bytes=largest)
    learner.export_checkpoint(str(out / "published"))
    build.close_learner()


def counting(build: Any) -> list[Counting]:
    """Let `build` read through `Counting`; what it made is in the list then."""
    made = list[Counting]()

    def make(folder: str | Path) -> Counting:
        made.append(Counting(folder))
        return made[0]

    vars(build)["HfCheckpoint"] = make
    return made


def config(checkpoint: str, **learner: Any) -> Config:
    settings = {"learner": {"dtype": "bfloat16", **learner}, "train": {"export_form": "published"}}
    return Config.model_validate({"model": {"checkpoint": checkpoint}, **settings})


def save(out: Path, source: Counting, **facts: Any) -> None:
    out.mkdir(parents=True, exist_ok=True)
    facts |= {"read_bytes": source.read_bytes, "most_bytes": source.most}
    (out / f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))


def main(checkpoint: str, out: Path, expert: int, backend: str = "megatron") -> None:
    if backend == "deepspeed":
        deepspeed(checkpoint, out)
    else:
        megatron(checkpoint, out, expert)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
