"""Recorded updates in the place of a learner, for `moe_trm.step.objective` to judge exactly as in training.

Shape letters: B rows and R columns of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_trm.learner.protocol import Scores
from moe_trm.methods import summable
from moe_trm.methods.row_fields import shared
from moe_trm.recording.scores import ScoredBatch, ScoredUpdate
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import MicroBatch, MiniBatch, RolloutRecord, TokenBatch, TrainRow
from routing.layout.row_ids import row_of
from routing.record.sources import Native, RouteSource


class RecordedLearner:
    """A learner of one rank that holds every row of a recorded update and answers with the recorded scores.

    Everything it was asked to reduce is also added up over all steps, in `total`.
    """

    data_rank, data_size, moe_layer_ids, repeats_passes = 0, 1, (), True

    def __init__(self) -> None:
        self.total: summable.Summable = {}
        self._update: ScoredUpdate | None = None

    def hold(self, update: ScoredUpdate, *, needs_anchors: bool) -> AnchoredMinibatch:
        """Answer for `update` from now on; returns its minibatch as the objective wants it.

        `needs_anchors`: anchors are needed before the update, also where its own forward had been the anchor.
        """
        self._update = update
        micro = tuple(
            MicroBatch(tuple(_row(number) for number in batch.sample_ids.tolist() if number >= 0))
            for batch in update.batches
        )
        batches = [_token_batch(batch) for batch in update.batches]
        anchors = [_anchor(batch) for batch in update.batches]
        return AnchoredMinibatch(
            MiniBatch(micro, update.num_sequences, update.num_tokens),
            batches,
            anchors if needs_anchors or update.batches[0].anchor_logprobs is not None else [],
            [Native() for _ in batches],
            kl_coef=update.kl_coef,
            behavior=_all([batch.behavior_logprobs for batch in update.batches]),
            recovery=update.recovery,
            version=update.version,
        )

    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
        temperature: float | None = None,
    ) -> list[Scores]:
        """The recorded scores under the weights of the update that is held."""
        assert self._update is not None
        return [current(batch) for batch in self._update.batches]

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """The sums themselves: there is no other rank."""
        self.total = summable.add([self.total, sums])
        return {name: float(value) for name, value in sums.items()}

    def gather(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values


def current(batch: ScoredBatch) -> Scores:
    """The recorded scores of the update pass, as a new leaf without gradient."""
    return Scores(batch.current_logprobs.clone(), **shared(Scores, batch))


def _anchor(batch: ScoredBatch) -> Scores:
    """At the start of the step; the update's own forward where that was the anchor."""
    if batch.anchor_logprobs is None:
        return current(batch)
    return Scores(batch.anchor_logprobs, exact_kl=batch.anchor_exact_kl)


def _all(values: Sequence[Tensor | None]) -> list[Tensor] | None:
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else None


def _token_batch(batch: ScoredBatch) -> TokenBatch:
    nothing = torch.zeros(batch.mask.shape, dtype=torch.int64)
    return TokenBatch(
        input_ids=nothing,
        target_ids=nothing,
        valid=batch.mask,
        mask=batch.mask,
        rollout_logprobs=batch.rollout_logprobs,
        full_logprobs=batch.rollout_logprobs,
        advantages=batch.advantages,
        routes=(None,) * len(batch.mask),
        kept_ids=None,
        kept_offsets=None,
        sample_tokens=batch.sample_tokens,
        **shared(TokenBatch, batch),
    )


def _row(number: int) -> TrainRow:
    """All that the objective asks of a row is which one it is."""
    none = np.zeros(0, np.int32)
    sample_id, row = row_of(number)
    record = RolloutRecord(sample_id, -1, "", none, none.astype(bool), none, none, none, none, None, None, "", row=row)
    return TrainRow(record)
