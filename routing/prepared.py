"""The records of a micro-batch as this rank replays them: checked and cut once, for all passes over it.

A micro-batch is scored and then trained, with the same records, tokens and layout. The result of the first pass stays
with its source (`ReplayRecords.kept`), on the host and in the records' own type. It serves a pass with this source only
if that has equal tokens and the same layout. Two cuts take twice the memory of the records. So only small ones are kept
(`KEPT_BYTES`): there it is the number of calls that takes time. Of long micro-batches they are made for each pass.

Shape letters: B sequences, R columns, N local tokens in router order, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routing.packed_layout import AnyLayout
from routing.proof import due_by_sample, due_tokens, free_tokens
from routing.record import RouteRecord

KEPT_BYTES = 1 << 20
"""Largest cut of a micro-batch that is kept for its further passes."""


@dataclass(frozen=True)
class Tokens:
    """A micro-batch before any cut, and its layout.

    Attributes:
        layout: this rank's cut.
        input_ids, target_ids, valid: `[B, R]`.
    """

    layout: AnyLayout
    input_ids: Tensor
    target_ids: Tensor
    valid: Tensor

    def copy(self) -> Tokens:
        """The same in memory of its own, which nobody else writes to."""
        return Tokens(self.layout, self.input_ids.clone(), self.target_ids.clone(), self.valid.clone())

    def same(self, other: Tokens) -> bool:
        """True when both are one micro-batch, value by value."""
        ours, theirs = ((own.input_ids, own.target_ids, own.valid) for own in (self, other))
        return self.layout == other.layout and all(
            (one.device, one.dtype) == (another.device, another.dtype) and torch.equal(one, another)
            for one, another in zip(ours, theirs, strict=True)
        )


@dataclass(frozen=True)
class Due:
    """Local tokens of a micro-batch, on the host.

    Attributes:
        due: `[N]` bool, those that must use recorded routes; `by_sample` `[B]` of each sequence.
        free: `[N]` bool, real ones without recorded routes; None: there are none.
    """

    due: Tensor
    free: Tensor | None
    by_sample: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], layout: AnyLayout, records: Sequence[RouteRecord | None] = ()) -> Due:
        """Of sequences with `lengths` tokens; without `records` all of these have routes."""
        due_N, free_N = due_tokens(lengths, layout), free_tokens(records, layout)
        if free_N is not None:
            due_N = due_N & ~free_N
        return cls(due_N, free_N, due_by_sample(due_N, layout))


@dataclass(frozen=True)
class Prepared:
    """What was made of the records of one source.

    Attributes:
        tokens: the micro-batch that they were checked against; no other is served.
        given: `[L, N, K]`, the routes that the routers are given.
        expected: likewise, the second cut, which the proof compares with.
        due: the tokens that must use them.
    """

    tokens: Tokens
    given: np.ndarray
    expected: np.ndarray
    due: Due
