"""Training in the sandbox: Adam, and the ascent of a batch of answers."""

from __future__ import annotations

import numpy as np

from benchmarks.evidence.chain import Array, Chain
from benchmarks.evidence.estimators import Answers

BETAS = (0.9, 0.95)


class Adam:
    """Adam on one array.

    Args:
        rate: learning rate.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._updates = rate, 0
        self._first: Array | float = 0.0
        self._second: Array | float = 0.0

    def step(self, ascent: Array) -> Array:
        """The step to add to the parameters."""
        self._updates += 1
        self._first = BETAS[0] * self._first + (1 - BETAS[0]) * ascent
        self._second = BETAS[1] * self._second + (1 - BETAS[1]) * ascent**2
        first = self._first / (1 - BETAS[0] ** self._updates)
        second = self._second / (1 - BETAS[1] ** self._updates)
        return np.asarray(self._rate * first / (np.sqrt(second) + 1e-8))


def ascent_of(chain: Chain, pi_SV: Array, answers: Answers, factors: Array) -> Array:
    """sum_t c_t grad log pi(a_t|s_t) by the logits, mean over answers, `[S, V]`; `factors` c is `[N, T]`."""
    places = (answers.states * chain.num_tokens + answers.tokens).ravel()
    taken_SV = np.bincount(places, factors.ravel(), pi_SV.size).reshape(pi_SV.shape) / len(answers.rewards)
    return np.asarray(taken_SV - pi_SV * taken_SV.sum(1, keepdims=True))
