"""The same update in float64, from all recorded rows at once: kept tokens, and derivatives of the loss by log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.config.schema import Config
from moe_trm.corrections import Evidence
from moe_trm.corrections.batch_norm import normalized, weight_sums
from moe_trm.learner.protocol import Scores
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios
from moe_trm.types import TokenBatch


@dataclass(frozen=True)
class Recomputed:
    """The float64 result: `coefficients` dL/d log-prob of each micro-batch, and the numbers of kept and all tokens."""

    coefficients: list[Tensor]
    num_kept: int
    num_tokens: int


def recompute(
    config: Config, batches: Sequence[TokenBatch], anchors: Sequence[Tensor], current: Sequence[Scores]
) -> Recomputed:
    """One minibatch, all rows together.

    `anchors`: log-probs of each micro-batch at the start; `current`: scores now.
    """
    width = max(batch.mask.shape[1] for batch in batches)
    # A draw among equal covariances counts rows in the order of their ids, however they were planned.
    order = torch.tensor([sample for batch in batches for sample in batch.sample_ids]).argsort(stable=True)

    def joined(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([*values])[order]

    def stacked(values: Sequence[Tensor]) -> Tensor:
        return joined([torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values])

    mask = stacked([batch.mask for batch in batches])
    rollout, anchor = stacked([batch.rollout_logprobs for batch in batches]).double(), stacked(anchors).double()
    advantages = stacked([batch.advantages for batch in batches]).double()
    logprobs = stacked([score.logprobs for score in current]).double().requires_grad_()
    ratios = LogRatios(rollout, anchor, logprobs, mask)
    turns = stacked([batch.turn_ids for batch in batches])
    preset = corrections.presets[config.correction.preset] if config.correction.preset else None
    specs = [*(preset.rules if preset else ()), *((rule.name, rule.thresholds) for rule in config.correction.rules)]
    rules = [corrections.get(name).bind(**thresholds) for name, thresholds in specs]
    correction = corrections.compose(rules, whole_minibatch=True)(Evidence(ratios, advantages, turn_ids=turns))
    if config.correction.batch_normalize != "off":
        correction = normalized(correction, weight_sums(correction, mask, config.correction.batch_normalize))
    name, parameters = (preset.loss if preset else None) or (config.loss.name or "ppo_clip", config.loss.parameters)
    inputs = replace(
        LossInputs.corrected(ratios, logprobs, advantages, correction),
        turn_ids=turns,
        rewards=joined([_given(batch.rewards) for batch in batches]).double(),
        group_ids=joined([_given(batch.group_ids) for batch in batches]),
        entropy=stacked([_given(score.entropy) for score in current]).double()
        if current[0].entropy is not None
        else None,
        router_shift=stacked([_given(score.router_shift) for score in current])
        if current[0].router_shift is not None
        else None,
        reference_logprobs=stacked([_given(batch.reference_logprobs) for batch in batches]).double()
        if batches[0].reference_logprobs is not None
        else None,
        # Rows of one group often begin with the same token: of equal covariances the run's own draw decides.
        draw=(config.seed, max(int(batch.versions[batch.mask].max()) for batch in batches if batch.mask.any())),
    )
    loss = aggregate(
        losses.get(name).bind(**parameters)(inputs).values,
        correction.keep,
        mask,
        config.loss.aggregation or losses.get(name).aggregation,
        num_sequences=int(mask.any(dim=1).sum()),
        num_tokens=int(mask.sum()),
        horizon=config.rollout.max_new_tokens,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs) if loss.requires_grad else (torch.zeros_like(logprobs),)
    planned = torch.empty_like(gradient).index_copy(0, order, gradient)
    parts = torch.split(planned, [len(batch.mask) for batch in batches])
    coefficients = [part[:, : batch.mask.shape[1]] for part, batch in zip(parts, batches, strict=True)]
    return Recomputed(coefficients, int((correction.keep & mask).sum()), int(mask.sum()))


def _given(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
