"""Version labels judged by score: the weights of the label must explain what was sampled, not those of another version.

An engine that goes on with older weights, or labels an answer wrongly, is unnoticed by any checksum. The passes that
recover behaviour log-probs score every token under each version that the step has; so this costs no pass.
Shape letters: B rows, R columns of a micro-batch, V scored versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_trm.learner.protocol import Learner
from moe_trm.methods import summable
from moe_trm.methods.limits import LAST_AGE
from moe_trm.types import TokenBatch

LEAST_TOKENS = 8
"""Tokens of one label in a row from which it is judged."""
BETTER, LEAST_GAIN = 0.5, 1e-3
"""A label is doubted where the median gap under another version is less than this share of its own, and is smaller by
at least so many nats."""


class Labels:
    """Counts the parts of rows whose label another version explains better."""

    def __init__(self) -> None:
        self._sums: list[summable.Summable] = []

    def observe(self, batches: Sequence[TokenBatch], logprobs: Mapping[int, Sequence[Tensor]], newest: int) -> None:
        """Judge micro-batches by their `[B, R]` log-probs under each scored version, at least two; `newest` has age 0.

        A part is the tokens of one label in a row. Its gap under a version is the median over tokens of abs(log p of
        the rollout - log p of the learner): single tokens that take another expert do not move it.
        """
        versions = sorted(logprobs)
        for index, batch in enumerate(batches):
            gap_VBR = torch.stack(
                [(logprobs[version][index] - batch.rollout_logprobs).abs() for version in versions]
            ).float()
            for place, version in enumerate(versions):
                labelled_BR = batch.mask & (batch.versions == version)
                judged_B = labelled_BR.sum(1) >= LEAST_TOKENS
                median_VB = gap_VBR.masked_fill(~labelled_BR, torch.nan).nanmedian(dim=2).values
                labelled_B = median_VB[place]
                others_B = median_VB[[other for other in range(len(versions)) if other != place]].amin(0)
                doubted_B = (others_B < BETTER * labelled_B) & (labelled_B - others_B > LEAST_GAIN)
                self._sums.append(_counted(doubted_B, judged_B, newest - version))

    def take(self, learner: Learner) -> dict[str, float]:
        """`weights/labels_doubted`, the share of parts, and `ages/labels_doubted/<age>`; ends a step. Collective.

        Every rank observes the same versions. Empty where nothing was judged.
        """
        sums, self._sums = self._sums, []
        return summable.finalize(learner.reduce(summable.add(sums))) if sums else {}


def _counted(doubted_B: Tensor, judged_B: Tensor, age: int) -> summable.Summable:
    """Both shares; all ages have a name, so that all ranks have the same."""
    nobody_B = torch.zeros_like(judged_B)
    numbers = [*map(str, range(LAST_AGE + 1)), f"{LAST_AGE + 1}_up"]
    number_of_age = numbers[min(age, LAST_AGE + 1)]
    shares = [summable.fraction("weights/labels_doubted", doubted_B, judged_B)]
    shares += [
        summable.fraction(f"ages/labels_doubted/{number}", doubted_B, judged_B if number == number_of_age else nobody_B)
        for number in numbers
    ]
    return summable.add(shares)
