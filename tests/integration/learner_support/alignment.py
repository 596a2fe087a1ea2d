"""Three updates at still weights under a limit on the cosine of consecutive gradients, on real ranks.

Started by torchrun: `alignment.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as in `runs.py`. The second update has
the gradient of the first, the third another. Nothing is asserted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from moe_trm.learner.protocol import Scores
from moe_trm.sync.rounding import Rounding
from routing.record.sources import Native
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective, squares

LIMIT = 0.1


def align(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Norm and cosine of each update; the weights after the third, which alone moved them."""
    limit = float(options.get("limit", LIMIT))
    learner = build(checkpoint, options, lr=0.0, alignment_limit=limit)
    facts: dict[str, Any] = {"stops_above": learner._replayer.max_local_flip_rate}  # type: ignore[attr-defined]
    batches, _, _ = work(learner)
    native = [Native()] * len(batches)
    learner.export_shard(str(out / "before"), Rounding("float32"))

    def other(index: int, current: Scores) -> Tensor:
        return squares(batches[index], current)

    for number, loss in enumerate((objective(batches, []), objective(batches, []), other)):
        result = learner.update(batches, native, loss)
        facts |= {f"norm.{number}": result.grad_norm, f"applied.{number}": result.applied}
        facts |= {} if result.cosine is None else {f"cosine.{number}": result.cosine}
    # A gradient that is not finite is neither applied nor remembered: the next is compared with the one before it.
    broken = learner.update(batches, native, lambda i, x: objective(batches, [])(i, x) * float("nan"))
    facts |= {"broken": broken.cosine is None, "broken_applied": broken.applied}
    again = learner.update(batches, native, other)
    facts |= {"norm.4": again.grad_norm, "cosine.4": again.cosine}
    learner.export_shard(str(out / "after"), Rounding("float32"))
    save(out, "facts", facts)


if __name__ == "__main__":
    do_runs(align)
