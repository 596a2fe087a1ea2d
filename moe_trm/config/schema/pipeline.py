"""Overlap of generation and training, and selection of the samples that are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_trm.config.schema.section import Count, Section


class BatchConfig(Section):
    """Selection of the valid samples that are trained, and how they are forwarded."""

    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose samples all have the same reward, and so no advantage: train them without effect (`keep`), or
    `drop` them and issue other prompts in their place (dynamic sampling). Worth trying when
    `reward/zero_variance_groups` is high."""
    overlong: Literal["keep", "drop", "mask"] = "keep"
    """Samples cut off at `rollout.max_new_tokens`. `keep`: train them as they were rewarded. `drop`: drop
    them before their group is compared. `mask`: they count in the group's mean and in the denominators,
    but their own advantage is 0."""
    layout: Literal["padded", "packed"] = "padded"
    """What the learner forwards. `padded`: rows as long as the longest of their micro-batch. `packed`: their tokens one
    after the other, without padding; micro-batches then have like numbers of tokens, and `learner.micro_batch_tokens`
    counts real ones. Both compute the same. Try it where `batch/padding_fraction` is high."""
    refill_limit: Annotated[float, Field(ge=1)] = 3.0
    """Prompts issued for one step at most, as a multiple of `rollout.prompts_per_step`. At that limit the step trains
    what it has. 1: nothing is refilled."""


Recovery = Literal["same", "snapshot", "interpolate", "merged", "bypass"]
"""Relation of the weights that sampled to the learner's: the same (`same`), or as `pipeline.behavior` recovers it."""


class PipelineConfig(Section):
    """Overlap of generation and training."""

    mode: Literal["sync", "one_step", "async"] = "sync"
    """`sync`: sample, train, push, in turn; every token is on-policy at the start of its step. `one_step`: the next
    step's batch is sampled while this one trains, one version behind. `async`: sampling runs on, up to
    `pipeline.max_staleness` versions behind."""
    max_staleness: Count | None = None
    """Bound on the age of every trained token (eta): the learner's version minus the one that sampled it. Older groups
    are dropped and counted. None: 0 for `sync`, 1 for `one_step`, 2 for `async`. A larger bound hides longer answers
    but makes training more off-policy; 1 to 4 is usual."""

    partial: Literal["wait", "interrupt"] = "wait"
    """Effect of a weight push on samples that are being generated: `wait` for them, or `interrupt` them and continue
    each with the new weights from where it was. Interrupted samples span versions; every token keeps its own, and the
    routes of the weights that sampled it. Pays where answers differ much in length."""

    behavior: Literal["snapshot", "interpolate", "merged", "bypass"] = "snapshot"
    """Recovery of log-probs under older weights. `snapshot`: a pass under each version that sampled, kept in host
    memory; engine mismatch and lag are known apart. `merged`: none; the two are one ratio. `interpolate` (A-3PO): no
    anchor pass either; the anchor lies between rollout and current, nearer to current the older the token. `bypass`:
    the rollout's own log-probs are the anchor. No effect with `mode=sync`."""
    snapshot_gib: Annotated[float, Field(gt=0)] = 64.0
    """`behavior=snapshot`: host memory for weights on one rank, GiB. They take `max_staleness` + 1 times the rank's
    share of the weights. The run stops before its first update if that is more."""

    @property
    def recovery(self) -> Recovery:
        """`behavior` where samples may be stale, else `same`."""
        return self.behavior if self.staleness_limit else "same"

    @property
    def staleness_limit(self) -> int:
        """`max_staleness`, or the mode's default."""
        return (
            self.max_staleness if self.max_staleness is not None else {"sync": 0, "one_step": 1, "async": 2}[self.mode]
        )
