"""Agreement of recorded routes with the live router, token by token: the test for faults of part of the tokens.

A mean over a sample or a batch hides a few wrong tokens. So each token is judged by itself, over all layers that this
rank forwards, and each layer token by token:

- `x` of the `n` recorded experts of a token are *lost*: the live router would not choose them. Routes without any
  relation to the token lose `c n` on average, with `c = 1 - K / E`. A token that loses at least `3/4 c n` *disagrees*.
- Rounding, and a router that has moved, spread over all tokens. Their share `m` of lost experts is taken from the
  tokens that agree. A token's own tendency to flip is drawn from a chi-squared distribution of mean 1, so that a clean
  token disagrees with probability `E[P(Binomial(n, 2 m chi2) >= 3/4 c n)]`, and `LEAST` at least: `p`.
- Of N tokens, the share `q` disagrees. It is refused when `N KL(q || p) >= EVIDENCE` (Hoeffding 1963, theorem 1) and `q
  >= p + max(p, EFFECT)`: in the batch, in a sample, or in a layer of the batch (there `n = K`, for K above 1).
- In a sample, tokens are scanned in their order. With `s = log(q1 / p)` for a token that disagrees and `log((1 - q1) /
  (1 - p))` for one that agrees, the sum over the best run of tokens reaches `EVIDENCE + log N` with a chance of at most
  `exp(-EVIDENCE)` in a clean sample (Ville's inequality, and a union over where the run begins).

Shape letters: N tokens, S samples, L layers, K experts per token, E experts.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lgamma, log
from typing import NamedTuple

import numpy as np

EVIDENCE = 14.0
"""Nats: one in a million for each sample, layer and batch."""
LEAST = 0.002
"""Share of tokens that may always disagree."""
EFFECT = 0.005
"""Share of tokens beyond the expected one, and at least as many again, below which nothing is refused."""
UNIT = 1 << 20
"""Expected tokens and nats are exchanged as whole numbers of this fraction."""
_IN_RUN = 0.9
"""`q1`: share of the tokens of a wrong run that disagree."""
_TENDENCIES = np.square(np.random.default_rng(0).standard_normal(4096)).reshape(-1)
_TENDENCIES = np.sort(_TENDENCIES)[::-1] / _TENDENCIES.mean()


class Disagreement(NamedTuple):
    """Counts of one forward by sample; `[S]` int64 each.

    Attributes:
        tokens: judged by themselves.
        apart: of these, how many disagree with their routes.
        expected: how many of a clean sample would, times `UNIT`.
        run: nats by which the best run of tokens speaks against the sample, times `UNIT`; 0 where none does.
        first, last: places of that run among the tokens of the sample.
    """

    tokens: np.ndarray
    apart: np.ndarray
    expected: np.ndarray
    run: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def nothing(cls, samples: int) -> Disagreement:
        """Nothing was judged."""
        return cls(*np.zeros((6, samples), np.int64))


def least_lost(slots: int, chance: float) -> int:
    """Lost experts from which a token of `slots` recorded ones disagrees."""
    return max(ceil(0.75 * chance * slots), 2)


def judged_by_token(slots: int, chance: float) -> bool:
    """True where tokens with unrelated routes mostly disagree, and single flips never do."""
    return chance > 0 and slots >= least_lost(slots, chance)


def clean_share(slots: int, least: int, tokens: float, lost: float) -> float:
    """`p`, from the number of tokens that agree and the experts that they lost."""
    mean = lost / max(tokens * slots, 1.0)
    return max(LEAST, _tail(slots, least, round(2 * mean, 4)))


def of_samples(lost_N: np.ndarray, sample_N: np.ndarray, samples: int, slots: int, chance: float) -> Disagreement:
    """Judge tokens by themselves.

    Args:
        lost_N: `[N]` lost experts of each judged token, over all layers of this rank.
        sample_N: `[N]` the sample of each, ascending; tokens of one sample are in their order.
        samples: S.
        slots: recorded experts of a token over these layers.
        chance: `c`.
    """
    if not judged_by_token(slots, chance) or not len(lost_N):
        return Disagreement.nothing(samples)
    least = least_lost(slots, chance)
    apart_N = lost_N >= least
    share = clean_share(slots, least, len(lost_N) - int(apart_N.sum()), float(lost_N[~apart_N].sum()))
    tokens = np.bincount(sample_N, minlength=samples)
    num_apart = np.bincount(sample_N[apart_N], minlength=samples)
    disagreement = Disagreement(
        tokens, num_apart, np.round(tokens * share * UNIT).astype(np.int64), *np.zeros((3, samples), np.int64)
    )
    ends = np.cumsum(tokens)
    for sample_place in np.flatnonzero(num_apart > 1):
        start = ends[sample_place] - tokens[sample_place]
        _scan(disagreement, int(sample_place), apart_N[start : ends[sample_place]], share)
    return disagreement


def _scan(disagreement: Disagreement, sample: int, apart_T: np.ndarray, share: float) -> None:
    """The best run of tokens of one sample (Kadane)."""
    if share >= _IN_RUN:
        return
    scores = np.where(apart_T, log(_IN_RUN / share), log((1 - _IN_RUN) / (1 - share)))
    sums = np.concatenate([[0.0], np.cumsum(scores)])
    lowest = np.minimum.accumulate(sums)
    last = int(np.argmax(sums - lowest))
    nats = float(sums[last] - lowest[last]) - log(len(apart_T))
    if nats > 0:
        disagreement.run[sample] = round(nats * UNIT)
        disagreement.first[sample] = int(np.argmin(sums[: last + 1]))
        disagreement.last[sample] = last - 1


def evidence(share: float, usual: float, number: float) -> float:
    """`N KL(q || p)` in nats, 0 where the share `q` is not above `p` by `EFFECT` and by `p`."""
    if number <= 0 or share < usual + max(usual, EFFECT):
        return 0.0
    return number * float(kl(np.array(share), np.array(min(max(usual, 1e-9), 1 - 1e-9))))


def kl(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """KL divergence of two coins, nats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(q > 0, q * np.log(q / p), 0.0)
        tails = np.where(q < 1, (1 - q) * np.log((1 - q) / (1 - p)), 0.0)
    return np.asarray(heads + tails, dtype=np.float64)


@lru_cache(maxsize=256)
def _tail(slots: int, least: int, mean: float) -> float:
    """`E[P(Binomial(slots, mean g) >= least)]` over the tendency `g` of a token."""
    rates = np.clip(mean * _TENDENCIES, 1e-12, 0.95)[:, None]
    counts = np.arange(least, slots + 1)
    choose = np.array([lgamma(slots + 1) - lgamma(k + 1) - lgamma(slots - k + 1) for k in counts])
    logs = choose + counts * np.log(rates) + (slots - counts) * np.log1p(-rates)
    return float(np.minimum(np.exp(logs).sum(1), 1.0).mean())
