"""The share of tokens below the noise of their layer, which is known only from enough flips."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from moe_trm.step.probe.close_margins import LEAST, CloseMargins
from tests.unit.records import LAYERS
from tests.unit.step.probe.test_probe_sample import ProbeLearner
from tests.unit.step.shared_minibatch import Ranks


def tokens(flips: int, number: int = 400) -> tuple[Tensor, Tensor]:
    """Margins of 0.0005 on a quarter of the tokens and of 0.5 on the rest; so many flips, all at the small ones."""
    margins = torch.full((number, len(LAYERS)), 0.5)
    margins[: number // 4] = 5e-4
    flipped = torch.zeros(number, len(LAYERS), dtype=torch.bool)
    flipped[:flips] = True
    margins[:, -1] = float("nan")
    return flipped, margins


def test_the_share_of_tokens_below_the_noise() -> None:
    learner, close = ProbeLearner(Ranks(1), 0), CloseMargins()
    assert close.run(learner, *tokens(LEAST - 1)) == {}
    shares = close.run(learner, *tokens(1))
    assert shares == {"routing/close": 0.25, **{f"routing/close/layer_{layer}": 0.25 for layer in LAYERS[:-1]}}
    (resumed := CloseMargins()).restore(close.state())
    assert resumed.run(learner, *tokens(0)) == shares, "the noise is that of the probes before"


def test_one_flip_in_twenty_at_a_large_margin_is_no_noise() -> None:
    flipped, margins = tokens(40)
    flipped[-2:] = True
    assert CloseMargins().run(ProbeLearner(Ranks(1), 0), flipped, margins)["routing/close"] == 0.25
    flipped[-8:] = True
    assert CloseMargins().run(ProbeLearner(Ranks(1), 0), flipped, margins)["routing/close"] == 1.0


def test_ranks_agree() -> None:
    ranks, parts = Ranks(2), (tokens(6), tokens(8, 80))

    def work(rank: int) -> dict[str, float]:
        return CloseMargins().run(ProbeLearner(ranks, rank), *parts[rank])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second
    assert first["routing/close"] == pytest.approx(0.25)
