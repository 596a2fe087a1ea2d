"""The whole minibatch on every rank: for corrections and losses that cannot be computed on a part of it.

Only sampled tokens travel, a few numbers each. Rows are ordered by their ids, so that the result does not depend on how
ranks and micro-batches share them. Shape letters: N rows of the global minibatch, T sampled tokens of the longest,
B rows and R forwarded tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trm.config.schema import Recovery
from moe_trm.corrections import Evidence
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.losses import LossInputs
from moe_trm.methods.row_fields import BY_ROW, GATHERED, RowFields
from moe_trm.ratios import LogRatios
from moe_trm.step.passes import AnchoredMinibatch, decomposed


@dataclass(frozen=True)
class WholeMinibatch:
    """All rows of the global minibatch, sampled tokens to the left.

    Attributes:
        rollout, anchor, current, advantages: `[N, T]`, 0 off `mask`.
        behavior: `[N, T]` where it is not the anchor; `recovery`: what is known of it at all.
        mask: `[N, T]` bool.
        known: what is known of the rows besides, `[N, T]` and `[N]`.
        own: for each micro-batch of this rank, the places of its rows, `[B]` int64 (none for a micro-batch of padding).
    """

    rollout: Tensor
    anchor: Tensor
    current: Tensor
    advantages: Tensor
    mask: Tensor
    known: RowFields
    own: tuple[Tensor, ...]
    behavior: Tensor | None = None
    recovery: Recovery = "same"

    def ratios(self, current: Tensor) -> LogRatios:
        """The decomposition at `current` `[N, T]`."""
        return decomposed(
            self.recovery,
            rollout=self.rollout,
            behavior=self.behavior,
            proximal=self.anchor,
            current=current,
            mask=self.mask,
        )

    @property
    def evidence(self) -> Evidence:
        """Evidence for corrections."""
        return Evidence(self.ratios(self.current), self.advantages).with_fields(self.known)

    def inputs(self, current: Tensor, weights: Tensor, keep: Tensor) -> LossInputs:
        """Loss inputs of all rows at `current`, with corrections; all `[N, T]`."""
        return LossInputs(self.ratios(current), current, self.advantages, weights, keep).with_fields(self.known)

    def part(self, index: int, values: Tensor, mask: Tensor) -> Tensor:
        """The values `[N, T]` of micro-batch `index` in its own layout, `[B, R]`, 0 off its `mask`."""
        places, mask = self.own[index], mask.to(values.device)
        empty = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return empty.masked_scatter(mask, values[places][self.mask[places]])


def gather_minibatch(part: AnchoredMinibatch, current: Sequence[Scores], learner: Learner) -> WholeMinibatch:
    """Collect the minibatch of which `part` is this rank's share. Collective.

    Args:
        part: this rank's micro-batches and anchors.
        current: their scores under the weights in training.
    """
    batches = part.batches
    ids = [[row.record.row_id for row in micro.rows] for micro in part.mini.micro_batches]
    real = [slice(0, len(rows)) for rows in ids]
    device = batches[0].mask.device
    local_ids = torch.tensor([number for rows in ids for number in rows], dtype=torch.int64, device=device)
    everyone = learner.gather(local_ids)
    order = everyone.argsort(stable=True)
    lengths = learner.gather(_per_row([batch.mask.sum(dim=1) for batch in batches], real))
    mask_gathered = torch.arange(_longest(lengths), device=lengths.device) < lengths[:, None]
    mask = mask_gathered[order]

    def tokens(values: Sequence[Tensor]) -> Tensor:
        local = torch.cat([value[batch.mask] for value, batch in zip(values, batches, strict=True)])
        # Not every collective takes 16 bits.
        packed = learner.gather(local.int() if local.dtype == torch.int16 else local)
        dense = torch.zeros(mask_gathered.shape, dtype=packed.dtype, device=packed.device)
        dense[mask_gathered] = packed
        return dense[order]

    def rows(values: Sequence[Tensor]) -> Tensor:
        return learner.gather(_per_row(values, real))[order]

    views = [RowFields().with_fields(*batch_and_scores) for batch_and_scores in zip(batches, current, strict=True)]
    row_values = {
        name: (rows if BY_ROW[name] else tokens)([getattr(view, name) for view in views])
        for name in GATHERED
        if all(getattr(view, name) is not None for view in views)
    }
    place = {number: index for index, number in enumerate(everyone[order].tolist())}
    return WholeMinibatch(
        rollout=tokens([batch.rollout_logprobs for batch in batches]),
        anchor=tokens([scores.logprobs for scores in part.scores]),
        current=tokens([scores.logprobs for scores in current]),
        advantages=tokens([batch.advantages for batch in batches]),
        mask=mask,
        known=RowFields(**row_values),
        own=tuple(
            torch.tensor([place[number] for number in row_ids], dtype=torch.int64, device=mask.device)
            for row_ids in ids
        ),
        behavior=None if part.behavior is None else tokens(part.behavior),
        recovery=part.recovery,
    )


def _per_row(values: Sequence[Tensor], real: Sequence[slice]) -> Tensor:
    return torch.cat([value[rows] for value, rows in zip(values, real, strict=True)])


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0
