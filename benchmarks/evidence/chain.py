"""A tabular policy that walks an automaton: value, gradient and divergences are exact, by dynamic programming.

A language model in miniature. A context is a state, an answer is a walk of T tokens, a verifier sees where it ended.
What can only be estimated on a real model (the gradient of the expected reward, the bias of an estimator, the error of
a surrogate, the divergence of whole answers) is a sum here.

Shape letters: S states, V tokens, T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """A task.

    Attributes:
        next_state: `[S, V]`, the state after each token.
        reward: `[S]`, reward of an answer that ends in this state, between 0 and 1.
        first: state of the prompt.
        length: tokens of every answer, T.
    """

    next_state: Ints
    reward: Array
    first: int
    length: int

    @property
    def num_states(self) -> int:
        return len(self.next_state)

    @property
    def num_tokens(self) -> int:
        return int(self.next_state.shape[1])

    def step(self, weights_SV: Array, values_S: Array) -> Array:
        """sum_a weights(s, a) values(s) moved to the states that follow, `[S]`."""
        moved = (weights_SV * values_S[:, None]).ravel()
        return np.asarray(np.bincount(self.next_state.ravel(), moved, self.num_states), np.float64)

    def begin(self) -> Array:
        """Distribution of the first state, `[S]`."""
        start = np.zeros(self.num_states)
        start[self.first] = 1.0
        return start

    def visits(self, policy_SV: Array) -> Array:
        """d_t(s), the distribution of the context of each token, `[T, S]`."""
        visits = [self.begin()]
        for _ in range(self.length - 1):
            visits.append(self.step(policy_SV, visits[-1]))
        return np.stack(visits)

    def actions_back(self, policy_SV: Array) -> Iterator[Array]:
        """Q_t(s, a), the expected reward after token a in context s, `[S, V]` for t = T, ..., 1."""
        value_S = self.reward
        for _ in range(self.length):
            action_SV = value_S[self.next_state]
            yield action_SV
            value_S = (policy_SV * action_SV).sum(1)

    def action_values(self, policy_SV: Array) -> Array:
        """Q_t(s, a) for all tokens, `[T, S, V]`."""
        return np.stack(list(self.actions_back(policy_SV))[::-1])

    def value(self, policy_SV: Array) -> float:
        """J(pi), the expected reward."""
        *_, first = self.actions_back(policy_SV)
        return float(policy_SV[self.first] @ first[self.first])

    def gradient(self, policy_SV: Array) -> Array:
        """The gradient of J by the logits, `[S, V]`: sum_t d_t(s) pi(a|s) (Q_t(s, a) - V_t(s))."""
        return self.expected_gradient(self.visits(policy_SV), policy_SV, self.action_values(policy_SV))

    def expected_gradient(self, visits_TS: Array, policy_SV: Array, actions_TSV: Array) -> Array:
        """E sum_t R grad log pi(a_t|s_t), `[S, V]`, where tokens come from `policy_SV`, contexts and what follows may
        come from others.

        With contexts of mu and rewards of mu it is the mean of token-level importance sampling; with contexts of pi and
        rewards of mu the mean of prefix weights; with both of pi the gradient of J.
        """
        weighted_SV = np.einsum("ts,tsa->sa", visits_TS, actions_TSV) * policy_SV
        return np.asarray(weighted_SV - policy_SV * weighted_SV.sum(1, keepdims=True))

    def natural_gradient(self, policy_SV: Array) -> Array:
        """The gradient times the inverse of Fisher's information of an answer, `[S, V]`: the mean advantage of a token
        over the visits of its context; 0 where no answer comes.
        """
        visits_S = self.visits(policy_SV).sum(0)[:, None]
        weights_SV = np.where(visits_S > 0, visits_S * policy_SV, np.inf)
        return np.asarray(self.gradient(policy_SV) / weights_SV)

    def surrogate(self, mu_SV: Array, pi_SV: Array) -> float:
        """E_mu[R sum_t (w_t - 1)], the first-order estimate of J(pi) - J(mu)."""
        visits_TS, actions_TSV = self.visits(mu_SV), self.action_values(mu_SV)
        return float(np.einsum("ts,tsa,sa->", visits_TS, actions_TSV, pi_SV - mu_SV))

    def chi2(self, mu_SV: Array, pi_SV: Array) -> float:
        """chi2(pi || mu) of whole answers, E_mu[W^2] - 1. The effective share of answers is 1 / (1 + chi2)."""
        tilted_SV, mass_S = pi_SV**2 / mu_SV, self.begin()
        for _ in range(self.length):
            mass_S = self.step(tilted_SV, mass_S)
        return float(mass_S.sum() - 1)

    def sequence_moments(self, mu_SV: Array, pi_SV: Array, power: float) -> tuple[Array, float]:
        """E[g] `[S, V]` and E|g|^2 of g = W^power (R - b) sum_t grad log pi(a_t|s_t), with b = J(mu).

        `power` 1 is sequence-level importance sampling, 1 / T the geometric mean. Sums over walks of products are sums
        over states: with K = mu r^p, m0' = K m0, m1' = K (m1 + phi m0), m2' = K (m2 + 2 phi m1 + |phi|^2 m0).
        """
        baseline = self.value(mu_SV)
        mean = self._tilted(mu_SV * (pi_SV / mu_SV) ** power, pi_SV)[0]
        square = self._tilted(mu_SV * (pi_SV / mu_SV) ** (2 * power), pi_SV)[1]
        advantage_S = self.reward - baseline
        return np.tensordot(advantage_S, mean, 1).astype(np.float64), float(advantage_S**2 @ square)

    def _tilted(self, kernel_SV: Array, pi_SV: Array) -> tuple[Array, Array]:
        """m1 `[S, S, V]` and m2 `[S]` after T tokens, by last state."""
        num_states, num_tokens = self.num_states, self.num_tokens
        score = np.eye(num_tokens)[None] - pi_SV[:, None]  # [S, V of the token, V of the logit]
        norm_SV = (score**2).sum(-1)
        mass_S, second_S = self.begin(), np.zeros(num_states)
        first = np.zeros((num_states, num_states, num_tokens))
        for _ in range(self.length):
            along_SV = np.einsum("sal,sl->sa", score, first[np.arange(num_states), np.arange(num_states)])
            second_SV = kernel_SV * (second_S[:, None] + 2 * along_SV + norm_SV * mass_S[:, None])
            moved = kernel_SV[:, :, None, None] * first[:, None]
            states = np.arange(num_states)
            moved[states, :, states] += kernel_SV[..., None] * score * mass_S[:, None, None]
            first = np.zeros_like(first)
            np.add.at(first, self.next_state, moved)
            second_S = self.step(second_SV, np.ones(num_states))
            mass_S = self.step(kernel_SV, mass_S)
        return first, second_S

    def sample(self, policy_SV: Array, number: int, rng: np.random.Generator) -> tuple[Ints, Ints, Array]:
        """Contexts and tokens `[number, T]`, and rewards `[number]`, of answers from `policy_SV`."""
        cumulative_SV = policy_SV.cumsum(1)
        state = np.full(number, self.first)
        states, tokens = (np.empty((number, self.length), np.int64) for _ in range(2))
        for place in range(self.length):
            draws = rng.random(number)
            token = np.minimum((draws[:, None] > cumulative_SV[state]).sum(1), self.num_tokens - 1)
            states[:, place], tokens[:, place] = state, token
            state = self.next_state[state, token]
        return states, tokens, self.reward[state]


@dataclass(frozen=True)
class Divergence:
    """Two policies apart, over the contexts that can be reached.

    Attributes:
        kl: `[S]`, KL(mu || pi) of the token in each context.
        tv: `[S]`, its total variation.
        visits: `[T, S]`, of mu.
    """

    kl: Array
    tv: Array
    visits: Array

    @classmethod
    def between(cls, chain: Chain, mu_SV: Array, pi_SV: Array) -> Divergence:
        kl_S = (mu_SV * np.log(mu_SV / pi_SV)).sum(1)
        return cls(kl_S, 0.5 * np.abs(mu_SV - pi_SV).sum(1), chain.visits(mu_SV))

    @property
    def reached(self) -> NDArray[np.bool_]:
        """`[S]`"""
        return np.asarray(self.visits.any(0))

    @property
    def largest_kl(self) -> float:
        """delta, over all contexts."""
        return float(self.kl[self.reached].max())

    @property
    def largest_tv(self) -> float:
        """epsilon, over all contexts."""
        return float(self.tv[self.reached].max())

    @property
    def sequence_kl(self) -> float:
        """KL of whole answers, the sum of the tokens'."""
        return float((self.visits @ self.kl).sum())

    @property
    def token_kl(self) -> float:
        """Mean KL of a token under mu."""
        return self.sequence_kl / len(self.visits)

    @property
    def tv_by_token(self) -> Array:
        """Mean total variation of each token."""
        return self.visits @ self.tv


def softmax(logits_SV: Array) -> Array:
    """Probabilities of each row."""
    raised = np.exp(logits_SV - logits_SV.max(1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


DIRECTIONS: Mapping[str, Callable[[Chain, Array, Array], Array]] = {
    "random": lambda _chain, _mu_SV, drawn_SV: drawn_SV,
    "against it": lambda _chain, _mu_SV, drawn_SV: -drawn_SV,
    "gradient": lambda chain, mu_SV, _drawn_SV: chain.gradient(mu_SV),
    "natural gradient": lambda chain, mu_SV, _drawn_SV: chain.natural_gradient(mu_SV),
}
"""Directions in which a policy leaves its sampler `mu`, of the logits `[S, V]`, by name; `drawn` is a random one."""


def at_distance(chain: Chain, logits_SV: Array, direction_SV: Array, token_kl: float) -> Array:
    """The policy along `direction_SV` from `logits_SV` whose token is `token_kl` nats away on average, `[S, V]`.

    The distance is KL(mu || pi) under mu, the policy of `logits_SV`.
    """
    mu_SV, low, high = softmax(logits_SV), 0.0, 1.0

    def distance(scale: float) -> float:
        return Divergence.between(chain, mu_SV, softmax(logits_SV + scale * direction_SV)).token_kl

    while distance(high) < token_kl:
        high *= 2
        assert high < 2**20, "this direction changes nothing"
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if distance(middle) < token_kl else (low, middle)
    return softmax(logits_SV + high * direction_SV)
