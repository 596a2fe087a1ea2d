"""The global work of the learner scenarios; shared by the ranks and the tests, so it imports no Megatron."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_trm.learner.protocol import Scores
from moe_trm.types import TokenBatch
from tests.integration.learner_support.tiny import make_batch

NUM_BATCHES = 4
TEMPERATURE = 0.7


def global_batch(number: int, *, keep_mask: bool = True) -> TokenBatch:
    """Micro-batch `number` of the global work; each has another padded length."""
    return make_batch(100 + number, length=9 + 2 * number, keep_mask=keep_mask)


def objective(batches: list[TokenBatch], seen: list[Tensor]) -> Callable[[int, Scores], Tensor]:
    """A smooth loss in the log-probs, already a global sum."""

    def loss(index: int, current: Scores) -> Tensor:
        logprobs = current.logprobs
        seen.append(logprobs.detach().clone())
        return (batches[index].advantages.to(logprobs) * logprobs + 0.05 * logprobs.square()).sum() / 40

    return loss


def squares(batch: TokenBatch, current: Scores) -> Tensor:
    """Another smooth loss, whose gradient points elsewhere but not far from it."""
    return (batch.advantages.to(current.logprobs) * current.logprobs + 0.5 * current.logprobs.square()).sum() / 40
