"""Anchors of updates: log-probs under the weights of the step's start (proximal), and those that sampled (behaviour).

At age 0 the two are one pass. Older tokens are recovered by one of four routes:

| `pipeline.behavior` | behaviour | proximal | known ratios |
|---|---|---|---|
| snapshot | a pass under each version that sampled, from host memory | a pass | engine, lag, update |
| merged | - | a pass | merged (engine and lag in one), update |
| interpolate | - | rollout + age / (age + 1) (current - rollout) in log-probs | total; by definition, merged, update |
| bypass | the rollout's | the rollout's | total |

Where a minibatch is the first of its step and all its tokens have age 0, its update's own forward is that pass: same
weights, same routes, same micro-batches. It is not made twice, but on steps with a probe, where
`update/first_nonzero_fraction` shows that the two are equal.

Source of `interpolate`: A-3PO (arXiv 2512.06547); with v_theta = proximal version + 1, alpha = (v_prox - v_b) /
(v_theta - v_b).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_trm.batch.collate import collate
from moe_trm.config.schema import Config, ReplayMode
from moe_trm.errors import ConfigError, LearnerError
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.step.passes import Anchored, anchor_source, behavior_source, update_source, watching
from moe_trm.types import TokenBatch, TrainBatch
from routing.router_shift import KEEP

GIB = 2**30


class Anchors:
    """Scores the anchors of each step, and keeps the weights that sampled what is still to come.

    Args:
        config: the run's configuration.
        mode: whose routes the passes use.
        whole: whether rules or loss look at a whole minibatch before its update, and so need its anchors before.
        watches: whether updates are told how far the routers have moved since the anchors.
    """

    def __init__(self, config: Config, mode: ReplayMode, *, whole: bool, watches: bool = False) -> None:
        self._watched = KEEP if watches else None
        self._mode, self._keep_mask = mode, config.keeps_masks
        self._pipeline = config.pipeline
        elsewhere = (
            whole
            or watches
            or config.record.bundle
            or (config.kl.coef > 0 and config.kl.where == "reward")
            or config.optimizer.ess_scale != "off"
            or ADVANTAGES[config.advantage.name].reads_ratios
        )
        self._reuse = mode != "R2" and config.learner.epochs == 1 and not elsewhere
        self._probe_every = config.probe.every
        self._recovery = config.pipeline.recovery
        # A live engine samples anew after a resumption; a recording gives again what older weights sampled.
        self._saved = not config.rollout.traits.samples_live
        self._kept: list[int] = []

    def score(self, learner: Learner, batch: TrainBatch) -> list[Anchored]:
        """The minibatches of a step with their anchors, in exactly the micro-batches that the updates will use.

        Collective.
        """
        version = batch.step - 1
        self._keep(learner, version)
        padded = [
            [collate(micro, keep_mask=self._keep_mask) for micro in mini.micro_batches] for mini in batch.mini_batches
        ]
        if self._recovery in ("interpolate", "bypass"):
            proximal = [[Scores(item.rollout_logprobs) for item in part] for part in padded]
            return self._anchored(batch, padded, proximal)
        skipped = int(self._own_forward_suffices(batch))
        flat = [item for part in padded[skipped:] for item in part]
        sources = [watching(anchor_source(self._mode, item), self._watched) for item in flat]
        passed = iter(learner.score(flat, sources))
        proximal = [[next(passed) for _ in part] if number >= skipped else [] for number, part in enumerate(padded)]
        anchored = self._anchored(batch, padded, proximal)
        if self._recovery == "snapshot":
            behavior = iter(self._behavior(learner, batch, version, padded, proximal))
            return [part.with_behavior([next(behavior) for _ in part.batches]) for part in anchored]
        return anchored

    def state(self) -> list[int]:
        """Versions whose weights are in the learner's saved state."""
        return self._kept if self._saved else []

    def restore(self, state: list[int]) -> None:
        """Go on after `state`, once the learner has been restored."""
        self._kept = list(state)

    def _anchored(
        self, batch: TrainBatch, padded: Sequence[list[TokenBatch]], proximal: Sequence[list[Scores]]
    ) -> list[Anchored]:
        anchored = []
        for mini, part, scores in zip(batch.mini_batches, padded, proximal, strict=True):
            kept = [(score.recorded, score.router) for score in scores] or [(None, None)] * len(part)
            sources = [
                watching(update_source(self._mode, item, own), router)
                for item, (own, router) in zip(part, kept, strict=True)
            ]
            anchored.append(Anchored(mini, part, scores, sources, recovery=self._recovery, version=batch.step - 1))
        return anchored

    def _behavior(
        self,
        learner: Learner,
        batch: TrainBatch,
        version: int,
        padded: Sequence[list[TokenBatch]],
        proximal: Sequence[list[Scores]],
    ) -> list[Tensor]:
        """`[B, R]` log-probs of each micro-batch under the weights that sampled each token.

        Every rank makes the same passes.
        """
        flat = [item for part in padded for item in part]
        found = [scores.logprobs for part in proximal for scores in part]
        for old in [number for number in batch.versions if number != version]:
            sources = [behavior_source(self._mode, item) for item in flat]
            if old not in self._kept:
                raise LearnerError(
                    "the weights that sampled this step's tokens are not in the checkpoint that the run went on from",
                    where=f"step {batch.step}",
                    got=f"tokens of version {old}",
                    expected=f"one of {[*self._kept]}",
                    fix="Begin anew with checkpoint.resume=never, or set pipeline.behavior to merged or bypass.",
                )
            passed = learner.score(flat, sources, weights=snapshot_name(old))
            found = [
                torch.where(item.versions.to(own.device) == old, scores.logprobs, own)
                for item, scores, own in zip(flat, passed, found, strict=True)
            ]
        return found

    def _own_forward_suffices(self, batch: TrainBatch) -> bool:
        probed = self._probe_every and batch.step % self._probe_every == 0
        return self._reuse and not probed and batch.versions == (batch.step - 1,) and self._recovery == "same"

    def _keep(self, learner: Learner, version: int) -> None:
        """Snapshots of the versions that may still come back as behaviour."""
        if self._recovery != "snapshot":
            return
        num_bytes = learner.snapshot(snapshot_name(version), saved=self._saved)
        self._kept.append(version)
        needed = num_bytes * (self._pipeline.staleness_limit + 1) / GIB
        if needed > self._pipeline.snapshot_gib:
            raise ConfigError(
                "the weights of all versions that may have sampled do not fit into the memory given to them",
                where="pipeline.snapshot_gib",
                got=f"{self._pipeline.snapshot_gib:g} GiB for {self._pipeline.staleness_limit + 1} versions on a rank",
                expected=f"{needed:.3g} GiB",
                fix="raise it, lower pipeline.max_staleness, or set pipeline.behavior to merged, interpolate or bypass",
            )
        while self._kept[0] < version - self._pipeline.staleness_limit:
            learner.forget(snapshot_name(self._kept.pop(0)))


def snapshot_name(version: int) -> str:
    """Name of the snapshot of the weights of `version`."""
    return f"behavior-{version}"
