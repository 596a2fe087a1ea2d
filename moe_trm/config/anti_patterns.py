"""Anti-patterns: settings, and habits of reading, that are known to end badly. One table, for launch and report.

The first five are the field's common mistakes of diagnosis. A row is told at launch where settings alone show it, and
in the report where the run's metrics show it. What was not measured shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_trm.config.correction_rules import loss_facts, preset_of, ratio_of, rules_of
from moe_trm.config.schema import Config, CorrectionConfig, LossConfig, OptimizerConfig, PipelineConfig, RolloutConfig
from moe_trm.methods.limits import CLIPPED, FAR_AHEAD, LONG_ROW, OUTLIER, rising, series, surged
from moe_trm.methods.losses import DEFAULT_LOSS

History = Sequence[Mapping[str, float]]
WIDE_LOW, WIDE_HIGH = 0.2, 0.28
"""The usual clips of `ppo_clip`; wider ones let more of the drift through."""
WITH_LAG = ("lag", "merged", "staleness", "total")


@dataclass(frozen=True)
class AntiPattern:
    """One row of the table.

    Attributes:
        name: short, as launch and report call it.
        reason: why it ends badly, in one sentence.
        advice: the setting that acts on it.
        refused: launch refuses it already (`training_rules`, `rollout_rules`); here for the report of an older run.
    """

    name: str
    reason: str
    advice: str
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}; try {self.advice}"


def _longest(rollout: RolloutConfig) -> int:
    of_turns = rollout.max_tokens or rollout.max_turns * rollout.max_new_tokens
    return of_turns if rollout.has_turns else rollout.max_new_tokens


def _uses(correction: CorrectionConfig, *names: str) -> bool:
    return any(name in names for name, _ in rules_of(correction))


def _noisy_products(correction: CorrectionConfig, history: History) -> bool:
    sizes, noise = series(history, "correction/weight_eff_sample_size"), series(history, "variance/pure_noise")
    return _uses(correction, "seq_tis") and bool(sizes) and sizes[-1] < 0.5 and rising(noise)


def _wide_clip(loss: LossConfig, history: History) -> bool:
    clipped = series(history, "loss/pg_clipfrac")
    wide = (loss.clip_low or 0.0) > WIDE_LOW or (loss.clip_high or 0.0) > WIDE_HIGH
    return loss.name in (None, DEFAULT_LOSS) and wide and bool(clipped) and clipped[-1] > CLIPPED


def _averaged_away(history: History) -> bool:
    largest = series(history, "engine/probs_diff_max")
    return bool(largest) and max(largest) > OUTLIER and sum(largest) / len(largest) <= OUTLIER


def _far_ahead(correction: CorrectionConfig, loss: LossConfig, pipeline: PipelineConfig) -> bool:
    ratios = [ratio_of(name, thresholds) for name, thresholds in rules_of(correction)]
    corrected = any(ratio in (*WITH_LAG, None) for ratio in ratios) or pipeline.recovery == "interpolate"
    facts = loss_facts(loss, preset_of(correction))
    held = facts is None or "lag" in facts.contains
    return pipeline.staleness_limit >= FAR_AHEAD and not corrected and not held


def _long_sums(correction: CorrectionConfig) -> bool:
    preset = preset_of(correction)
    sums = [name.startswith("seq_sum_") for name, _ in (preset.rules if preset else ())]
    sums += [
        (rule.name.startswith("seq_sum_") or rule.thresholds.get("score") == "sum") and not rule.by_length
        for rule in correction.rules
    ]
    return any(sums)


def planned(config: Config) -> Iterator[AntiPattern]:
    """The rows that the settings alone show, in the order of the table; launch refuses some of them."""
    pipeline, learner, preset = config.pipeline, config.learner, preset_of(config.correction)
    long = _longest(config.rollout) > LONG_ROW
    one_step = learner.minibatches * learner.epochs == 1 and pipeline.staleness_limit == 0
    bypass = (preset is not None and preset.bypass) or not pipeline.has_anchor_pass
    shown = {
        "unchecked KL": pipeline.recovery not in ("same", "snapshot") and config.probe.every == 0,
        "products of long rows": _uses(config.correction, "seq_tis") and long,
        "far ahead, uncorrected": _far_ahead(config.correction, config.loss, pipeline),
        "sums over long rows": _long_sums(config.correction) and long,
        "replay at one step": config.replay.mode == "R3" and one_step,
        "bypass with R2": bypass and config.replay.mode == "R2",
    }
    return (row for row in ANTI_PATTERNS if shown.get(row.name))


def _seen(
    correction: CorrectionConfig, loss: LossConfig, optimizer: OptimizerConfig, history: History
) -> dict[str, bool]:
    """The rows that finished metrics (oldest step first) may show with the settings, and whether these do."""
    grew = surged(history, "response/length_mean") is not None
    return {
        "products of long rows": _noisy_products(correction, history),
        "wide clip": _wide_clip(loss, history),
        "unguarded surge": optimizer.surge_limit is None and grew,
        "maximum averaged away": _averaged_away(history),
    }


ANTI_PATTERNS: tuple[AntiPattern, ...] = (
    AntiPattern(
        "unchecked KL",
        "engines are never compared at the same weights, so a KL that looks like learning may be a broken engine",
        "probe.every=10, or pipeline.behavior=snapshot",
    ),
    AntiPattern(
        "products of long rows",
        "seq_tis multiplies the ratios of a whole answer, and few long rows keep a weight",
        "correction.preset=decoupled_geo_rs_token_tis",
    ),
    AntiPattern(
        "wide clip",
        "the clip is wider than usual and still holds over 20% of the tokens: it hides the drift, it does not mend it",
        "learner.minibatches=1, or half of optimizer.lr",
    ),
    AntiPattern(
        "unguarded surge",
        "answers grew by over a fifth in 100 steps, and the learning rate does not answer to that",
        "optimizer.surge_limit=1.2, before you look for the cause in the reward",
    ),
    AntiPattern(
        "maximum averaged away",
        "at some steps a token's probability differs by over 0.8 between the engines, which a mean over steps hides",
        "moe-trm doctor, and the transcripts of the steps where engine/probs_diff_max is largest",
    ),
    AntiPattern(
        "far ahead, uncorrected",
        f"samples may be {FAR_AHEAD} or more versions old, and neither rule nor loss weighs or rejects by that lag",
        "correction.preset=decoupled_token_is",
    ),
    AntiPattern(
        "sums over long rows",
        f"seq_sum_* and score=sum add up over an answer, so rows above {LONG_ROW} tokens are rejected for their length",
        "the same rule as seq_mean_* or with score=mean, or a target_reject_rate with by_length",
    ),
    AntiPattern(
        "replay at one step",
        "with one update of fresh samples R3 trains another policy than the one that is served, and gains nothing",
        "replay.mode=none",
    ),
    AntiPattern(
        "bypass with R2",
        "R2 replays the routes of the proximal pass, which plays no part in bypass",
        "replay.mode=R3",
        refused=True,
    ),
)


def found(config: Config, history: History) -> list[AntiPattern]:
    """The rows that settings or metrics of a run show, in the order of the table."""
    settings = {row.name for row in planned(config)}
    metrics = _seen(config.correction, config.loss, config.optimizer, history)
    return [row for row in ANTI_PATTERNS if row.name in settings or metrics.get(row.name)]
