"""Two updates that are told how far the routers have moved, on real ranks; the first moves them.

Started by torchrun: `router_shift.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as in `runs.py`. Nothing is asserted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from moe_trm.learner.protocol import Scores
from routing.record.router_shift import KEEP
from routing.record.sources import Record, ReplayRecorded, RouteSource
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective


def watch(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Shifts before and after a step, with routes of the rollout and of the learner."""
    learner = build(checkpoint, options, lr=0.02, eps=1e-8)
    batches, random, numbers = work(learner)
    kept = learner.score(batches, [replace(source, scores=KEEP) for source in random])
    r3 = [replace(source, scores=scores.router) for source, scores in zip(random, kept, strict=True)]
    own = learner.score(batches, [Record(KEEP) for _ in batches])
    r2 = [ReplayRecorded(scores.recorded, scores.router) for scores in own if scores.recorded is not None]
    found: dict[str, Tensor] = {}

    def update(name: str, sources: Sequence[RouteSource]) -> None:
        def seeing(index: int, current: Scores) -> Tensor:
            assert current.router_shift is not None
            found[f"{name}.{numbers[index]}"] = current.router_shift.clone()
            return objective(batches, [])(index, current)

        learner.update(batches, sources, seeing)

    update("still", r3)
    learner.export_checkpoint(str(out / "moved"))
    update("moved", r3)
    update("own", r2)
    plain = learner.score(batches, random)
    assert all(scores.router is None and scores.router_shift is None for scores in plain)
    save(out, "shifts", found)


if __name__ == "__main__":
    do_runs(watch)
