"""The loss scale of a float16 learner on real ranks.

Started by torchrun: `float16.py CHECKPOINT OUT RUN [RUN ...]`; see `runs.py`.

A RUN starts at a scale under which gradients overflow. Nothing is asserted here: results are saved for the tests to
judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.learner.protocol import Learner, UpdateResult
from moe_trm.sync.rounding import Rounding
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective

TRIES = 40


def scaled(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Steps on given routes, which no rounding changes, until one is applied, and two more.

    A second learner takes over what was saved before these two, and does the same two.
    """
    learner = build(checkpoint, options, lr=0.5, schedule="linear", decay_steps=4)
    batches, routes, numbers = work(learner)
    learner.export_shard(str(out / "before"), Rounding("float32"))
    seen: list[Tensor] = []
    scores = learner.score(batches, routes)
    tried = [learner.update(batches, routes, objective(batches, seen))]
    learner.export_shard(str(out / "refused"), Rounding("float32"))
    while not tried[-1].applied and len(tried) < TRIES:
        tried.append(step(learner))
    learner.export_shard(str(out / "applied"), Rounding("float32"))
    pieces, counters = learner.state()
    (out / "state").mkdir(exist_ok=True)
    write_pieces(out / "state" / f"rank-{dist.get_rank()}.safetensors", pieces)
    facts = told(tried, "tried") | told([step(learner), step(learner)], "more") | {"tries": len(tried)}
    learner.export_shard(str(out / "second"), Rounding("float32"))

    dist.barrier()
    resumed = build(checkpoint, options, lr=0.5, schedule="linear", decay_steps=4)
    resumed.restore(PieceReader(sorted((out / "state").glob("*.safetensors"))), counters)
    facts |= told([step(resumed), step(resumed)], "resumed")
    resumed.export_shard(str(out / "resumed"), Rounding("float32"))
    save(out, "facts", facts)
    save(out, "scores", {f"score.{n}": score.logprobs for n, score in zip(numbers, scores, strict=True)})
    save(out, "seen", {f"score.{n}": values for n, values in zip(numbers, seen, strict=True)})


def step(learner: Learner) -> UpdateResult:
    batches, routes, _ = work(learner)
    return learner.update(batches, routes, objective(batches, []))


def told(results: list[UpdateResult], kind: str) -> dict[str, Any]:
    return {
        f"{kind}.{i}.{name}": value
        for i, result in enumerate(results)
        for name, value in (("scale", result.loss_scale or 0), ("applied", result.applied), ("lr", result.lr))
    }


if __name__ == "__main__":
    do_runs(scaled)
