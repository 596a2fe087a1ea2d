"""Importance weights of whole rows, which multiply every term of their loss: those of groups that were drawn again.

They correct for the draw, not for a mismatch. So no rule and no loss sees them: a loss need not be linear in the
weights of corrections. Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from torch import Tensor


def weighed(values_BT: Tensor, row_weights_B: Tensor | None) -> Tensor:
    """`[B, T]` token losses, each row times its weight; None: every row counts once."""
    return values_BT if row_weights_B is None else values_BT * row_weights_B.to(values_BT)[:, None]
