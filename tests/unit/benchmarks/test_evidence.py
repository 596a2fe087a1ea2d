"""The sandbox of the evidence: every dynamic program against a sum over all walks, or against sampling."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.evidence.chain import DIRECTIONS, Array, Chain, Divergence, at_distance, softmax
from benchmarks.evidence.estimators import FAMILIES, Answers, exact, moments
from benchmarks.evidence.flip_bias import RoutedPolicy, settings, token_bias
from benchmarks.evidence.lag_tolerance import BATCH, Run, direction, train
from benchmarks.evidence.tasks import reasoning
from benchmarks.evidence.trm_bounds import bounds

LENGTH = 4


def small(seed: int) -> tuple[Chain, Array, Array]:
    rng = np.random.default_rng(seed)
    chain = Chain(rng.integers(0, 3, (3, 2)), rng.random(3), 0, LENGTH)
    return chain, softmax(rng.normal(size=(3, 2))), softmax(rng.normal(size=(3, 2)))


def walks(chain: Chain, mu: Array, pi: Array) -> list[tuple[float, Array, Array, float]]:
    """Probability under mu, log-ratios `[T]`, scores `[T, S, V]` and reward of every answer."""
    found = []
    for tokens in itertools.product(range(chain.num_tokens), repeat=chain.length):
        state, chance, ratios, scores = chain.first, 1.0, [], []
        for token in tokens:
            chance *= mu[state, token]
            ratios.append(np.log(pi[state, token] / mu[state, token]))
            score = np.zeros_like(pi)
            score[state] = -pi[state]
            score[state, token] += 1
            scores.append(score)
            state = int(chain.next_state[state, token])
        found.append((chance, np.array(ratios), np.stack(scores), float(chain.reward[state])))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_surrogate_are_sums_over_all_walks(seed: int) -> None:
    chain, mu, pi = small(seed)
    every = walks(chain, mu, pi)
    assert chain.value(mu) == pytest.approx(sum(chance * reward for chance, _, _, reward in every))
    gradient = sum(chance * np.exp(ratios.sum()) * reward * scores.sum(0) for chance, ratios, scores, reward in every)
    np.testing.assert_allclose(chain.gradient(pi), gradient, atol=1e-12)
    surrogate = sum(chance * reward * (np.exp(ratios) - 1).sum() for chance, ratios, _, reward in every)
    assert chain.surrogate(mu, pi) == pytest.approx(surrogate)
    assert chain.chi2(mu, pi) == pytest.approx(sum(c * np.exp(2 * ratios.sum()) for c, ratios, _, _ in every) - 1)
    between = Divergence.between(chain, mu, pi)
    assert between.sequence_kl == pytest.approx(-sum(chance * ratios.sum() for chance, ratios, _, _ in every))


def test_gradient_is_the_derivative_of_the_value() -> None:
    chain, logits = reasoning(1, 6)
    gradient = chain.gradient(softmax(logits))
    for place in ((0, 0), (3, 5), (11, 2)):
        moved = logits.copy()
        moved[place] += 1e-5
        slope = (chain.value(softmax(moved)) - chain.value(softmax(logits))) / 1e-5
        assert gradient[place] == pytest.approx(slope, abs=1e-5)


def test_the_natural_gradient_is_the_gradient_times_the_inverse_of_fishers_information() -> None:
    """The information of an answer is the sum of score products over all walks; it has no inverse for equal shifts."""
    chain, mu, _ = small(2)
    information = sum(
        chance * np.einsum("ti,tj->ij", flat := scores.reshape(LENGTH, -1), flat)
        for chance, _, scores, _ in walks(chain, mu, mu)
    )
    expected = np.linalg.pinv(information) @ chain.gradient(mu).ravel()
    direction_SV = chain.natural_gradient(mu)
    # A shift of all logits of a context changes no policy, and the pseudo-inverse has none.
    centred = (direction_SV - direction_SV.mean(1, keepdims=True)).ravel()
    np.testing.assert_allclose(centred, expected, atol=1e-10)


@pytest.mark.parametrize("power", [1.0, 0.5, 1 / LENGTH])
def test_moments_of_sequence_ratios_are_sums_over_all_walks(power: float) -> None:
    chain, mu, pi = small(7)
    every, baseline = walks(chain, mu, pi), chain.value(mu)
    each = [
        (chance, np.exp(power * ratios.sum()) * (reward - baseline) * scores.sum(0))
        for chance, ratios, scores, reward in every
    ]
    mean, square = chain.sequence_moments(mu, pi, power)
    np.testing.assert_allclose(mean, sum(chance * value for chance, value in each), atol=1e-12)
    assert square == pytest.approx(sum(chance * (value**2).sum() for chance, value in each))


@pytest.mark.parametrize("name", ["token", "prefix", "sequence", "no ratio"])
def test_estimates_meet_the_dynamic_program(name: str) -> None:
    chain, logits = reasoning(3, 16)
    rng = np.random.default_rng(0)
    mu = softmax(logits)
    pi = at_distance(chain, logits, rng.normal(size=logits.shape), 3e-3)
    answers = Answers.sample(chain, mu, pi, 40_000, rng)
    estimated = moments(chain, mu, pi, answers, FAMILIES[name](answers.log_ratios))
    visits_mu, visits_pi = chain.visits(mu), chain.visits(pi)
    expected = {
        "token": (visits_mu, chain.action_values(mu)),
        "prefix": (visits_pi, chain.action_values(mu)),
        "sequence": (visits_pi, chain.action_values(pi)),
    }
    if name in expected:
        # The baseline changes no mean but that of sequence ratios by J(mu), whose scores have mean zero under pi.
        mean = chain.expected_gradient(expected[name][0], pi, expected[name][1])
        distance = float(((estimated.mean - mean) ** 2).sum())
        assert distance < 4 * estimated.variance / len(answers.rewards)
    else:
        # Without ratios tokens come from mu, and the scores of pi no longer have mean zero: it is biased.
        assert estimated.squared_bias(chain.gradient(pi)) > 10 * estimated.variance / len(answers.rewards)


def test_on_policy_every_estimator_is_the_same_and_unbiased() -> None:
    chain, logits = reasoning(5, 32)
    pi, rng = softmax(logits), np.random.default_rng(1)
    answers = Answers.sample(chain, pi, pi, 20_000, rng)
    one = exact(chain, pi, pi, 1.0)
    assert one.squared_bias(chain.gradient(pi)) < 1e-20
    for name in ("no ratio", "token", "turn", "prefix", "sequence, at most 2", "geometric mean"):
        found = moments(chain, pi, pi, answers, FAMILIES[name](answers.log_ratios))
        assert found.variance == pytest.approx(one.variance, rel=0.1)


def test_masks_reject_a_tenth() -> None:
    chain, logits = reasoning(2, 64)
    rng = np.random.default_rng(4)
    mu = softmax(logits)
    pi = at_distance(chain, logits, rng.normal(size=logits.shape), 1e-3)
    answers = Answers.sample(chain, mu, pi, 1000, rng)
    for name in ("token, TRM-Max", "token, LN-TRM"):
        kept = (FAMILIES[name](answers.log_ratios) > 0).all(1).mean()
        # The largest ratio of an answer has few values, and a threshold cannot cut between equal ones.
        assert 0.85 <= kept <= 0.98, name


@pytest.mark.parametrize("token_kl", [1e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("recovery", [0.0, 1 / 16])
@pytest.mark.parametrize("way", DIRECTIONS)
def test_no_bound_is_below_the_error(token_kl: float, recovery: float, way: str) -> None:
    for seed in range(5):
        chain, logits = reasoning(seed, 24, recovery=recovery)
        mu = softmax(logits)
        drawn = np.random.default_rng(seed).normal(size=logits.shape)
        pi = at_distance(chain, logits, DIRECTIONS[way](chain, mu, drawn), token_kl)
        assert Divergence.between(chain, mu, pi).token_kl == pytest.approx(token_kl, rel=1e-6)
        error = abs(chain.value(pi) - chain.value(mu) - chain.surrogate(mu, pi))
        for name, bound in bounds(Divergence.between(chain, mu, pi)).items():
            assert bound >= error, name


def test_flips_are_as_many_as_asked_for_and_no_flips_no_bias() -> None:
    chain, base = reasoning(0, 16)
    policy = RoutedPolicy.random(base, 8, 0)
    for same_kl in (False, True):
        spread, noise = settings(chain, policy, 0.03, same_kl)
        visits = chain.visits(policy.learner(spread)).mean(0)
        assert policy.flipped(visits, noise) == pytest.approx(0.03, rel=1e-3)
    assert token_bias(chain, policy.learner(1.0), policy.learner(1.0)) < 1e-12
    assert token_bias(chain, policy.rollout(1.0, 0.5), policy.learner(1.0)) > 1e-4


def test_training_in_the_sandbox_learns_and_lag_costs_effective_samples() -> None:
    fresh = train("oapl", 8, 0.0, 0.03, 1, 0, 200)
    stale = train("oapl", 8, 0.0, 0.03, 100, 0, 200)
    assert fresh.rewards[-1] > 0.6 > 0.5 > fresh.rewards[0]
    assert 0 < stale.ess < fresh.ess <= 1
    assert fresh.is_stable(fresh)
    assert not Run((0.2, 0.9, 0.5), 1.0).is_stable(Run((0.5,), 1.0)), "it lost more than 30% for good"
    assert not Run((0.2, 0.4), 1.0).is_stable(Run((0.5,), 1.0)), "it ends below lag 1"


def test_the_direction_is_the_gradient_on_average() -> None:
    chain, logits = reasoning(0, 8, success=0.3)
    pi, rng = softmax(logits), np.random.default_rng(0)
    mean = np.mean([direction("token", chain, pi, pi, rng) for _ in range(600)], axis=0)
    gradient = chain.gradient(pi)
    # The batch's own mean as a baseline shrinks it by one answer in `BATCH`.
    np.testing.assert_allclose(mean, gradient * (1 - 1 / BATCH), atol=0.1 * np.abs(gradient).max())
