"""Ranks of which one holds another number than the others: `replica_faults.py CHECKPOINT OUT RUN [RUN ...]`.

A RUN is as of `conformance.py`; `odd` is the rank that has the faults, 1 unless it is given. Each rank writes
`OUT/RUN/RANK.json`: what its learner said of its tensors after a step, and of each fault in turn, which is taken back.
Nothing is asserted here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.errors import ReplicaError
from moe_trm.learner.base import LearnerBase
from moe_trm.learner.megatron.optimizer import MegatronGuardedOptimizer
from routing.record.sources import Native
from tests.integration.learner_support.conformance import build, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective

KINDS = ("router", "norm", "experts", "embed", "q_norm", "proj")


def judgement(call: Callable[[], object]) -> str:
    """The error's text; empty where there is none."""
    try:
        call()
    except ReplicaError as error:
        return str(error)
    return ""


@torch.no_grad()
def change(tensor: Tensor, factor: float | None) -> Tensor:
    """Scale a tensor, or move its last number by one bit; returns what it was."""
    before = tensor.clone()
    if factor is not None:
        tensor.mul_(factor)
    else:
        tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    return before


def plant(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """One step, and then one fault after the other."""
    learner, is_odd = build(checkpoint, options), dist.get_rank() == int(options.get("odd", 1))
    assert isinstance(learner, LearnerBase)
    facts = {"loaded": judgement(learner.check_replicas)}
    batches, _, _ = work(learner)
    sources = [Native()] * len(batches)
    learner.update(batches, sources, objective(batches, []))
    facts["trained"] = judgement(learner.check_replicas)
    tensors = dict(learner._training.held())
    for kind in KINDS:
        # A stage of a pipeline may have no such tensor. It compares all the same, as its peers wait for it.
        tensor = next((tensor for name, tensor in tensors.items() if is_odd and kind in name), torch.zeros(1))
        for fault, factor in (("bit", None), ("tenth", 1.1)):
            before = change(tensor, factor)
            facts[f"{kind}, {fault}"] = judgement(learner.check_replicas)
            with torch.no_grad():
                tensor.copy_(before)
    facts["healed"] = judgement(learner.check_replicas)
    if options["backend"] == "megatron":
        norm = MegatronGuardedOptimizer._norm
        share = 1.0 + 0.01 * dist.get_rank()
        weights = {name: tensor.clone() for name, tensor in tensors.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MegatronGuardedOptimizer, "_norm", lambda self: share * norm(self))
            facts["norms"] = judgement(lambda: learner.update(batches, sources, objective(batches, [])))
        moved = [name for name, tensor in learner._training.held() if not torch.equal(tensor, weights[name])]
        facts["moved"] = ", ".join(moved)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    do_runs(plant)
