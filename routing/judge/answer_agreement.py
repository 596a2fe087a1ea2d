"""Agreement behind the prompts: the test for routes of another answer to the same prompt.

Samples of one prompt have the same routes on it. So an engine that mixes them up records right routes for the rows of
the prompt, and for those behind it routes that mostly fit too: of tokens at the same place, after the same prompt.
Rounding makes no such difference between the two.

- Over all samples and layers, `q` of the recorded experts are lost behind the prompts, and `r` on them. With `p` the
  larger of `FACTOR r` and `SMALLEST`, it is refused when `q >= 2 p` and `N KL(q || p) >= EVIDENCE` for the N tokens
  behind the prompts (Hoeffding 1963, theorem 1).
- Only rows count that the weights of the forward sampled, and only prompts of `FEW` tokens and more in all.
"""

from __future__ import annotations

import numpy as np

from routing.judge.token_agreement import EVIDENCE, kl

FACTOR = 3.0
"""Times that rounding may flip more experts behind the prompts than on them."""
SMALLEST = 0.01
"""Share of lost experts behind the prompts that is always explained by rounding."""
FEW = 64
"""Tokens of prompts below which nothing is known of their rounding."""
SHAPE = (2, 2)
"""On the prompts and behind them; recorded and lost experts."""


def by_side(lost_N: np.ndarray, is_behind_N: np.ndarray, slots: int) -> np.ndarray:
    """Recorded and lost experts `SHAPE` of tokens with `lost_N` lost ones of `slots`."""
    sides = (lost_N[~is_behind_N], lost_N[is_behind_N])
    return np.array([(slots * len(lost), int(lost.sum())) for lost in sides], np.int64)


def wrong_answers(counts: np.ndarray, slots: int) -> list[str]:
    """The fault in words, in a list, or an empty one.

    Args:
        counts: of `by_side`, summed over passes and ranks.
        slots: recorded experts of a token over all layers.
    """
    (on_prompts, lost_there), (behind, lost) = counts.tolist()
    if on_prompts < FEW * slots or not behind:
        return []
    share, on_them = lost / behind, lost_there / on_prompts
    usual = max(FACTOR * on_them, SMALLEST)
    if share < 2 * usual or behind / slots * float(kl(np.array(share), np.array(usual))) < EVIDENCE:
        return []
    return [
        f"behind the prompts {share:.1%} of the recorded experts are others, on them {on_them:.1%}: these may be the "
        "routes of other answers to the same prompts"
    ]
