"""Whose routes each pass uses: the table of replay modes, and how `auto` chooses among them.

| mode | behaviour and proximal pass | update passes and their recompute | native probe |
|---|---|---|---|
| none | native | native | native |
| R2   | native, recorded | the recorded routes, the first update included | native |
| R3   | the rollout's routes | the rollout's routes | native |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moe_trm.learner.protocol import Scores
from moe_trm.types import MiniBatch, TokenBatch
from routing.replay import Native, Record, Recorded, ReplayRecorded, ReplayRecords, RouteSource

ReplayMode = Literal["none", "R2", "R3"]


@dataclass(frozen=True)
class Anchored:
    """One minibatch with its anchor: padded micro-batches, their behaviour scores, and whose routes the updates use.

    `reference`, with a KL term: `[B, R]` log-probs of each micro-batch under the frozen reference, and `kl_coef` the coefficient in the loss.
    """

    mini: MiniBatch
    batches: Sequence[TokenBatch]
    scores: Sequence[Scores]
    sources: Sequence[RouteSource]
    reference: Sequence[Tensor] | None = None
    kl_coef: float = 0.0


def resolve_mode(
    mode: Literal["none", "R2", "R3", "auto"], *, minibatches: int, max_age: int
) -> tuple[ReplayMode, str]:
    """The replay mode to run with, and why in one sentence.

    `auto` follows off-policiness (N = optimizer steps per rollout batch) and age: N = 1 at age 0: none; N = 2 or 3 at age 0: R2;
    N >= 4, or any age: R3.
    """
    if mode != "auto":
        return mode, f"replay.mode={mode} as configured"
    if max_age > 0:
        return (
            "R3",
            f"auto chose R3: samples may be {max_age} versions old, so the learner's own routes are not those that sampled",
        )
    if minibatches >= 4:
        return (
            "R3",
            f"auto chose R3: {minibatches} optimizer steps per rollout batch move the routers far from the rollout's",
        )
    if minibatches >= 2:
        return (
            "R2",
            f"auto chose R2: {minibatches} optimizer steps per fresh rollout batch; freezing the learner's own routes is enough",
        )
    return "none", "auto chose none: one optimizer step per fresh rollout batch is on-policy"


def anchor_source(mode: ReplayMode, batch: TokenBatch) -> RouteSource:
    """Routes of the behaviour pass, which at age 0 is the proximal pass as well."""
    if mode == "R3":
        return ReplayRecords(batch.routes)
    return Record() if mode == "R2" else Native()


def update_source(mode: ReplayMode, batch: TokenBatch, recorded: Recorded | None) -> RouteSource:
    """Routes of every update pass of this batch; `recorded` is what the anchor pass recorded under R2."""
    if mode == "R3":
        return ReplayRecords(batch.routes)
    if mode == "R2":
        assert recorded is not None, "R2 needs the proximal pass's recording"
        return ReplayRecorded(recorded)
    return Native()
