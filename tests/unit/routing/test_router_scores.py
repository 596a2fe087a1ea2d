"""Router scores kept in one pass and compared in another, against a loop over floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from routing import RouteError
from routing.record.router_shift import KEEP, RouterScores, RouterWatch

TOKENS, EXPERTS, TOP_K, LAYERS = 7, 6, 3, (1, 4)


def logits(seed: int) -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {layer: 2 * torch.randn(TOKENS, EXPERTS, generator=draw) for layer in LAYERS}


def ids() -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(9)
    return {layer: torch.rand(TOKENS, EXPERTS, generator=draw).argsort(-1)[:, :TOP_K] for layer in LAYERS}


def kept(values: dict[int, Tensor], *, sigmoid: bool = False) -> RouterScores:
    watch = RouterWatch(KEEP)
    for layer, given in values.items():
        watch.see(layer, given, ids()[layer], sigmoid=sigmoid)
    assert watch.shift() is None
    scores = watch.scores()
    assert scores is not None
    return scores


def log_score(row: list[float], expert: int, *, sigmoid: bool) -> float:
    if sigmoid:
        return -math.log1p(math.exp(-row[expert]))
    return row[expert] - math.log(sum(math.exp(value) for value in row))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_mean_over_layers_and_experts(sigmoid: bool) -> None:
    before, now = logits(0), logits(1)
    watch = RouterWatch(kept(before, sigmoid=sigmoid))
    for layer in LAYERS:
        watch.see(layer, now[layer].requires_grad_(), ids()[layer], sigmoid=sigmoid)
    shift = watch.shift()
    assert shift is not None
    assert not shift.requires_grad
    assert watch.scores() is None
    for token in range(TOKENS):
        moved = [
            abs(
                log_score(now[layer][token].tolist(), expert, sigmoid=sigmoid)
                - log_score(before[layer][token].tolist(), expert, sigmoid=sigmoid)
            )
            for layer in LAYERS
            for expert in ids()[layer][token].tolist()
        ]
        assert float(shift[token]) == pytest.approx(sum(moved) / len(moved), rel=1e-5)


def test_routers_that_stay_have_no_shift_and_one_that_moves_has_its_share() -> None:
    before = logits(0)
    now = {**before, 4: before[4] + torch.tensor([3.0, *[0.0] * (EXPERTS - 1)])}
    watch, only = RouterWatch(kept(before)), RouterWatch(RouterScores({4: kept(before).logs[4]}))
    for layer in LAYERS:
        watch.see(layer, now[layer], ids()[layer], sigmoid=False)
    only.see(4, now[4], ids()[4], sigmoid=False)
    both, alone = watch.shift(), only.shift()
    assert both is not None
    assert alone is not None
    torch.testing.assert_close(both, alone / 2)
    same = RouterWatch(kept(before))
    same.see(1, before[1], ids()[1], sigmoid=False)
    found = same.shift()
    assert found is not None
    assert not found.any()


@pytest.mark.parametrize("scores", [{1: torch.zeros(TOKENS, TOP_K)}, {4: torch.zeros(TOKENS + 1, TOP_K)}])
def test_scores_of_another_pass_are_refused(scores: dict[int, Tensor]) -> None:
    watch = RouterWatch(RouterScores(scores))
    with pytest.raises(RouteError, match="another pass"):
        watch.see(4, logits(0)[4], ids()[4], sigmoid=False)
