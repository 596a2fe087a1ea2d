"""Scored tokens under both engines, of one rank.

Shape letters: B rows, R forwarded tokens, L MoE layers of the model, N scored tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trm.learner.protocol import Learner, Scores
from moe_trm.step.probe.flip_causes import margins_of
from moe_trm.types import RolloutRecord, TokenBatch


@dataclass(frozen=True)
class ProbeTokens:
    """Scored tokens of one rank, all `[N]` but the last two.

    Attributes:
        group_id, sample_id: prompt the token answers, and the row that it is of (`RolloutRecord.row_id`); tokens of one
            row are in order.
        native, replayed: log-prob under the learner minus log-prob under the rollout engine, with own and with replayed
            routes.
        flipped_layers: MoE layers whose expert set differs between the two engines at the token's input row.
        log_kept_mass: log of the learner's own probability of the kept support; 0 without a sampling mask.
        flips: `[N, L]` bool, the same layer by layer.
        margins: `[N, L]` float32 gap between the last chosen and the first rejected score of the learner's router, in
            its scores; NaN for routers without.
    """

    group_id: Tensor
    sample_id: Tensor
    native: Tensor
    replayed: Tensor
    flipped_layers: Tensor
    log_kept_mass: Tensor
    flips: Tensor
    margins: Tensor


def compared(
    learner: Learner,
    batch: TokenBatch,
    records: Sequence[RolloutRecord],
    native: Scores,
    replayed: Scores,
    flipped_BRL: Tensor,
) -> ProbeTokens:
    """The scored tokens of a micro-batch; `flipped_BRL`: as of `flips_of`. Collective."""
    mask = batch.mask.cpu()
    rows, _ = mask.nonzero(as_tuple=True)
    ids = torch.tensor([*((record.group_id, record.row_id) for record in records), (0, 0)], dtype=torch.int64)
    flips_NL = _of_model(learner, flipped_BRL)[mask]
    margins_BRL = margins_of(native, batch, learner.moe_layer_ids)
    known_NL = _of_model(learner, ~margins_BRL.isnan())[mask]
    margins_NL = _of_model(learner, margins_BRL.nan_to_num())[mask]
    mass = native.log_kept_mass
    return ProbeTokens(
        group_id=ids[rows, 0],
        sample_id=ids[rows, 1],
        native=(native.logprobs - batch.rollout_logprobs)[batch.mask].cpu(),
        replayed=(replayed.logprobs - batch.rollout_logprobs)[batch.mask].cpu(),
        flipped_layers=flips_NL.sum(-1).to(torch.int16),
        log_kept_mass=torch.zeros(len(rows)) if mass is None else mass[batch.mask].cpu(),
        flips=flips_NL > 0,
        margins=margins_NL.masked_fill(known_NL == 0, float("nan")),
    )


def _of_model(learner: Learner, values_BRL: Tensor) -> Tensor:
    """`[B, R, L]` float32 of all layers on the CPU, from those of this rank and of the ranks beside it. Collective."""
    places = [learner.model_moe_layer_ids.index(layer) for layer in learner.moe_layer_ids]
    of_model = torch.zeros(*values_BRL.shape[:-1], len(learner.model_moe_layer_ids))
    of_model[..., places] = values_BRL.float().cpu()
    return learner.sum_over_stages(learner.sum_over_slices(of_model)).cpu()


def joined(parts: Sequence[ProbeTokens]) -> ProbeTokens:
    """The tokens of all parts."""
    return ProbeTokens(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})
