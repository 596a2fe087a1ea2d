"""Columns that the learner computes for each real token: what padding costs, by `batch.layout`."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.batch.partition import cost, partition
from moe_trm.config.schema import BatchConfig, LearnerConfig

DEFAULT_ROWS = 32
"""Rows of a micro-batch where neither rows nor tokens are given (`moe_trm/batch/plan.py`)."""


def data_ranks(learner: LearnerConfig, world: int) -> int:
    """Ranks that take rows of their own."""
    if learner.backend == "deepspeed":
        return world
    return max(1, world // (learner.parallel.tensor * learner.parallel.pipeline * learner.parallel.context))


def columns_per_token(learner: LearnerConfig, batch: BatchConfig, lengths: Sequence[int], world: int) -> float:
    """Columns of a step's micro-batches over its real tokens.

    `padded`: rows as `moe_trm/batch/plan.py` cuts them, each as long as the longest of its micro-batch. `packed`: 1
    where one rank holds whole sequences; else each is filled up to what its ranks can share.

    Args:
        config: of the run.
        lengths: forwarded tokens of the samples of a step, in an order without meaning.
        world: learner ranks.
    """
    real = sum(lengths)
    if batch.layout == "packed":
        context = learner.parallel.context if learner.backend == "megatron" else 1
        multiple = 2 * context if context > 1 else 1
        return sum(-(-length // multiple) * multiple for length in lengths) / real
    ranks, computed = data_ranks(learner, world), 0
    for start in range(learner.minibatches):
        mini = sorted(lengths[start :: learner.minibatches], reverse=True)
        if budget := learner.micro_batch_tokens:
            fitting = [min(length, budget) for length in mini]
            shares = partition(fitting, ranks, budget)
            computed += sum(cost(fitting, rows) for share in shares for rows in share)
            continue
        rows = learner.micro_batch_rows or DEFAULT_ROWS
        for rank in range(ranks):
            share = mini[rank::ranks]
            computed += sum(len(share[i : i + rows]) * share[i] for i in range(0, len(share), rows))
    return max(1.0, computed / real)
