"""The part of a step's rows that one learner rank is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_trm.types import MiniBatch, RolloutRecord, TrainBatch


def rank_share(batch: TrainBatch, layer_ids: Sequence[int]) -> TrainBatch:
    """`batch` with only the route layers that its rank owns, so that a pipeline stage never receives the others."""

    def cut(record: RolloutRecord) -> RolloutRecord:
        routes = record.routes
        if routes is None or tuple(routes.layer_ids) == tuple(layer_ids):
            return record
        return replace(record, routes=routes.select(layer_ids))

    def share(mini: MiniBatch) -> MiniBatch:
        micro = tuple(
            replace(batch, rows=tuple(replace(row, record=cut(row.record)) for row in batch.rows))
            for batch in mini.micro_batches
        )
        return replace(mini, micro_batches=micro)

    return replace(
        batch,
        mini_batches=tuple(share(mini) for mini in batch.mini_batches),
        bank=tuple(cut(record) for record in batch.bank),
    )
