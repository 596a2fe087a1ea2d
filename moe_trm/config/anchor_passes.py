"""Settings under which every minibatch has a pass of log-probs of its own before its update."""

from __future__ import annotations

from moe_trm.config.schema import AdvantageConfig, KlConfig, LearnerConfig, OptimizerConfig, RecordConfig
from moe_trm.methods.advantages import ADVANTAGES


def scores_every_minibatch(
    record: RecordConfig, learner: LearnerConfig, optimizer: OptimizerConfig, kl: KlConfig, advantage: AdvantageConfig
) -> bool:
    """True when the first minibatch of a step is scored too, although its update's own forward would give the same.

    A recording keeps the scores of the step's start. A KL in reward or advantage, advantages that read ratios and a
    learning rate by effective sample size need them before the update. Rules and losses that look at a whole minibatch
    need them as well (`moe_trm/step/recipe.py`), and several epochs.
    """
    return bool(
        learner.epochs > 1
        or record.bundle
        or kl.before_updates
        or optimizer.ess_scale != "off"
        or ADVANTAGES[advantage.name].reads_ratios
    )
