"""Overlap of generation and training, and selection of the samples that are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_trm.config.schema.section import Count, Decay, Fraction, Positive, Section


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
    layout: Literal["padded", "packed", "auto"] = "auto"
    """The learner's input. `padded`: rows as long as the longest of their micro-batch. `packed`: their tokens one
    after the other, without padding; micro-batches then have like numbers of tokens, and `learner.micro_batch_tokens`
    counts real ones. Both compute the same. `auto`: `packed` where that has been proved, which is on machines without
    CUDA, else `padded`. A run that goes on from a checkpoint of padded rows keeps them."""
    refill_limit: Annotated[float, Field(ge=1)] = 3.0
    """Prompts issued for one step at most, as a multiple of `rollout.prompts_per_step`. At that limit the step trains
    what it has. 1: nothing is refilled."""


Recovery = Literal["same", "snapshot", "interpolate", "merged", "bypass"]
"""Relation of the weights that sampled to the learner's: the same (`same`), or as `pipeline.behavior` recovers it."""

WITHOUT_ANCHOR_PASS: tuple[Recovery, ...] = ("interpolate", "bypass")
"""Those whose proximal policy is no pass of the learner."""


class PipelineConfig(Section):
    """Overlap of generation and training."""

    mode: Literal["sync", "one_step", "async", "periodic"] = "sync"
    """`sync`: sample, train, push, in turn; every token is on-policy at the start of its step. `one_step`: the next
    step's batch is sampled while this one trains, one version behind. `async`: sampling runs on, up to
    `pipeline.max_staleness` versions behind. `periodic`: the batches of `pipeline.push_every` steps are sampled
    together, trained one after the other as they are there, and then weights are pushed."""
    push_every: Positive = 1
    """Training steps between two pushes of weights (k). More saves transfers and makes samples older: age counts the
    learner's versions, one for each step, whether they were pushed or not."""
    max_staleness: Count | None = None
    """Bound on the age of every trained token (eta): the learner's version minus the one that sampled it. Older groups
    are dropped and counted. None: 0 for `sync` and `periodic`, 1 for `one_step`, 2 for `async`, and
    `pipeline.push_every` - 1 more. A larger bound hides longer answers but makes training more off-policy; 1 to 4 is
    usual."""
    rolling_push: bool = False
    """Several servers (`rollout.urls`) get new weights one after the other. The others go on sampling with the version
    before until it is their turn, so that two versions are served side by side. False: all at once, each as soon as
    what it samples has ended."""

    stream: bool = False
    """Minibatches are the groups of a step in the order of issue, and each trains as soon as its groups are there,
    while the rest of the step is still being sampled. Anchors are taken at the step's start in any case, so what is
    trained does not depend on when groups arrive. False: a step begins when its batch is whole, which is shuffled into
    its minibatches."""

    partial: Literal["wait", "interrupt"] = "wait"
    """Effect of a weight push on samples that are being generated: `wait` for them, or `interrupt` them and continue
    each with the new weights from where it was. Interrupted samples span versions; every token keeps its own, and the
    routes of the weights that sampled it. Pays where answers differ much in length."""

    behavior: Literal["snapshot", "interpolate", "merged", "bypass"] = "snapshot"
    """Recovery of log-probs under older weights. `snapshot`: a pass under each version that sampled, kept in host
    memory; engine mismatch and lag are known apart. `merged`: none; the two are one ratio. `interpolate` (A-3PO): no
    anchor pass either; the anchor lies between rollout and current, nearer to current the older the token. `bypass`:
    the rollout's own log-probs are the anchor. No effect where nothing is stale."""
    snapshot_gib: Annotated[float, Field(gt=0)] = 64.0
    """`behavior=snapshot`: host memory for weights on one rank, GiB. They take the rank's share of the weights once
    for every pushed version within the bound, `max_staleness` + 1 times at most. The run stops before its first
    update if that is more."""
    proximal: Literal["start", "average"] = "start"
    """Weights of the proximal policy, against which updates are clipped: the learner's when the step began (`start`),
    or an exponentially weighted average over all steps so far (`average`, PPO-EWMA). The average costs two
    copies of the weights in host memory, and one more pass where `behavior` splits the ratio."""
    proximal_decay: Decay = 0.889
    """`proximal=average`: factor by which the share of a step's weights shrinks with each further step, so that about
    1 / (1 - decay) steps count. The default comes from the paper, whose steps are optimizer steps."""

    reuse_groups: Count = 0
    """Groups of earlier steps that each step trains again, beside its `rollout.prompts_per_step` new ones. They are
    drawn from those within the bound on age, younger ones more often. 0: every sample trains in one step."""
    max_uses: Annotated[int, Field(ge=2)] = 2
    """`reuse_groups`: steps in which a sample trains at most, the first one included."""
    reuse_tau: Annotated[float, Field(gt=0)] = 1.0
    """`reuse_groups`: a group is drawn by exp(-age / tau), where age counts versions since its oldest token.
    A large tau draws evenly."""
    reuse_priority: Literal["age", "spread"] = "age"
    """`reuse_groups`: what besides its age makes a group likelier. `age`: nothing. `spread`: the standard deviation of
    its rewards, by which the chance is multiplied: groups that are right now and then teach more than those that
    always or never are."""
    reuse_correction: Fraction = 1.0
    """`reuse_groups`: power of the importance weight of a drawn group, its chance in an even draw over its own. 1: in
    expectation it counts as if it had been drawn evenly. 0: no weight."""

    @property
    def recovery(self) -> Recovery:
        """`behavior` where samples may be stale, else `same`."""
        return self.behavior if self.staleness_limit else "same"

    @property
    def has_anchor_pass(self) -> bool:
        """True where the learner scores the proximal policy in a pass of its own."""
        return self.recovery not in WITHOUT_ANCHOR_PASS

    @property
    def scores_fit(self) -> bool:
        """True where recorded scores hold every anchor of an update: none is of an average of weights."""
        return self.proximal == "start"

    @property
    def staleness_limit(self) -> int:
        """`max_staleness`, or the mode's default."""
        return self.default_staleness if self.max_staleness is None else self.max_staleness

    @property
    def default_staleness(self) -> int:
        """Age of the oldest tokens that the mode makes by itself, where weights are pushed every `push_every` steps."""
        return {"sync": 0, "periodic": 0, "one_step": 1, "async": 2}[self.mode] + self.push_every - 1
