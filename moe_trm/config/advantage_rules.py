"""Rules between the advantage estimator and other settings. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import AdvantageConfig, BatchConfig, KlConfig, PipelineConfig
from moe_trm.methods.advantages import ADVANTAGES, BY_TOKEN


def refusals(
    advantage: AdvantageConfig, keeps_masks: bool, kl: KlConfig, pipeline: PipelineConfig, batch: BatchConfig
) -> Iterator[Problem]:
    """The reasons that these settings cannot work."""
    name = advantage.name
    if ADVANTAGES[name].reads_support and not keeps_masks:
        yield Problem(
            "sampling_mask.mode",
            f"advantage.name={name} reads the distribution that each token was drawn from, "
            "which is recorded with the sampling mask",
            got="off",
            expected="keep",
            fix="set sampling_mask.mode=keep, or choose another advantage.name",
        )
    if ADVANTAGES[name].reads_ratios and not pipeline.has_anchor_pass:
        yield Problem(
            "advantage.name",
            "the ratio of policy to rollout is not known before the update",
            got=f"{name} with pipeline.behavior={pipeline.recovery}",
            expected="pipeline.behavior=snapshot or merged",
        )
    if (name in BY_TOKEN or ADVANTAGES[name].reads_ratios) and kl.coef and kl.where == "reward":
        yield Problem(
            "kl.where",
            f"{name} compares rewards as they are, and the KL would lower them afterwards",
            got=f"reward with advantage.name={name}",
            expected="loss",
        )
    if advantage.zero_variance_scale:
        yield from _zero_variance(keeps_masks, advantage, batch, kl)


def _zero_variance(
    keeps_masks: bool, advantage: AdvantageConfig, batch: BatchConfig, kl: KlConfig
) -> Iterator[Problem]:
    key, name = "advantage.zero_variance_scale", advantage.name
    entry, got = ADVANTAGES[name], str(advantage.zero_variance_scale)
    if not keeps_masks:
        yield Problem(
            "sampling_mask.mode",
            "shaped advantages read the entropy of each token's distribution, which is recorded with the sampling mask",
            got=f"off with {key}={got}",
            expected="keep",
        )
    if not entry.compares or entry.level != "row" or entry.reads_ratios:
        yield Problem(
            key,
            f"advantage.name={name} does not give all samples of a prompt 0 where their rewards are equal, "
            "or is made by the learner",
            got=got,
            expected="0, or an estimator that compares the samples of a prompt by row",
        )
    if batch.zero_variance == "drop":
        yield Problem(
            "batch.zero_variance",
            "groups without a difference in reward would be dropped before they are shaped",
            got=f"drop with {key}={got}",
            expected="keep",
        )
    if kl.coef and kl.where == "reward":
        yield Problem(
            "kl.where",
            "the KL lowers rewards after the shaped advantages were made",
            got=f"reward with {key}={got}",
            expected="loss",
        )
