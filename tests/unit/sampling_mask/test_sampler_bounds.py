"""Kept sets that no sampler of these settings can have kept are found, and what rounding moves is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from moe_trm.sampling_mask.bounds import (
    LONE,
    MANY,
    TIMES,
    TIMES_LARGEST,
    TOLERANCE,
    SamplerBounds,
    moved_odds,
    tolerated,
)
from moe_trm.sampling_mask.logprobs import TIED

TOP_P, NUM_TOKENS, VOCABULARY = 0.95, 600, 64


@dataclass
class Sampled:
    """Tokens of an engine: kept ids `[N, V]` bool, the sampled id, and log-probs of engine and learner `[N, V]`."""

    kept: Tensor
    sampled: Tensor
    engine: Tensor
    learner: Tensor

    def found(self, bounds: SamplerBounds) -> Tensor:
        """`[N]` bool: the sets that are found to be wrong."""

        def over(logprobs: Tensor) -> Tensor:
            return logprobs.masked_fill(~self.kept, -torch.inf).logsumexp(-1)

        at = self.sampled[:, None]
        of_tokens = [values.gather(1, at)[:, 0] - over(values) for values in (self.learner, self.engine)]
        lowest = self.learner.masked_fill(~self.kept, torch.inf).amin(-1, keepdim=True)
        tied = self.learner.masked_fill(~self.kept | (self.learner > lowest + TIED), -torch.inf).logsumexp(-1)
        return bounds.judge(self.kept.sum(-1), over(self.learner), tied, *of_tokens).wrong


def sampled(error: float = 0.02, top_k: int = VOCABULARY, seed: int = 0) -> Sampled:
    """What a sound engine sends, whose logits have errors of this standard deviation."""
    made = torch.Generator().manual_seed(seed)
    sharp = 6 * torch.rand(NUM_TOKENS, 1, generator=made, dtype=torch.float64)
    logits = sharp * torch.randn(NUM_TOKENS, VOCABULARY, generator=made, dtype=torch.float64)
    noise = error * torch.randn(NUM_TOKENS, VOCABULARY, generator=made, dtype=torch.float64)
    engine, learner = (logits + noise).log_softmax(-1), logits.log_softmax(-1)
    kept = supported(engine, top_k)
    drawn = torch.multinomial(torch.where(kept, engine.exp(), 0.0), 1, generator=made)[:, 0]
    return Sampled(kept, drawn, engine, learner)


def supported(logprobs: Tensor, top_k: int) -> Tensor:
    """The ids that the sampler keeps: rank below `top_k`, and less than top_p before them."""
    order = logprobs.argsort(-1, descending=True)
    sorted_probs = logprobs.exp().gather(-1, order)
    fits = (sorted_probs.cumsum(-1) - sorted_probs <= TOP_P) & (torch.arange(VOCABULARY) < top_k)
    return torch.zeros_like(fits).scatter(-1, order, fits)


def only(lie: Sampled, *columns: Tensor) -> Sampled:
    kept = torch.zeros_like(lie.kept)
    for column in columns:
        kept.scatter_(1, column[:, None], True)
    return replace(lie, kept=kept)


def without_the_middle(lie: Sampled) -> Sampled:
    return only(lie, lie.sampled, lie.engine.argmax(-1))


def with_foreign_ids(lie: Sampled) -> Sampled:
    made = torch.Generator().manual_seed(1)
    foreign = torch.rand(lie.kept.shape, generator=made).argsort(-1)[:, :20]
    return replace(lie, kept=lie.kept.scatter(1, foreign, True))


def with_one_foreign_id(lie: Sampled) -> Sampled:
    return replace(lie, kept=lie.kept.scatter(1, lie.engine.argmin(-1, keepdim=True), True))


def alone(lie: Sampled) -> Sampled:
    return only(lie, lie.sampled)


BOUNDS = SamplerBounds(TOP_P, VOCABULARY)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 30])
@pytest.mark.parametrize("error", [0.02, 0.2, 0.5])
def test_sets_of_short_rows_of_a_sound_engine_are_allowed(error: float, size: int) -> None:
    for seed in range(2):
        engine = sampled(error, seed=seed)
        for begin in range(0, NUM_TOKENS, size):
            row = slice(begin, begin + size)
            parts = (values[row] for values in (engine.kept, engine.sampled, engine.engine, engine.learner))
            assert not Sampled(*parts).found(BOUNDS).any()


@pytest.mark.parametrize("error", [0.0, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("top_k", [VOCABULARY, 5])
def test_sets_of_a_sound_engine_are_allowed(error: float, top_k: int) -> None:
    for seed in range(5):
        assert not sampled(error, top_k, seed).found(replace(BOUNDS, top_k=top_k)).any()


@pytest.mark.parametrize(
    ("lie", "share"),
    [
        (without_the_middle, 0.5),
        (with_foreign_ids, 0.6),
        (with_one_foreign_id, 0.1),
        (alone, 0.5),
    ],
)
def test_each_lie_is_found(lie: Callable[[Sampled], Sampled], share: float) -> None:
    """In `share` of the tokens at least: where one id has nearly all the mass, the set without the others is sound, and
    where the mass is hardly above top_p, an id of no mass makes no difference.
    """
    found = lie(sampled()).found(BOUNDS)
    assert found.double().mean() >= share


def test_a_set_of_the_sampled_id_alone_is_sound_where_it_has_the_mass() -> None:
    lie = alone(sampled())
    heavy = lie.engine.exp().gather(1, lie.sampled[:, None])[:, 0] > 0.96
    assert heavy.any()
    assert not lie.found(BOUNDS)[heavy].any()


def test_a_cut_set_has_no_lower_bound() -> None:
    cut = sampled(top_k=2)
    assert not cut.found(replace(BOUNDS, top_k=2)).any()
    assert cut.found(BOUNDS).any()
    assert not cut.found(replace(BOUNDS, has_floor=False)).any()


def test_an_added_id_is_allowed_where_sampled_ids_are_added() -> None:
    more = with_one_foreign_id(sampled())
    assert not more.found(replace(BOUNDS, minimal=False)).any()


def test_ties_that_the_sampler_cannot_split_are_allowed() -> None:
    """In few bits many ids have one probability, and all of them may be kept."""
    logits = torch.cat([torch.zeros(1), torch.full((40,), -6.0)]).double()
    logprobs = logits.log_softmax(-1).expand(4, 41)
    tied = logprobs[:, 1:].logsumexp(-1)
    nothing, sizes = torch.zeros(4).double(), torch.full((4,), 41)
    bounds = replace(BOUNDS, top_p=0.9)
    assert not bounds.judge(sizes, nothing, tied, nothing, nothing).wrong.any()
    assert bounds.judge(sizes, nothing, logprobs[:, 1], nothing, nothing).wrong.all()


def test_the_power_is_stated() -> None:
    nothing = torch.zeros(0)
    judged = BOUNDS.judge(nothing, nothing, nothing, nothing, nothing)
    assert judged.lowest == pytest.approx(1 / (1 + (1 - TOP_P) / TOP_P * torch.tensor(TOLERANCE).exp().item()))
    assert judged.lowest == pytest.approx(0.9367, abs=1e-4)


@pytest.mark.parametrize(
    ("times", "num_beyond", "num_tokens", "num_wrong"),
    [
        (0.9, 40, 40, 0),
        (1.5, 1, 40, 0),
        (1.5, 2, 40, 2),
        (1.5, 10, 1000, 0),
        (1.5, 11, 1000, 11),
        (1.1 * LONE, 1, 40, 1),
        (1.1 * LONE, 1, 1000, 1),
    ],
)
@pytest.mark.parametrize("too_much", [False, True])
def test_few_sets_just_beyond_the_tolerance_are_flips_of_a_router(
    times: float, num_beyond: int, num_tokens: int, num_wrong: int, too_much: bool
) -> None:
    odds = torch.tensor(TOP_P).logit() + (1 if too_much else -1) * times * TOLERANCE
    masses = torch.full((num_tokens,), TOP_P, dtype=torch.float64)
    masses[:num_beyond] = odds.sigmoid()
    ids = torch.full((num_tokens,), 3)
    least = torch.full((num_tokens,), -20.0 if too_much else -3.0, dtype=torch.float64)
    equal = torch.full((num_tokens,), -1.0)
    assert int(BOUNDS.judge(ids, masses.log(), least, equal, equal).wrong.sum()) == num_wrong


def test_a_mismatch_that_is_measured_is_tolerated_and_costs_power() -> None:
    odds, moved = torch.zeros(100).double(), torch.full((100,), 0.1).double()
    assert tolerated(logsigmoid(odds), logsigmoid(odds + moved)) == pytest.approx(TIMES * 0.1, rel=0.06)
    moved[0] = 3.0
    assert TIMES_LARGEST < tolerated(logsigmoid(odds), logsigmoid(odds + moved)) < TIMES_LARGEST * 3.0
    same = torch.full((MANY,), -1.0)
    assert tolerated(same, same) == TOLERANCE
    assert tolerated(same[: MANY // 4], same[: MANY // 4]) == 4 * TOLERANCE


@pytest.mark.parametrize("odds", [0.0, 3.0, 6.0])
def test_a_mismatch_is_as_large_where_a_token_is_nearly_certain(odds: float) -> None:
    """The log-ratio of a token is 400 times smaller at log-odds of 6 than the difference of its log-odds."""
    logits = torch.full((16,), odds).double()
    assert 0.7 < float(moved_odds(logsigmoid(logits), logsigmoid(logits + 0.5)).max()) / 0.5 < 1


def test_rounding_of_certain_tokens_and_sets_without_likely_ids_tolerate_nothing() -> None:
    certain = torch.zeros(16)
    assert tolerated(certain, certain - 2e-5) == TOLERANCE
    half = certain + math.log(0.5)
    assert float(moved_odds(certain, half).max()) == pytest.approx(2 * math.log(2))


def test_short_rows_of_repeated_contexts_are_allowed() -> None:
    """Two contexts in sixteen tokens, whose sampled tokens are nearly certain: flips move the mass of both sets."""
    ids, odds = torch.full((16,), 2), torch.full((16,), 4.0).double()
    odds[8:] = torch.tensor(TOP_P).logit()
    lacking = odds.clone()
    lacking[8:] -= 2 * TOLERANCE
    judged = BOUNDS.judge(ids, logsigmoid(lacking), torch.full((16,), -3.0), logsigmoid(odds + 0.3), logsigmoid(odds))
    assert not judged.wrong.any()
