"""Routes that fit on the prompts and less behind them are found; rounding, however large, is not taken for that."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from routing import MisalignedError
from routing.judge.answer_agreement import by_side, wrong_answers
from routing.judge.flip_bound import token_fault
from routing.judge.sample_flips import PassFlips, SampleFlips, total

SLOTS = 8
"""Four layers of two experts."""


def counts(on_prompts: float, behind: float, tokens: int = 2000, seed: int = 0) -> np.ndarray:
    """Of tokens whose experts are lost at these rates, each with a tendency of its own."""
    rng = np.random.default_rng(seed)
    is_behind = rng.random(tokens) < 0.6
    rates = np.where(is_behind, behind, on_prompts) * rng.gamma(0.5, 2.0, tokens)
    return by_side(rng.binomial(SLOTS, np.minimum(rates, 0.95)), is_behind, SLOTS)


@pytest.mark.parametrize(("on_prompts", "behind"), [(0.0, 0.05), (0.004, 0.04), (0.004, 0.08), (0.03, 0.3)])
def test_routes_that_fit_on_the_prompts_alone_are_found(on_prompts: float, behind: float) -> None:
    [fault] = wrong_answers(counts(on_prompts, behind), SLOTS)
    assert "other answers to the same prompts" in fault


@pytest.mark.parametrize("on_prompts", [0.001, 0.004, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_rounding_is_not(on_prompts: float, factor: float) -> None:
    for seed in range(50):
        assert wrong_answers(counts(on_prompts, on_prompts * factor, seed=seed), SLOTS) == []


def test_few_tokens_prove_nothing() -> None:
    assert wrong_answers(counts(0.0, 0.5, tokens=100), SLOTS) == []
    assert wrong_answers(np.array([[8000, 8], [0, 0]]), SLOTS) == []


@pytest.mark.parametrize("at_sampling", [True, None])
def test_the_proof_judges_rows_of_the_weights_that_sampled_them(at_sampling: bool | None) -> None:
    """Two layers, four samples of 60 rows, 20 of them the prompt; a fifth of the experts behind it is lost."""
    due = torch.ones(240, dtype=torch.bool)
    behind = torch.arange(60).repeat(4) >= 20
    opened = PassFlips(
        range(4),
        torch.full((4,), 60),
        (0, 1),
        2,
        sample_last=False,
        device=torch.device("cpu"),
        due_N=due,
        experts=(4, 32),
        at_sampling=(at_sampling,) * 4,
        behind_N=behind,
    )
    for layer in (0, 1):
        lost = torch.where(behind, (torch.arange(240) % 5 < 4).int(), 0)
        opened.count(layer, torch.stack((lost.clamp(max=1), lost)))
    flips = total([opened], 2)
    assert isinstance(flips, SampleFlips)
    fault = token_fault(flips, 4, 32)
    if at_sampling:
        assert isinstance(fault, MisalignedError)
        assert "other answers" in str(fault)
    else:
        assert fault is None
