"""Estimators of the policy gradient from answers of an older policy, by the unit over which ratios are multiplied.

Every estimator is g = sum_t c_t (R - b) grad log pi(a_t|s_t) with b = J(mu); they differ in the weights c_t alone.

Shape letters: N answers, T tokens, S states, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.evidence.chain import Array, Chain, Ints
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.ratios import LogRatios

CAP = 2.0
TURN = 16
"""Tokens of a turn."""
REJECTED = 0.1
"""Share of answers that a mask rejects."""


@dataclass(frozen=True)
class Answers:
    """Sampled answers with the log-ratios log pi - log mu of their tokens, `[N, T]`."""

    states: Ints
    tokens: Ints
    rewards: Array
    log_ratios: Array

    @classmethod
    def sample(cls, chain: Chain, mu_SV: Array, pi_SV: Array, number: int, rng: np.random.Generator) -> Answers:
        states, tokens, rewards = chain.sample(mu_SV, number, rng)
        return cls(states, tokens, rewards, np.log(pi_SV[states, tokens] / mu_SV[states, tokens]))


def turns(log_ratios: Array) -> Array:
    """The ratio of the turn of each token."""
    number, length = log_ratios.shape
    turn_sums = log_ratios.reshape(number, length // TURN, TURN).sum(-1, keepdims=True)
    return np.asarray(np.exp(np.broadcast_to(turn_sums, (number, length // TURN, TURN)).reshape(number, length)))


def masked(rule: str, **fixed: float) -> Callable[[Array], Array]:
    """Token ratios of the answers that the rule keeps, its threshold set to reject a tenth of them."""

    def weights(log_ratios: Array) -> Array:
        values = torch.from_numpy(log_ratios)
        zero = torch.zeros_like(values)
        ratios = LogRatios(zero, zero, values, torch.ones_like(values, dtype=torch.bool))
        # Negative advantage: rules that look at one side judge every answer.
        evidence, registered_rule = Evidence(ratios, zero - 1), corrections.get(rule)
        bound = corrections.calibrate(
            registered_rule, [corrections.scores(registered_rule, evidence, **fixed)], REJECTED, **fixed
        )
        return np.asarray(np.exp(log_ratios) * bound(evidence).keep.numpy())

    return weights


FAMILIES: Mapping[str, Callable[[Array], Array]] = {
    "no ratio": np.ones_like,
    "token": np.exp,
    "token, at most 2": lambda log_ratios: np.minimum(np.exp(log_ratios), CAP),
    "turn": turns,
    "prefix": lambda log_ratios: np.exp(log_ratios.cumsum(1)),
    "prefix, at most 2": lambda log_ratios: np.minimum(np.exp(log_ratios.cumsum(1)), CAP),
    "geometric mean": lambda log_ratios: np.exp(np.broadcast_to(log_ratios.mean(1, keepdims=True), log_ratios.shape)),
    "sequence": lambda log_ratios: np.exp(np.broadcast_to(log_ratios.sum(1, keepdims=True), log_ratios.shape)),
    "sequence, at most 2": lambda log_ratios: np.minimum(
        np.exp(np.broadcast_to(log_ratios.sum(1, keepdims=True), log_ratios.shape)), CAP
    ),
    "token, TRM-Max": masked("trm_max"),
    "token, LN-TRM": masked("ln_trm", delta=0.02),
}
"""Weights `[N, T]` of each estimator from log-ratios `[N, T]`."""


@dataclass(frozen=True)
class Moments:
    """Mean of an estimator, and the variance of one answer's.

    Attributes:
        mean: `[S, V]`, E[g].
        variance: tr Var(g).
        number: answers they were estimated from; None: exact.
    """

    mean: Array
    variance: float
    number: int | None = None

    def progress(self, gradient_SV: Array, batch: int) -> float:
        """The SGA progress proxy <grad J, E g>^2 / (tr Var(g) / batch + |Bias(g)|^2) of a batch of answers."""
        return float((gradient_SV * self.mean).sum() ** 2 / (self.variance / batch + self.squared_bias(gradient_SV)))

    def squared_bias(self, gradient_SV: Array) -> float:
        """|E g - grad J|^2, without what the estimation of the mean adds, and not below 0."""
        noise = 0.0 if self.number is None else self.variance / self.number
        return max(0.0, float(((self.mean - gradient_SV) ** 2).sum()) - noise)


def moments(chain: Chain, mu_SV: Array, pi_SV: Array, answers: Answers, weights: Array) -> Moments:
    """Moments of the estimator with these weights `[N, T]`, estimated from the answers."""
    number, (num_states, num_tokens) = len(answers.rewards), pi_SV.shape
    factors = weights * (answers.rewards - chain.value(mu_SV))[:, None]
    places = (np.arange(number)[:, None] * num_states + answers.states) * num_tokens + answers.tokens
    taken = np.bincount(places.ravel(), factors.ravel(), number * num_states * num_tokens)
    taken_NSV = taken.reshape(number, num_states, num_tokens)
    gradients_NSV = taken_NSV - pi_SV * taken_NSV.sum(-1, keepdims=True)
    mean_SV = gradients_NSV.mean(0)
    return Moments(mean_SV, float(((gradients_NSV - mean_SV) ** 2).sum() / (number - 1)), number)


def exact(chain: Chain, mu_SV: Array, pi_SV: Array, power: float) -> Moments:
    """Moments of the estimator with weight W^power, without sampling: its tails are too heavy for it."""
    mean_SV, square = chain.sequence_moments(mu_SV, pi_SV, power)
    return Moments(mean_SV, square - float((mean_SV**2).sum()))
