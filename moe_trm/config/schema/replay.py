"""Replay of the rollout in the learner: the sampled support and the experts' routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from moe_trm.config.schema.section import Count, Fraction, Positive, Section, bare_off

ReplayMode = Literal["none", "R2", "R3"]
"""The replay mode of a run, once `auto` is decided."""


class SamplingMaskConfig(Section):
    """Scoring of tokens over the support that the rollout really sampled from."""

    mode: Annotated[Literal["auto", "off", "keep"], BeforeValidator(bare_off)] = "auto"
    """`keep`: score every token over the ids that top-k, top-p and min-p kept at rollout.
    `off`: over the whole vocabulary. `auto`: `keep` where sampling is truncated or a rule needs the kept
    distribution, else `off`. Untruncated, `keep` would record up to 4,096 ids for every token."""
    violation: Literal["reject", "union", "drop"] = "reject"
    """A sampled token outside its own mask: `reject` the sample, score the `union` of mask and token, or `drop` the
    token from training. Always counted."""


class ReplayConfig(Section):
    """Source of the expert routes in the learner."""

    mode: Literal["none", "R2", "R3", "auto"] = "auto"
    """Source of the learner's expert routes: its own routers (`none`), the proximal pass (`R2`), the rollout (`R3`).
    `auto` becomes one of them on loading. With samples of any age, or 4 optimizer steps per rollout batch, it is R3;
    with 2 or 3 it is R2, or R3 where there is no proximal pass to freeze; with 1 it is none. `moe-trm config show` says
    which and why."""
    max_local_flip_rate: Fraction = 0.3
    """Share of replayed expert sets that may differ from the live router's own choice, in a layer and overall.
    Beyond it, or where one sample's sets differ far more often than its batch's, the live router is asked again
    without replay: misaligned rows or layers stop the run, and a router that has moved is counted as
    `routing/moved_samples`. 1: no bound, and none on the positions that sparse attention replays."""
    missing: Literal["reject", "native"] = "reject"
    """Samples with tokens that have no trustworthy routes, because weights changed while they were generated, or the
    engine ran out of cache and computed their routes again: `reject` them, or keep them and leave those tokens to the
    learner's own routers (`native`), counted as `replay/native_fraction`."""

    @property
    def stops_above(self) -> float:
        """`max_local_flip_rate` where replayed routes train; else 1, as a probe that replays them only measures."""
        return 1.0 if self.mode == "none" else self.max_local_flip_rate


class ProbeConfig(Section):
    """Measurement of what routing alone contributes to the mismatch."""

    every: Count = 10
    """Steps between probes, which score one batch with native and with replayed routes; 0: never."""
    tokens: Count = 8192
    """Scored tokens that a probe looks at. In a step with more, it is a random sample of whole rows, at least 32 and
    as many as are expected to hold these; figures then have a standard error (`_se`). They are the step's last
    minibatches where these hold little more, else drawn. The same rows are taken after a resumption. 0: all rows."""
    thorough_every: Positive = 4
    """Probes from one that makes further passes to the next, the first included: with rounded weights
    (`probe/cast_k3_kl` and its like), and of the first minibatch before its update
    (`update/first_nonzero_fraction`). 1: every probe makes them."""
    bank: Count = 0
    """Fixed texts that both engines score at probe steps and at the first step, so that a mismatch that rises with
    other weights (`bank/native_k3_kl` rises too) differs from one that rises with other texts. They are rows of the
    first step, one of each prompt as far as possible. 0: none."""
    save: bool = False
    """Keep the per-token probe arrays under `runs/NAME/probe/` for pooled statistics."""

    def uses_bank(self, step: int) -> bool:
        """True on steps that score the fixed texts."""
        return bool(self.bank and self.every) and (step == 1 or step % self.every == 0)
