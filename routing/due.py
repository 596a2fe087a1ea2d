"""The local tokens of a micro-batch that must use recorded routes.

Shape letters: B sequences, N local tokens in router order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from routing.packed_layout import AnyLayout
from routing.proof import due_by_sample, due_tokens, free_tokens
from routing.record import RouteRecord


@dataclass(frozen=True)
class DueTokens:
    """Local tokens of a micro-batch, on the host.

    Attributes:
        due: `[N]` bool, those that must use recorded routes; `by_sample` `[B]` of each sequence.
        free: `[N]` bool, real ones without recorded routes; None: there are none.
    """

    due: Tensor
    free: Tensor | None
    by_sample: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], layout: AnyLayout, records: Sequence[RouteRecord | None] = ()) -> DueTokens:
        """Due routes of sequences with `lengths` tokens; without `records`, all tokens have routes."""
        due_N, free_N = due_tokens(lengths, layout), free_tokens(records, layout)
        if free_N is not None:
            due_N = due_N & ~free_N
        return cls(due_N, free_N, due_by_sample(due_N, layout))
