"""Wrong routes of part of the tokens: which fault of which size is found, and that clean steps never are.

Steps are made of numbers, as in `test_flip_bound`: a token has a tendency of its own to flip, and samples and layers
differ in their rates. Each of the faults is one that a rollout engine has had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from routing.errors import MisalignedError
from routing.judge.flip_bound import FlipBoundError, fresh_fault, token_fault
from routing.judge.sample_flips import PassFlips, SampleFlips, summed, total
from routing.judge.token_agreement import Disagreement, clean_share, judged_by_token, least_lost, of_samples
from routing.replay.replay_pass import judge

SHAPES = {"quickstart": (4, 2, 16), "OLMoE": (8, 8, 64), "Qwen3-30B": (48, 8, 128), "top-1": (12, 1, 8)}
"""Layers, K, E."""
SAMPLES, TOKENS = 32, 40
Fault = Callable[[np.ndarray, np.ndarray, np.random.Generator], None]
"""Takes lost experts `[samples, tokens, layers]` of the faulty samples, those of wrong routes, and a generator."""


def clean(shape: str, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Lost experts `[samples, tokens, layers]`; `rate` is the share of sets that flip."""
    layers, top_k, _ = SHAPES[shape]
    own = rate * rng.gamma(6.0, 1 / 6, (SAMPLES, 1, 1)) * rng.uniform(0.6, 1.4, layers)
    tendency = rng.gamma(0.5, 2.0, (SAMPLES, TOKENS, 1))
    flips = rng.random((SAMPLES, TOKENS, layers)) < np.minimum(own * tendency, 0.9)
    second = (rng.random(flips.shape) < 0.1) & (top_k > 1)
    return np.asarray(flips * (1 + second))


def unrelated(shape: str, rng: np.random.Generator) -> np.ndarray:
    layers, top_k, experts = SHAPES[shape]
    wrong = rng.hypergeometric(top_k, experts - top_k, top_k, (SAMPLES, TOKENS, layers))
    return np.asarray(top_k - wrong)


def flips_of(lost: np.ndarray, shape: str, *, at_sampling: bool | None = None) -> SampleFlips:
    """The counts of one forward with these lost experts."""
    layers, top_k, experts = SHAPES[shape]
    due = torch.ones(SAMPLES * TOKENS, dtype=torch.bool)
    one = PassFlips(
        range(SAMPLES),
        torch.full((SAMPLES,), TOKENS),
        range(layers),
        layers,
        sample_last=False,
        device=torch.device("cpu"),
        due_N=due,
        experts=(top_k, experts),
        at_sampling=(at_sampling,) * SAMPLES,
    )
    lost_LN = torch.from_numpy(lost.reshape(-1, layers).T.copy()).int()
    for layer, lost_N in enumerate(lost_LN):
        one.count(layer, torch.stack((lost_N.clamp(max=1), lost_N)))
    return total([one], layers)


def stops(lost: np.ndarray, shape: str) -> bool:
    _, top_k, experts = SHAPES[shape]
    return token_fault(flips_of(lost, shape), top_k, experts) is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1])
def test_clean_steps_are_never_refused(shape: str, rate: float) -> None:
    rng = np.random.default_rng(round(rate * 100))
    assert not any(stops(clean(shape, rate, rng), shape) for _ in range(100))


def the_end(lost: np.ndarray, wrong: np.ndarray, rng: np.random.Generator, share: float = 0.25) -> None:
    lost[:, round(TOKENS * (1 - share)) :] = wrong[:, round(TOKENS * (1 - share)) :]


def the_beginning(lost: np.ndarray, wrong: np.ndarray, rng: np.random.Generator) -> None:
    lost[:, : TOKENS // 4] = wrong[:, : TOKENS // 4]


def anywhere(lost: np.ndarray, wrong: np.ndarray, rng: np.random.Generator) -> None:
    chosen = rng.random(lost.shape[:2]) < 0.25
    lost[chosen] = wrong[chosen]


def all_tokens(lost: np.ndarray, wrong: np.ndarray, rng: np.random.Generator) -> None:
    lost[:] = wrong


def last_twentieth(lost: np.ndarray, wrong: np.ndarray, rng: np.random.Generator) -> None:
    the_end(lost, wrong, rng, 0.05)


FAULTS: dict[str, Fault] = {
    "the end": the_end,
    "the beginning": the_beginning,
    "anywhere": anywhere,
    "all tokens": all_tokens,
}


@pytest.mark.parametrize("shape", ["quickstart", "OLMoE", "Qwen3-30B"])
@pytest.mark.parametrize("faulty", [1, 8, SAMPLES])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_quarter_of_the_tokens_is_found_in_any_number_of_samples(
    shape: str, faulty: int, fault: str, rate: float
) -> None:
    rng = np.random.default_rng(faulty)
    for _ in range(5):
        lost = clean(shape, rate, rng)
        FAULTS[fault](lost[:faulty], unrelated(shape, rng)[:faulty], rng)
        assert stops(lost, shape)


@pytest.mark.parametrize("shape", ["quickstart", "OLMoE", "Qwen3-30B"])
def test_a_twentieth_of_the_tokens_of_all_samples_is_found(shape: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        lost = clean(shape, 0.01, rng)
        last_twentieth(lost, unrelated(shape, rng), rng)
        assert stops(lost, shape)


@pytest.mark.parametrize("shape", ["quickstart", "OLMoE", "Qwen3-30B"])
def test_one_layer_that_is_wrong_in_a_third_of_the_tokens_is_found(shape: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(5):
        lost, wrong = clean(shape, 0.01, rng), unrelated(shape, rng)
        chosen = rng.random(lost.shape[:2]) < 0.3
        lost[..., 2] = np.where(chosen, wrong[..., 2], lost[..., 2])
        assert stops(lost, shape)


def test_the_message_says_which_tokens_of_which_samples() -> None:
    rng = np.random.default_rng(3)
    lost = clean("OLMoE", 0.01, rng)
    the_end(lost, unrelated("OLMoE", rng), rng)
    said = str(token_fault(flips_of(lost, "OLMoE"), 8, 64))
    assert "25.0%" in said
    assert "32 samples disagree at their end" in said
    assert "10 of 40 tokens, most of them from token 30 to 39" in said
    assert "and 24 more" in said


def test_rows_that_another_pass_judges_are_left_alone_and_fresh_ones_have_no_excuse() -> None:
    rng = np.random.default_rng(4)
    lost = clean("quickstart", 0.01, rng)
    # One of two experts is another in every set: no token agrees with nothing, and nearly all sets flip.
    lost[:] = np.maximum(lost, 1)
    assert not stops(lost, "quickstart")
    assert fresh_fault(flips_of(lost, "quickstart"), 0.3) is None
    assert "weights that sampled them" in str(fresh_fault(flips_of(lost, "quickstart", at_sampling=True), 0.3))
    elsewhere = flips_of(unrelated("quickstart", rng), "quickstart", at_sampling=False)
    assert (len(elsewhere.keys), int(elsewhere.by_token.tokens.sum()), int(elsewhere.apart.sum())) == (0, 0, 0)


def test_one_bad_fresh_sample_of_a_clean_batch_and_one_bad_layer_are_named_alone() -> None:
    rng = np.random.default_rng(5)
    lost = clean("quickstart", 0.01, rng)
    lost[7] = np.maximum(lost[7], 1)
    message = str(fresh_fault(flips_of(lost, "quickstart", at_sampling=True), 0.3))
    assert message.count("of its sets flip") == 1
    assert "sample 7: 100.0% of its sets flip" in message
    lost = clean("quickstart", 0.01, rng)
    lost[..., 2] = np.maximum(lost[..., 2], 1)
    message = str(fresh_fault(flips_of(lost, "quickstart", at_sampling=True), 0.4))
    assert message.count("of its sets flip") == 1
    assert "layer 2: 100.0% of its sets flip" in message
    assert fresh_fault(flips_of(clean("quickstart", 0.01, rng), "quickstart", at_sampling=True), 0.3) is None


def test_a_sample_is_fresh_only_if_all_of_its_passes_were() -> None:
    """Where the weights moved between two passes, the router may have moved as well."""
    rng = np.random.default_rng(6)
    lost = np.maximum(clean("quickstart", 0.01, rng), 1)
    passes = [flips_of(lost, "quickstart", at_sampling=at) for at in (True, None)]
    for order in (passes, passes[::-1]):
        names = ("keys", "due", "flipped", "lost", "fresh")
        arrays = {name: np.concatenate([getattr(flips, name) for flips in order]) for name in names}
        by_token = Disagreement(*map(np.concatenate, zip(*(flips.by_token for flips in order), strict=True)))
        joined = replace(order[0], **arrays, by_token=by_token)
        assert not summed(joined).fresh.any()
        assert fresh_fault(summed(joined), 0.3) is None
    assert summed(passes[0]).fresh.all()


def certain(flips: SampleFlips, shape: str) -> str:
    """What `judge` is certain of, whether or not samples or layers are beyond their bounds as well; empty: nothing."""
    due, flipped = flips.due.sum(0), flips.flipped.sum(0)
    counters = torch.from_numpy(np.stack([due, due, due, flipped, 0 * due], axis=1))
    try:
        judge(counters, 0.3, flips, *SHAPES[shape][1:])
    except FlipBoundError as beyond:
        return str(beyond.certain or "")
    except MisalignedError as error:
        return str(error)
    return ""


def test_a_step_is_judged_by_its_tokens_and_by_the_weights_that_sampled_it() -> None:
    rng = np.random.default_rng(5)
    lost = clean("OLMoE", 0.01, rng)
    assert not certain(flips_of(lost, "OLMoE"), "OLMoE")
    ends = lost.copy()
    the_end(ends, unrelated("OLMoE", rng), rng)
    assert "disagree at their end" in certain(flips_of(ends, "OLMoE"), "OLMoE")
    other = np.maximum(lost, 1)
    assert not certain(flips_of(other, "OLMoE"), "OLMoE"), "a router that has moved"
    assert "weights that sampled them" in certain(flips_of(other, "OLMoE", at_sampling=True), "OLMoE")


@pytest.mark.parametrize(("slots", "chance", "least"), [(8, 0.875, 6), (64, 0.875, 42), (1, 0.9, 2), (2, 0.5, 2)])
def test_tokens_that_can_be_judged(slots: int, chance: float, least: int) -> None:
    assert least_lost(slots, chance) == least
    assert judged_by_token(slots, chance) == (slots >= least)


def test_a_clean_token_disagrees_as_often_as_its_tendency_says() -> None:
    """Against tokens that are drawn: a chi-squared tendency, then a binomial number of lost experts."""
    rng = np.random.default_rng(5)
    tokens, slots, mean = 400_000, 8, 0.06
    rates = np.clip(2 * mean * rng.chisquare(1, tokens), 0, 0.95)
    drawn = float((rng.binomial(slots, rates) >= 6).mean())
    assert clean_share(slots, 6, tokens, mean * slots * tokens) == pytest.approx(drawn, rel=0.1)
    assert clean_share(slots, 6, 0, 0) == 0.002


def test_tokens_are_scanned_in_the_order_of_their_sample() -> None:
    """Five wrong tokens in a row speak against a sample of forty; the same five apart do not."""
    lost = np.zeros(80, np.int64)
    lost[45:50] = 8
    found = of_samples(lost, np.repeat([0, 1], 40), 2, 8, 0.875)
    assert (int(found.first[1]), int(found.last[1]), int(found.run[0])) == (5, 9, 0)
    spread = np.zeros(80, np.int64)
    spread[40::8] = 8
    assert of_samples(spread, np.repeat([0, 1], 40), 2, 8, 0.875).run[1] < found.run[1] / 2
