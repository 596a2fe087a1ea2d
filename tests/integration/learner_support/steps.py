"""Updates that must leave nothing behind, and what a checkpoint must hold, on real ranks.

Started by torchrun: `steps.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as in `runs.py`. Nothing is asserted here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.learner.protocol import Learner, UpdateResult
from routing import ReplayProofError
from routing.replay.replay_pass import ReplayPass
from tests.integration.learner_support.conformance import build, refused, work
from tests.integration.learner_support.reachable import differences, reachable
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective


def compare(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Two learners after the same applied updates: one made updates in between that count for nothing, the other took
    over its checkpoint. What differs of all that can be reached from them is saved.
    """
    # Gradients of ZeRO 3 are not compared with those before.
    limit = {} if options.get("stage") == "3" else {"alignment_limit": 0.1}
    one, other = (build(checkpoint, options, lr=0.01, weight_decay=0.1, **limit) for _ in range(2))
    for _ in range(2):
        step(one)
    pieces, counters = one.state()
    (out / "state").mkdir(exist_ok=True)
    write_pieces(out / "state" / f"rank-{dist.get_rank()}.safetensors", pieces)
    dist.barrier()
    other.restore(PieceReader(sorted((out / "state").glob("*.safetensors"))), counters)

    empty = step(one, factor=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayPass, "choose", lambda _self, _layer, live, _recompute: live)
        stopped = refused(ReplayProofError, lambda: step(one, factor=3.0))
    results = [step(learner) for learner in (one, other)]
    facts = {
        "counters": [dict(counters), dict(other.state()[1])],
        "empty": [empty.is_empty, empty.applied, empty.grad_norm],
        "stopped": stopped,
        "norms": [result.grad_norm for result in results],
        "cosines": [result.cosine for result in results],
        "differences": differences(reachable(learner=one), reachable(learner=other)),
    }
    (out / f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))


def step(learner: Learner, factor: float = 1.0) -> UpdateResult:
    batches, routes, _ = work(learner)
    loss = objective(batches, [])
    result = learner.update(batches, routes, lambda i, current: factor * loss(i, current))
    learner.replay_report()
    if factor:
        learner.average("average", 0.5)
    return result


if __name__ == "__main__":
    do_runs(compare)
