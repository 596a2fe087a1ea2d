"""Anchors of updates: log-probs under the weights of the step's start (proximal), and those that sampled (behaviour).

At age 0 the two are one pass. Older tokens are recovered by one of four routes:

| `pipeline.behavior` | behaviour | proximal | known ratios |
|---|---|---|---|
| snapshot | a pass under each version that sampled, from host memory | a pass | engine, lag, update |
| merged | - | a pass | merged (engine and lag in one), update |
| interpolate | - | rollout + age / (age + 1) (current - rollout) in log-probs | total; by definition, merged, update |
| bypass | the rollout's | the rollout's | total |

With `pipeline.proximal=average` the proximal pass is under an average of the weights of all steps so far
(`step.proximal_average`). Then it is never the behaviour pass, not even at age 0: lag is the distance of the average
from the weights that sampled, and may have either sign in time.

Where a minibatch is the first of its step and all its tokens have age 0, the forward of its update is that pass: same
weights, same routes, same micro-batches. It is not made twice, but where the probe asks for it
(`Probe.anchors_all`). Then `update/first_nonzero_fraction` shows that the two are equal, where the learner's passes
repeat their bits.

Source of `interpolate`: A-3PO (arXiv 2512.06547); with v_theta = proximal version + 1, alpha = (v_prox - v_b) /
(v_theta - v_b).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_trm.batch.collate import collate
from moe_trm.config.anchor_passes import scores_every_minibatch
from moe_trm.config.schema import WITHOUT_ANCHOR_PASS, Config, ReplayMode
from moe_trm.errors import ConfigError, LearnerError
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.learner.scoring import FED, on_device
from moe_trm.step import proximal_average
from moe_trm.step.cadence import Cadence
from moe_trm.step.labels import Labels
from moe_trm.step.mask_judge import MaskJudge
from moe_trm.step.passes import (
    AnchoredMinibatch,
    anchor_source,
    behavior_source,
    judged_before,
    judging,
    update_source,
    watching,
)
from moe_trm.step.proximal_average import ProximalAverage
from moe_trm.types import TokenBatch, TrainBatch
from routing.record.router_shift import KEEP
from routing.record.sources import RouteSource

GIB = 2**30
START = "start"
"""Snapshot of the weights at the start of a step whose minibatches arrive one after the other."""


class Anchors:
    """Scores the anchors of each step, and keeps the weights that sampled what is still to come.

    Args:
        mode: whose routes the passes use.
        reads_minibatch: rules or loss look at a complete minibatch before its update, and so need its anchors before.
        watches: whether updates are told how far the routers have moved since the anchors.
        first: version of the weights that the run began with.
        average: the proximal policy, where it is not the learner at the step's start.
        masks: is shown every pass at weights that may have sampled; None: masks are not judged.

    `labels`: judges the version labels of what it scores.
    """

    def __init__(
        self,
        config: Config,
        mode: ReplayMode,
        *,
        reads_minibatch: bool,
        watches: bool = False,
        first: int = 0,
        average: ProximalAverage | None = None,
        masks: MaskJudge | None = None,
    ) -> None:
        self._masks = masks
        self._watched = KEEP if watches else None
        self._mode, self._keep_mask = mode, config.keeps_masks
        self._pipeline = config.pipeline
        self._reuse = mode != "R2" and not (
            reads_minibatch
            or watches
            or scores_every_minibatch(config.record, config.learner, config.optimizer, config.kl, config.advantage)
        )
        self._recovery = config.pipeline.recovery
        self._average = average
        # A live engine samples anew after a resumption; a recording gives again what older weights sampled.
        self._saved = not config.rollout.traits.samples_live
        # A recording may be of a run that began between two pushes.
        self._cadence = Cadence(1 if self._saved else config.pipeline.push_every, first, config.train.steps)
        self._kept: list[int] = []
        self.labels = Labels()
        self._streams, self._start = config.pipeline.stream and config.learner.minibatches > 1, START

    def score(
        self, learner: Learner, batch: TrainBatch, *, moved: bool = False, score_all: bool = False
    ) -> list[AnchoredMinibatch]:
        """The minibatches of a step or of a part of it, with anchors, in exactly the micro-batches of the updates.

        `moved`: an earlier part of the step was trained already. The anchors of this one are those of the step's start
        all the same. `score_all`: every minibatch has a pass, the first one too. Collective.
        """
        if not moved:
            self._begin(learner, batch.step - 1)
        start_snapshot = self._start if moved else None
        padded = [
            [
                on_device(collate(micro, keep_mask=self._keep_mask), learner.device, stay=FED)
                for micro in mini.micro_batches
            ]
            for mini in batch.mini_batches
        ]
        if self._average is not None:
            return self._averaged(learner, batch, padded, start_snapshot)
        if self._recovery in WITHOUT_ANCHOR_PASS:
            proximal = [[Scores(item.rollout_logprobs) for item in part] for part in padded]
            return self._with_anchors(batch, padded, proximal)
        skipped = int(not (moved or score_all) and self._first_forward_suffices(batch))
        scores = iter(self._pass(learner, padded[skipped:], batch.step - 1, weights=start_snapshot))
        proximal = [[next(scores) for _ in part] if number >= skipped else [] for number, part in enumerate(padded)]
        minibatches = self._with_anchors(batch, padded, proximal)
        if self._recovery == "snapshot":
            return self._with_behavior(learner, batch, minibatches, [score for part in proximal for score in part])
        return minibatches

    def state(self) -> list[int]:
        """Versions whose weights are in the learner's saved state."""
        return self._kept if self._saved else []

    def restore(self, state: list[int]) -> None:
        """Go on after `state`, once the learner has been restored."""
        self._kept = list(state)

    def _averaged(
        self, learner: Learner, batch: TrainBatch, padded: Sequence[list[TokenBatch]], start: str | None
    ) -> list[AnchoredMinibatch]:
        """Anchors under the average, and the behaviour log-probs beside them where they are known apart."""
        scores = self._pass(learner, padded, None, weights=proximal_average.NAME)
        remaining = iter(scores)
        minibatches = self._with_anchors(batch, padded, [[next(remaining) for _ in part] for part in padded])
        if self._recovery == "merged":
            return minibatches
        # Where nothing was sampled by the learner's own weights, no token keeps what it begins with.
        version = batch.step - 1
        start_scores = self._pass(learner, padded, version, weights=start) if version in batch.versions else scores
        return self._with_behavior(learner, batch, minibatches, start_scores)

    def _pass(
        self,
        learner: Learner,
        padded: Sequence[list[TokenBatch]],
        version: int | None,
        *,
        weights: str | None = None,
    ) -> list[Scores]:
        """Scores under `weights`, which are those of `version`; None: no version's."""
        flat = [item for part in padded for item in part]
        judges_others = self._recovery in ("same", "snapshot")
        rows = [
            judging(item, version, others=judges_others)
            if version is not None
            else judged_before(item)
            if judges_others
            else ()
            for item in flat
        ]
        sources = [
            watching(anchor_source(self._mode, item, at), self._watched) for item, at in zip(flat, rows, strict=True)
        ]
        if version is None:
            return learner.score(flat, sources, weights=weights)
        return self._judged_pass(learner, flat, sources, version, weights)

    def _judged_pass(
        self,
        learner: Learner,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        version: int,
        weights: str | None,
    ) -> list[Scores]:
        """Scores under the weights of `version`, which judge the masks that these sampled."""
        scores = learner.score(batches, sources, weights=weights, kept_mass=self._masks is not None)
        if self._masks is not None:
            for item, scored in zip(batches, scores, strict=True):
                self._masks.observe(item, scored, version)
        return scores

    def _with_anchors(
        self, batch: TrainBatch, padded: Sequence[list[TokenBatch]], proximal: Sequence[list[Scores]]
    ) -> list[AnchoredMinibatch]:
        minibatches = []
        for mini, part, scores in zip(batch.mini_batches, padded, proximal, strict=True):
            kept = [(score.recorded, score.router) for score in scores] or [(None, None)] * len(part)
            sources = [
                watching(update_source(self._mode, item, source, self._judged(item, batch.step - 1, scores)), router)
                for item, (source, router) in zip(part, kept, strict=True)
            ]
            minibatches.append(
                AnchoredMinibatch(
                    mini,
                    part,
                    scores,
                    sources,
                    recovery=self._recovery,
                    version=batch.step - 1,
                    averaged=self._average is not None,
                )
            )
        return minibatches

    def _judged(self, item: TokenBatch, version: int, scores: Sequence[Scores]) -> tuple[bool | None, ...]:
        """Rows that the update passes judge: all where their own forward is the first pass, else none."""
        if not scores:
            return judging(item, version, others=False)
        return () if self._recovery in WITHOUT_ANCHOR_PASS else judged_before(item)

    def _with_behavior(
        self,
        learner: Learner,
        batch: TrainBatch,
        minibatches: Sequence[AnchoredMinibatch],
        start_scores: Sequence[Scores],
    ) -> list[AnchoredMinibatch]:
        """The minibatches with `[B, R]` log-probs of each micro-batch under the weights that sampled each token.

        `start_scores`: scores at the learner's weights. Every rank makes the same passes.
        """
        flat = [item for part in minibatches for item in part.batches]
        logprobs = [scores.logprobs for scores in start_scores]
        by_version = {batch.step - 1: logprobs}
        for old in [number for number in batch.versions if number != batch.step - 1]:
            sources = [behavior_source(self._mode, item, old) for item in flat]
            if old not in self._kept:
                raise LearnerError(
                    "the weights that sampled this step's tokens are not in the checkpoint that the run went on from",
                    where=f"step {batch.step}",
                    got=f"tokens of version {old}",
                    expected=f"one of {[*self._kept]}",
                    fix="Begin anew with checkpoint.resume=never, or set pipeline.behavior to merged or bypass.",
                )
            old_scores = self._judged_pass(learner, flat, sources, old, snapshot_name(old))
            by_version[old] = [scores.logprobs for scores in old_scores]
            logprobs = [
                torch.where(item.versions == old, scores.logprobs, start_scores)
                for item, scores, start_scores in zip(flat, old_scores, logprobs, strict=True)
            ]
        # Under an average no pass need have the weights of the step's start.
        if len(by_version) > 1 and self._average is None:
            self.labels.observe(flat, by_version, batch.step - 1)
        remaining = iter(logprobs)
        return [part.with_behavior([next(remaining) for _ in part.batches]) for part in minibatches]

    def _first_forward_suffices(self, batch: TrainBatch) -> bool:
        return self._reuse and batch.versions == (batch.step - 1,) and self._recovery == "same"

    def _begin(self, learner: Learner, version: int) -> None:
        """Everything that is kept of the weights at the start of a step."""
        self._keep(learner, version)
        if self._average is not None:
            self._average.absorb(learner)
        if self._streams:
            self._start = snapshot_name(version) if version in self._kept else START
            if self._start == START:
                learner.snapshot(START)

    def _keep(self, learner: Learner, version: int) -> None:
        """Snapshots of the versions that may still come back as behaviour."""
        if self._recovery != "snapshot":
            return
        bound = self._pipeline.staleness_limit
        if self._cadence.pushes(version):
            num_bytes = learner.snapshot(snapshot_name(version), saved=self._saved)
            self._kept.append(version)
            self._check_room(num_bytes, self._cadence.held(bound))
        while self._kept and self._kept[0] < version - bound:
            learner.forget(snapshot_name(self._kept.pop(0)))

    def _check_room(self, num_bytes: int, versions: int) -> None:
        needed = num_bytes * versions / GIB
        if needed > self._pipeline.snapshot_gib:
            raise ConfigError(
                "the weights of all versions that may have sampled do not fit into the memory given to them",
                where="pipeline.snapshot_gib",
                got=f"{self._pipeline.snapshot_gib:g} GiB for {versions} versions on a rank",
                expected=f"{needed:.3g} GiB",
                fix="raise it, lower pipeline.max_staleness, or set pipeline.behavior to merged, interpolate or bypass",
            )


def snapshot_name(version: int) -> str:
    """Name of the snapshot of the weights of `version`."""
    return f"behavior-{version}"
