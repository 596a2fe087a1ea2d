"""Routes of each pass: the table of replay modes.

| mode | behaviour pass | proximal pass | update passes and their recompute | native probe |
|---|---|---|---|---|
| none | native | native | native | native |
| R2   | native | native, recorded | the recorded routes, the first update included | native |
| R3   | the rollout's routes | the rollout's routes | the rollout's routes | native |

At age 0 the behaviour pass is the proximal pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_trm.config.schema import WITHOUT_ANCHOR_PASS, Recovery, ReplayMode
from moe_trm.learner.protocol import Scores
from moe_trm.ratios import LogRatios
from moe_trm.types import MiniBatch, TokenBatch
from routing.record.router_shift import RouterScores
from routing.record.sources import Native, Record, Recorded, ReplayRecorded, RouteSource


@dataclass(frozen=True)
class AnchoredMinibatch:
    """One minibatch with its anchors: padded micro-batches, their proximal scores, and whose routes the updates use.

    `scores` is empty where the first update's own forward is the anchor. `recovery` says what is known of the weights
    that sampled; `behavior`, with `snapshot`: `[B, R]` log-probs of each micro-batch under them. `version` is that of
    the learner's weights. `averaged`: the proximal scores come from an average of weights.

    `kl_coef`: the coefficient of the KL to the batches' `reference_logprobs` in the loss.
    """

    mini: MiniBatch
    batches: Sequence[TokenBatch]
    scores: Sequence[Scores]
    sources: Sequence[RouteSource]
    kl_coef: float = 0.0
    behavior: Sequence[Tensor] | None = None
    recovery: Recovery = "same"
    version: int = 0
    averaged: bool = False

    @property
    def scored(self) -> bool:
        """True when `scores` come from a pass at the learner's weights."""
        return bool(self.scores) and self.recovery not in WITHOUT_ANCHOR_PASS and not self.averaged

    def with_behavior(self, behavior: Sequence[Tensor]) -> AnchoredMinibatch:
        """The same with log-probs under the weights that sampled."""
        return replace(self, behavior=behavior)

    def ratios(self, index: int, current_logprobs: Tensor) -> LogRatios:
        """The decomposition for micro-batch `index` at `current_logprobs` `[B, R]`."""
        batch = self.batches[index]
        if self.recovery == "interpolate":
            proximal = interpolated(batch, current_logprobs, self.version)
            return LogRatios(batch.rollout_logprobs, None, current_logprobs, batch.mask, proximal, measured=False)
        if not self.scores:
            return LogRatios(batch.rollout_logprobs, current_logprobs.detach(), current_logprobs, batch.mask)
        behavior = None if self.behavior is None else self.behavior[index]
        return decomposed(
            self.recovery,
            rollout=batch.rollout_logprobs,
            behavior=behavior,
            proximal=self.scores[index].logprobs,
            current=current_logprobs,
            mask=batch.mask,
        )


def log_sequence_ratios(parts: Sequence[AnchoredMinibatch]) -> list[float]:
    """Log of the ratio of each of this rank's rows, policy at the step's start over rollout: sum over its tokens."""
    return [float(row_ratios.sum()) for row_ratios in log_token_ratios(parts)]


def log_token_ratios(parts: Sequence[AnchoredMinibatch]) -> list[Tensor]:
    """`[S]` float64 log-ratios of the scored tokens of each of this rank's rows, policy at the step's start over
    rollout.
    """
    return [
        row_ratios
        for part in parts
        for micro, batch, score in zip(part.mini.micro_batches, part.batches, part.scores, strict=True)
        for row_ratios in _by_row(score.logprobs - batch.rollout_logprobs, batch.mask)[: len(micro.rows)]
    ]


def _by_row(values: Tensor, mask: Tensor) -> Sequence[Tensor]:
    rows: Sequence[Tensor] = torch.split(values[mask].double(), mask.sum(1).tolist())
    return rows


def decomposed(
    recovery: Recovery, *, rollout: Tensor, behavior: Tensor | None, proximal: Tensor, current: Tensor, mask: Tensor
) -> LogRatios:
    """The decomposition that `recovery` lets be known, from log-probs `[B, R]`; `behavior` None: it is the proximal."""
    split = recovery in ("same", "snapshot")
    anchor = (proximal if behavior is None else behavior) if split else None
    return LogRatios(rollout, anchor, current, mask, proximal, measured=recovery not in WITHOUT_ANCHOR_PASS)


def interpolated(batch: TokenBatch, current_logprobs: Tensor, version: int) -> Tensor:
    """A-3PO's anchor without a pass: `[B, R]` rollout + alpha (sg[current] - rollout) in log-probs, alpha = age / (age
    + 1).

    The age is the `version` of the learner's weights at the step's start, minus the one that sampled the token: 0
    keeps the rollout's log-prob, and the older a token, the nearer its anchor is to the policy in training.
    Source: A-3PO (arXiv 2512.06547).

    When: `pipeline.behavior=interpolate`, where no pass under older weights is wanted.
    """
    age = (version - batch.versions).clamp(min=0).to(current_logprobs)
    rollout = batch.rollout_logprobs.to(current_logprobs)
    return rollout + age / (age + 1) * (current_logprobs.detach() - rollout)


def behavior_source(mode: ReplayMode, batch: TokenBatch, version: int) -> RouteSource:
    """Routes of a pass under the older weights of `version`."""
    return _rollout_routes(batch, judging(batch, version, others=True)) if mode == "R3" else Native()


def anchor_source(mode: ReplayMode, batch: TokenBatch, at_sampling: tuple[bool | None, ...] = ()) -> RouteSource:
    """Routes of the proximal pass, which at age 0 is the behaviour pass as well."""
    if mode == "R3":
        return _rollout_routes(batch, at_sampling)
    return Record() if mode == "R2" else Native()


def update_source(
    mode: ReplayMode, batch: TokenBatch, recorded: Recorded | None, at_sampling: tuple[bool | None, ...] = ()
) -> RouteSource:
    """Routes of every update pass of this batch; `recorded` is what the anchor pass recorded under R2."""
    if mode == "R3":
        return _rollout_routes(batch, at_sampling)
    if mode == "R2":
        assert recorded is not None, "R2 needs the proximal pass's recording"
        return ReplayRecorded(recorded)
    return Native()


def judging(batch: TokenBatch, version: int, *, others: bool) -> tuple[bool | None, ...]:
    """Rows that a pass at the weights of `version` judges (`ReplayRecords.at_sampling`).

    Rows that these weights sampled have no excuse. Rows of several versions have passes at none of their weights alone,
    and are judged with that of the newest. `others`: rows of other versions are judged by other passes of the step.
    """
    return tuple(
        True if oldest == version == newest else None if newest == version or not others else False
        for oldest, newest in batch.sampled_by
    )


def judged_before(batch: TokenBatch) -> tuple[bool | None, ...]:
    """No row: an earlier pass of the step has judged them all."""
    return (False,) * len(batch.routes)


def _rollout_routes(batch: TokenBatch, at_sampling: tuple[bool | None, ...]) -> RouteSource:
    return replace(batch.rollout_routes, at_sampling=at_sampling)


def watching(source: RouteSource, scores: RouterScores | None) -> RouteSource:
    """The source whose pass also keeps its routers' scores (`KEEP`), or compares them with `scores`; None: neither.

    Both passes have to use the same experts, so the live router's own choice is not watched.
    """
    if scores is None:
        return source
    assert not isinstance(source, Native), "router scores are compared at replayed experts"
    return replace(source, scores=scores)
