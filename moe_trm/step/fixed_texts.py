"""Fixed texts that prove a push by use, with the learner's scores at the weights of the push."""

from __future__ import annotations

from collections.abc import Collection

import torch

from moe_trm.learner.protocol import Learner
from moe_trm.step.cadence import ProofCadence
from moe_trm.sync.manifest import ScoredText
from moe_trm.types import TokenBatch
from routing.record.sources import Native

NUM_TEXTS, NUM_TOKENS = 4, 32
"""Random ids, so that the texts pass through many experts of every layer."""


class FixedTexts:
    """The texts of each push that is proved by use, `every` so many (`sync.prove_every`).

    `scored`: the engine's weights are the learner's, so the learner scores the texts. `reserved`: ids that they must
    not have, such as those of pictures.
    """

    def __init__(self, vocab_size: int, every: int, *, scored: bool, reserved: Collection[int] = ()) -> None:
        self._ids = fixed_ids(vocab_size, reserved)
        self._cadence, self._scored, self._pushes = ProofCadence(every), scored, 0

    def take(self, learner: Learner, *, due: bool = False) -> tuple[ScoredText, ...]:
        """The texts of the next push; none where it is not due. All ranks call it together.

        `due`: it is, unless none ever is.
        """
        number, self._pushes = self._pushes, self._pushes + 1
        if not (self._cadence.due(number) or (due and self._cadence.every)):
            return ()
        logprobs: list[list[float]] = [[]] * NUM_TEXTS
        if self._scored:
            [scores] = learner.score([batch_of(self._ids)], [Native()], temperature=1.0)
            logprobs = scores.logprobs.double().tolist()
        return tuple(
            ScoredText(tuple(ids), tuple(text_logprobs))
            for ids, text_logprobs in zip(self._ids.tolist(), logprobs, strict=True)
        )


def fixed_ids(vocab_size: int, reserved: Collection[int] = ()) -> torch.Tensor:
    """`[NUM_TEXTS, NUM_TOKENS]` ids of the texts, none of them `reserved`."""
    ids = torch.randint(vocab_size, (NUM_TEXTS, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    if reserved:
        allowed = torch.tensor([token for token in range(vocab_size) if token not in reserved])
        ids = allowed[ids % len(allowed)]
    return ids


def batch_of(ids_BT: torch.Tensor) -> TokenBatch:
    """Texts as a micro-batch whose every token but the first is scored; it is made of no records."""
    scored_BT = torch.ones(len(ids_BT), ids_BT.shape[1] - 1, dtype=torch.bool)
    zeros = torch.zeros(scored_BT.shape)
    return TokenBatch(
        input_ids=ids_BT[:, :-1],
        target_ids=ids_BT[:, 1:],
        valid=scored_BT,
        mask=scored_BT,
        rollout_logprobs=zeros,
        full_logprobs=zeros,
        versions=torch.full(scored_BT.shape, -1, dtype=torch.int32),
        turn_ids=torch.zeros(scored_BT.shape, dtype=torch.int16),
        advantages=zeros,
        routes=(None,) * len(ids_BT),
        kept_ids=None,
        kept_offsets=None,
    )
