"""Batch normalisation of correction weights: divide by their mean over the minibatch.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from moe_trm.corrections.evidence import Correction
from moe_trm.corrections.rows import row_mean
from moe_trm.methods import summable

Level = Literal["token", "sequence"]


def weight_sums(correction: Correction, mask: Tensor, level: Level) -> summable.Summable:
    """Sums that the normalising factor is made of, to be added over micro-batches and ranks: `mean` over tokens, or
    over rows with tokens.
    """
    if level == "token":
        return summable.mean("weight", correction.weights, mask)
    return summable.mean("weight", row_mean(correction.weights, mask), mask.any(dim=1))


def normalized(correction: Correction, sums: Mapping[str, Tensor | float]) -> Correction:
    """w~ = w / mean(w), with the mean of `sums` (`weight_sums` of the whole minibatch, truncation included).

    A mean of at most 1e-8 leaves the weights as they are. Source: verl's rollout correction.
    """
    factor = summable.finalize(sums).get("weight", 0.0)
    return correction if factor <= 1e-8 else replace(correction, weights=correction.weights / factor)
