"""Routes that go wrong at one end of all samples alike: which are found, and that clean steps never are.

In routes that come one row late, tokens lose six in ten of the experts that unrelated routes lose, as measured on tiny
models: neighbours share the others.
"""

from __future__ import annotations

import numpy as np
import pytest

from routing.judge.end_agreement import SHAPE, SHORTEST, at_ends, wrong_ends
from routing.judge.flip_bound import token_fault
from tests.unit.routing.test_token_agreement import SAMPLES, SHAPES, TOKENS, clean, flips_of, unrelated

MODELS = ["quickstart", "OLMoE", "Qwen3-30B"]
STEPS = 300


def judged(lost: np.ndarray, shape: str) -> list[str]:
    """The refusals of a step with these lost experts `[samples, tokens, layers]`, all samples fresh."""
    layers, top_k, experts = SHAPES[shape]
    counts = at_ends(lost.sum(2).ravel(), np.repeat(np.arange(len(lost)), lost.shape[1]), layers * top_k)
    return wrong_ends(counts, layers * top_k, 1 - top_k / experts)


def late(shape: str, rng: np.random.Generator) -> np.ndarray:
    """Lost experts where each token has the routes of the one before."""
    return np.asarray(rng.binomial(unrelated(shape, rng), 0.6))


def even(lost: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return lost


def more_at_the_end(lost: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The last tokens flip as often as drawn, the first ones a third as often."""
    return np.asarray(lost * (rng.random(lost.shape[:2]) < np.linspace(1 / 3, 1, TOKENS))[..., None])


def one_template(lost: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The first ten tokens and the last three are the same ones in all samples, and flip alike."""
    lost[:, :10], lost[:, -3:] = lost[:1, :10], lost[:1, -3:]
    return lost


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("drawn", [even, more_at_the_end, one_template])
def test_clean_steps_are_never_refused(shape: str, drawn: object) -> None:
    assert callable(drawn)
    rng = np.random.default_rng(7)
    for step in range(STEPS):
        assert not judged(drawn(clean(shape, (0.0, 0.01, 0.1)[step % 3], rng), rng), shape)


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("rate", [0.01, 0.1])
@pytest.mark.parametrize("share", [0.25, 0.4])
@pytest.mark.parametrize("at_end", [True, False])
def test_late_rows_at_one_end_of_three_quarters_of_the_samples_are_found(
    shape: str, rate: float, share: float, *, at_end: bool
) -> None:
    rng, number = np.random.default_rng(8), round(share * TOKENS)
    for _ in range(20):
        lost, wrong = clean(shape, rate, rng), late(shape, rng)
        own = slice(TOKENS - number, None) if at_end else slice(number)
        lost[: SAMPLES * 3 // 4, own] = wrong[: SAMPLES * 3 // 4, own]
        found = judged(lost, shape)
        assert found
        assert all(words.startswith(f"the {'last' if at_end else 'first'}") for words in found)


def test_only_rows_that_these_weights_sampled_are_judged() -> None:
    """A router that has moved since the older part of its rows was sampled flips there alone."""
    rng = np.random.default_rng(9)
    lost = clean("OLMoE", 0.01, rng)
    lost[:, : TOKENS // 4] = late("OLMoE", rng)[:, : TOKENS // 4]
    for at_sampling, found in ((True, True), (None, False), (False, False)):
        flips = flips_of(lost, "OLMoE", at_sampling=at_sampling)
        assert flips.ends.any() == found
    assert "the first 8 tokens of all samples" in str(token_fault(flips_of(lost, "OLMoE", at_sampling=True), 8, 64))


@pytest.mark.parametrize("shape", MODELS)
def test_ends_that_lose_twice_what_a_coarse_engine_loses_everywhere_are_rounding(shape: str) -> None:
    layers, top_k, _ = SHAPES[shape]
    rng = np.random.default_rng(11)
    rates = np.full((SAMPLES, TOKENS, layers), 0.16)
    rates[:, -SHORTEST:] = 0.32
    assert not judged(rng.binomial(top_k, rates), shape)
    rates[:, :-SHORTEST] = 0.01
    assert judged(rng.binomial(top_k, rates), shape)


def test_counts_against_a_loop_over_tokens() -> None:
    rng = np.random.default_rng(10)
    lengths = [1, 15, 16, 17, 90, 400]
    sample_N = np.repeat([0, 2, 3, 5, 6, 9], lengths)
    lost_N = rng.integers(0, 5, len(sample_N))
    expected, start = np.zeros(SHAPE, np.int64), 0
    for length in lengths:
        for place in range(length if length >= 2 * SHORTEST else 0):
            side, distance = (1, length - 1 - place) if length - 1 - place < place else (0, place)
            edge = next(number for number in range(SHAPE[1]) if distance < SHORTEST << number)
            expected[side, edge] += (6, lost_N[start + place])
        start += length
    assert np.array_equal(at_ends(lost_N, sample_N, 6), expected)
    assert not at_ends(lost_N[:0], sample_N[:0], 6).any()
