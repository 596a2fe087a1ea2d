"""Which row is trained where: minibatches, data-parallel ranks, micro-batches. Deterministic in (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.types import MicroBatch, MiniBatch, TrainRow


def plan_step(
    rows: Sequence[TrainRow], *, seed: int, step: int, minibatches: int, data_size: int, micro_batch_rows: int
) -> list[list[MiniBatch]]:
    """Cut one step's rows into `plan[data_rank][minibatch]`.

    Rows are shuffled into minibatches. Within one they are sorted by length and dealt to the ranks back and forth, so that ranks get
    like numbers of tokens and micro-batches like lengths. Every rank gets the same number of micro-batches: the last ones may be empty.
    """
    order = np.random.default_rng((seed, step)).permutation(len(rows))
    plan: list[list[MiniBatch]] = [[] for _ in range(data_size)]
    for index in range(minibatches):
        mini = sorted((rows[i] for i in order[index::minibatches]), key=lambda row: -row.record.num_tokens)
        shares = _deal(mini, data_size)
        num_micro = max(1, -(-max(map(len, shares)) // micro_batch_rows))
        num_tokens = sum(int(row.record.scored.sum()) for row in mini)
        for rank, share in enumerate(shares):
            micro = tuple(
                MicroBatch(tuple(share[i * micro_batch_rows : (i + 1) * micro_batch_rows])) for i in range(num_micro)
            )
            plan[rank].append(MiniBatch(micro, num_sequences=len(mini), num_tokens=num_tokens))
    return plan


def _deal(rows: Sequence[TrainRow], hands: int) -> list[list[TrainRow]]:
    """Deal rows 0..n-1, n-1..0, ... so that sorted lengths even out."""
    dealt: list[list[TrainRow]] = [[] for _ in range(hands)]
    for i, row in enumerate(rows):
        lap, seat = divmod(i, hands)
        dealt[seat if lap % 2 == 0 else hands - 1 - seat].append(row)
    return dealt
