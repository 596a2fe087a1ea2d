"""The published figures, and every bound on exactly enumerated trees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

import moe_trm.diagnostics.certificate as bounds

T, DELTA = 4096, 1e-4


def test_published_figures() -> None:
    assert bounds.classical(T, DELTA) == pytest.approx(1677, abs=0.5)
    small_divergence = 4 / 3 * T**1.5 * DELTA
    assert small_divergence == pytest.approx(35.0, abs=0.06)
    assert bounds.pinsker_marginal(T, DELTA) == pytest.approx(34.95, abs=0.05)
    assert bounds.mixed(T, DELTA, 0.01) == pytest.approx(8.2, abs=0.01)
    assert bounds.linear(T, DELTA) == pytest.approx(115.9, abs=0.05)
    uniform = [math.sqrt(DELTA / 2)] * T
    assert bounds.adaptive(uniform, DELTA) == pytest.approx(bounds.pinsker_marginal(T, DELTA))
    assert bounds.certificate(T, DELTA, 0.01, uniform)["tightest"] == pytest.approx(8.19, abs=0.005)


@pytest.mark.parametrize(("delta", "value"), [(1e-3, 306.7), (1e-2, 1139.5), (0.1, 3657)])
def test_capped_regime(delta: float, value: float) -> None:
    assert bounds.pinsker_marginal(T, delta) == pytest.approx(value, rel=2e-4)


@pytest.mark.parametrize(
    ("p", "table"),
    [
        (1e-3, {256: 0.774, 1024: 0.359, 4096: 0.0166, 8192: 0.000276}),
        (1e-4, {256: 0.975, 1024: 0.903, 4096: 0.664, 8192: 0.441, 16384: 0.194}),
    ],
)
def test_acceptance_table(p: float, table: dict[int, float]) -> None:
    for horizon, value in table.items():
        assert bounds.acceptance_probability(horizon, p) == pytest.approx(value, abs=6e-4)


class Tree:
    """Two policies over V tokens and T steps with a random reward for each answer, enumerated without sampling."""

    def __init__(self, seed: int, spread: float, V: int = 3, T: int = 4) -> None:
        rng = np.random.default_rng(seed)
        self.T = T
        self.contexts = [c for n in range(T) for c in itertools.product(range(V), repeat=n)]
        logits = {c: rng.normal(size=V) for c in self.contexts}
        self.mu = {c: self._softmax(z) for c, z in logits.items()}
        self.pi = {c: self._softmax(z + spread * rng.normal(size=V)) for c, z in logits.items()}
        self.answers = list(itertools.product(range(V), repeat=T))
        self.reward = {y: rng.random() for y in self.answers}

    @staticmethod
    def _softmax(z: np.ndarray) -> np.ndarray:
        p = np.exp(z - z.max())
        return p / p.sum()

    def probability(self, policy: Mapping[tuple[int, ...], np.ndarray], y: tuple[int, ...]) -> float:
        return math.prod(policy[y[:t]][y[t]] for t in range(len(y)))

    def ratio(self, y: tuple[int, ...], t: int) -> float:
        return float(self.pi[y[:t]][y[t]] / self.mu[y[:t]][y[t]])

    def mean(self, f: Callable[[tuple[int, ...]], float]) -> float:
        return sum(self.probability(self.mu, y) * f(y) for y in self.answers)


@pytest.mark.parametrize(("seed", "spread"), list(itertools.product(range(4), (0.05, 0.3, 1.0))))
def test_every_bound_holds_on_enumerated_trees(seed: int, spread: float) -> None:
    tree = Tree(seed, spread)
    J = [sum(tree.probability(p, y) * r for y, r in tree.reward.items()) for p in (tree.mu, tree.pi)]
    surrogate = tree.mean(lambda y: tree.reward[y] * sum(tree.ratio(y, t) - 1 for t in range(tree.T)))
    error = J[1] - J[0] - surrogate
    kl = {c: float((tree.mu[c] * np.log(tree.mu[c] / tree.pi[c])).sum()) for c in tree.contexts}
    tv = {c: 0.5 * float(np.abs(tree.mu[c] - tree.pi[c]).sum()) for c in tree.contexts}
    delta = max(kl.values())
    sequence_kl = tree.mean(lambda y: sum(-math.log(tree.ratio(y, t)) for t in range(tree.T)))
    mean_tv = [sum(tree.probability(tree.mu, c) * tv[c] for c in tree.contexts if len(c) == t) for t in range(tree.T)]
    got = bounds.certificate(tree.T, delta, sequence_kl, mean_tv)
    for name, bound in got.items():
        assert abs(error) <= bound + 1e-12, name
    assert got["adaptive"] <= got["pinsker_marginal"] + 1e-12
    assert tree.mean(lambda y: sum(abs(tree.ratio(y, t) - 1) for t in range(tree.T))) == pytest.approx(2 * sum(mean_tv))
    k3 = tree.mean(lambda y: sum(tree.ratio(y, t) - 1 - math.log(tree.ratio(y, t)) for t in range(tree.T)))
    assert k3 == pytest.approx(sequence_kl)
    omega = [min(1.0, math.sqrt(delta * (tree.T - t) / 2)) for t in range(1, tree.T + 1)]
    weighted = tree.mean(lambda y: sum(omega[t] * abs(tree.ratio(y, t) - 1) for t in range(tree.T)))
    assert abs(error) <= 2 * weighted + 1e-12
