"""One candidate configuration on all recorded steps: the metrics that training would have logged, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from moe_trm.config.problems import InvalidConfigError
from moe_trm.config.schema import Config, CorrectionConfig, LossConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.protocol import Learner
from moe_trm.losses import aggregate
from moe_trm.methods import summable
from moe_trm.observe.judge import Judge
from moe_trm.recording.scores import ScoredUpdate
from moe_trm.step.objective import Objective
from moe_trm.step.recipe import Recipe, recipe
from moe_trm.tools.whatif.gradient import EffectiveWeights
from moe_trm.tools.whatif.offline import RecordedLearner, current

Steps = Mapping[int, Sequence[ScoredUpdate]]


@dataclass(frozen=True)
class Candidate:
    """A correction and a loss under a name."""

    name: str
    correction: CorrectionConfig
    loss: LossConfig


@dataclass(frozen=True)
class RuleOutcome:
    """The outcome of a candidate on the recorded steps.

    Attributes:
        refused: why it cannot run on these recordings; empty when it did, and then the rest is filled.
        steps: finished metrics by step, named as in `metrics.jsonl`.
        pooled: the same over all tokens of all steps, with `gradient/*` of `EffectiveWeights.summary`. Steps on which
            a rule with a target only measured are left out.
        histogram: share of tokens by effective weight.
        verdict: what the metrics of the last step mean, in one sentence.
    """

    name: str
    refused: str = ""
    steps: Mapping[int, Mapping[str, float]] | None = None
    pooled: Mapping[str, float] | None = None
    histogram: Mapping[str, float] | None = None
    verdict: str = ""
    uncalibrated: str = ""
    """The reason that nothing is known of what it keeps: its rules measured on every step of the recording."""


def judge(candidate: Candidate, config: Config, recorded: Steps) -> RuleOutcome:
    """Apply `candidate` to every recorded update. `config` says the rest: calibration steps, lengths."""
    # What rules would do is asked here, also of a run that would have them wait.
    correction = candidate.correction.model_copy(update={"decide_after": None})
    config = config.model_copy(update={"correction": correction, "loss": candidate.loss})
    try:
        return _judged(candidate.name, Objective(config), recipe(config), correction, recorded)
    except InvalidConfigError as error:
        return RuleOutcome(candidate.name, refused="; ".join(problem.what for problem in error.problems))
    except ConfigError as error:
        return RuleOutcome(candidate.name, refused=error.what)


def _judged(
    name: str, objective: Objective, recipe: Recipe, correction: CorrectionConfig, recorded: Steps
) -> RuleOutcome:
    recording, weights, says, verdict = RecordedLearner(), EffectiveWeights(), Judge(), ""
    learner = cast(Learner, recording)  # it does what an objective asks for, and cannot train
    steps: dict[int, Mapping[str, float]] = {}
    for step, updates in recorded.items():
        measured_only = objective.measuring
        for place, update in enumerate(updates):
            part = recording.hold(update, needs_anchors=objective.reads_minibatch)
            loss_of = objective.bind(part, learner, first=place == 0)
            for index, batch in enumerate(update.batches):
                scores = current(batch)
                scores.logprobs.requires_grad_()
                plain = aggregate(
                    -batch.advantages * scores.logprobs,
                    batch.mask,
                    batch.mask,
                    recipe.aggregation,
                    num_sequences=update.num_sequences,
                    num_tokens=update.num_tokens,
                    horizon=recipe.horizon,
                    sample_tokens=batch.sample_tokens,
                )
                slope, plain_slope = (
                    _slope(loss, scores.logprobs)[batch.mask] for loss in (loss_of(index, scores), plain)
                )
                weights.add(slope, plain_slope, (scores.logprobs - batch.rollout_logprobs)[batch.mask])
        steps[step] = objective.take(learner)
        verdict = says.say(steps[step])["verdict"]
        if measured_only:
            recording.total, weights = {}, EffectiveWeights()
    pooled = summable.finalize(recording.total) | weights.summary()
    uncalibrated = "" if recording.total else _uncalibrated(correction, len(recorded))
    return RuleOutcome(name, "", steps, pooled, weights.histogram(), verdict, uncalibrated)


def _uncalibrated(correction: CorrectionConfig, num_steps: int) -> str:
    names = [rule.name for rule in correction.rules if rule.target_reject_rate is not None]
    steps = correction.calibration_steps
    return (
        f"uncalibrated: {', '.join(names)} measures for correction.calibration_steps={steps} steps, "
        f"and the recording has {num_steps}"
    )


def _slope(loss: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(logprobs)
    (slope,) = torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True)
    return slope
