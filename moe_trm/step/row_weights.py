"""Importance weights of whole rows, which multiply every term of their loss: those of groups that were drawn again.

They correct for the draw, not for a mismatch. So they apply where corrections only measure, too, and no rule sees them.
Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_trm.corrections import Correction


def reweighted(correction: Correction, row_weights_B: Tensor | None) -> Correction:
    """The correction with each row's weights times the row's own; None: every row counts once."""
    return replace(correction, weights=weighed(correction.weights, row_weights_B))


def weighed(values_BT: Tensor, row_weights_B: Tensor | None) -> Tensor:
    """`[B, T]` values, each row times its weight."""
    return values_BT if row_weights_B is None else values_BT * row_weights_B.to(values_BT)[:, None]
