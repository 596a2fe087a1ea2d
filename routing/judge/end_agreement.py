"""Agreement at the ends of all samples together: the test for routes that go wrong at the same part of every sample.

Rows beside each other share experts. So few tokens disagree clearly where routes come a row late, and a fault of every
sample raises what is taken for rounding. But rounding does not know where a sample ends, and such a fault does.

- Windows are the first and the last 8, 16, 32, ... tokens of the samples, up to their middle. None is shorter, and
  samples of fewer than 16 tokens are left out: tokens at one place may be the same ones in all samples, such as those
  of a template, and flip together.
- Over all samples and layers, `q` of the recorded experts are lost in a window, and `r` outside of it. With `c = 1 -
  K / E`, which routes without any relation to the token lose, and `p` the larger of `2 r` and `SMALLEST`, the window
  is refused when `q >= p + c / 4`, and `N KL(q || p) >= EVIDENCE + log W` for its N tokens and W windows (Hoeffding
  1963, theorem 1, and a union over the windows).
- Only rows count that the weights of the forward sampled. A router that has moved may flip more often at one end.
"""

from __future__ import annotations

from math import log

import numpy as np

from routing.judge.token_agreement import EVIDENCE, kl

SHORTEST = 8
"""Tokens of the shortest window."""
SMALLEST = 0.02
"""Share of lost experts that is always explained by rounding."""
_BINS = 24
SHAPE = (2, _BINS, 2)
"""Beginning and end; tokens by their distance from it in powers of two; recorded and lost experts."""


def at_ends(lost_N: np.ndarray, sample_N: np.ndarray, slots: int) -> np.ndarray:
    """Recorded and lost experts `SHAPE` of tokens by their distance from the nearer end of their sample.

    Args:
        lost_N: `[N]` lost experts of each token.
        sample_N: `[N]` the sample of each, ascending; tokens of one sample are in their order.
        slots: recorded experts of a token.
    """
    counts = np.zeros(SHAPE, np.int64)
    if len(lost_N):
        starts = np.flatnonzero(np.diff(sample_N, prepend=sample_N[0] - 1))
        lengths = np.diff(starts, append=len(sample_N))
        from_start = np.arange(len(sample_N)) - np.repeat(starts, lengths)
        length = np.repeat(lengths, lengths)
        from_end = length - 1 - from_start
        _, bins = np.frexp(np.minimum(from_start, from_end) // SHORTEST)
        place = np.stack(((from_end < from_start).astype(np.int64), np.minimum(bins, _BINS - 1)))
        place, lost_N = place[:, length >= 2 * SHORTEST], lost_N[length >= 2 * SHORTEST]
        np.add.at(counts[..., 0], tuple(place), slots)
        np.add.at(counts[..., 1], tuple(place), lost_N)
    return counts


def wrong_ends(counts: np.ndarray, slots: int, chance: float) -> list[str]:
    """The windows that are refused, in words.

    Args:
        counts: of `at_ends`, summed over passes and ranks.
        slots: recorded experts of a token over all layers.
        chance: `c`.
    """
    inside = counts.cumsum(1)
    all_counts = counts.sum((0, 1))
    windows = int((counts[..., 0] > 0).sum())
    wrong = []
    for side, at in enumerate(("first", "last")):
        for place in np.flatnonzero(counts[side, :, 0]):
            window, outside = inside[side, place], all_counts - inside[side, place]
            if not outside[0]:
                continue
            share, elsewhere = window[1] / window[0], outside[1] / outside[0]
            usual = max(2 * elsewhere, SMALLEST)
            if share < usual + chance / 4:
                continue
            if window[0] / slots * float(kl(share, usual)) >= EVIDENCE + log(windows):
                wrong.append(
                    f"the {at} {SHORTEST << place} tokens of all samples: {share:.1%} of their recorded experts are "
                    f"others, {elsewhere:.1%} elsewhere"
                )
    return wrong
