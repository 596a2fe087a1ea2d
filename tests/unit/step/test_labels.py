"""Version labels are judged by what explains the log-probs: whole batches, halves and single rows, and clean ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm.batch.collate import collate
from moe_trm.observe.advice.verdict import verdict
from moe_trm.observe.judge import Judge
from moe_trm.step.labels import LEAST_TOKENS, Labels
from moe_trm.types import MicroBatch, TokenBatch, TrainRow
from tests.unit.doubles import StandInLearner
from tests.unit.records import make_record

ROWS, TOKENS, NEWEST = 8, 24, 5
NOISE, MOVED = 0.006, 0.04
"""Gap of the engines at the same weights, and between consecutive versions, nats a token."""


class OneRank(StandInLearner):
    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in sums.items()}


def batch_of(sampled_by: list[int], labels: list[int], *, flips: float = 0.0) -> tuple[TokenBatch, dict[int, Tensor]]:
    """A micro-batch that versions `sampled_by` made under other labels, and its log-probs under versions 3 to 5."""
    draw = torch.Generator().manual_seed(0)
    records = [
        replace(make_record(sample_id=row, num_sampled=TOKENS), versions=torch.full((TOKENS,), label).int().numpy())
        for row, label in enumerate(labels)
    ]
    batch = collate(MicroBatch(tuple(map(TrainRow, records))), keep_mask=False)
    shape = batch.mask.shape
    base = -torch.rand(shape, generator=draw)
    moves = {version: MOVED * (version - 3) * torch.randn(shape, generator=draw) for version in range(3, 6)}
    logprobs = {version: base + move for version, move in moves.items()}
    truth = torch.stack([logprobs[version][row] for row, version in enumerate(sampled_by)])
    rollout = truth + NOISE * torch.randn(shape, generator=draw)
    rollout += (torch.rand(shape, generator=draw) < flips) * torch.randn(shape, generator=draw)
    return replace(batch, rollout_logprobs=torch.where(batch.mask, rollout, 0.0)), logprobs


def judged(sampled_by: list[int], labels: list[int], *, flips: float = 0.0) -> dict[str, float]:
    batch, logprobs = batch_of(sampled_by, labels, flips=flips)
    judge = Labels()
    judge.observe([batch], {version: [values] for version, values in logprobs.items()}, NEWEST)
    return judge.take(OneRank())


@pytest.mark.parametrize("flips", [0.0, 0.1], ids=["replayed", "own routes"])
def test_right_labels_are_not_doubted(flips: float) -> None:
    figures = judged([3, 3, 4, 4, 5, 5, 5, 5], [3, 3, 4, 4, 5, 5, 5, 5], flips=flips)
    assert figures["weights/labels_doubted"] == 0.0
    assert set(figures) == {"weights/labels_doubted", *(f"ages/labels_doubted/{age}" for age in range(3))}


@pytest.mark.parametrize(
    ("sampled_by", "labels", "share", "at_fresh"),
    [
        ([4] * ROWS, [5] * ROWS, 1.0, 1.0),
        ([3] * 4 + [5] * 4, [5] * ROWS, 0.5, 0.5),
        ([3, 4, 5, 5, 5, 5, 5, 4], [3, 4, 5, 5, 5, 5, 5, 5], 1 / 8, 1 / 6),
        ([3] * 4 + [5] * 4, [4] * ROWS, 1.0, None),
    ],
    ids=["all, one older", "half, two older", "one row", "older and newer"],
)
def test_labels_of_other_weights_are_doubted(
    sampled_by: list[int], labels: list[int], share: float, at_fresh: float | None
) -> None:
    figures = judged(sampled_by, labels)
    assert figures["weights/labels_doubted"] == pytest.approx(share)
    assert figures.get("ages/labels_doubted/0") == (None if at_fresh is None else pytest.approx(at_fresh))
    seen = {"engine/k3_kl": 8e-4, "optimizer/grad_norm": 1.0, "reward/zero_variance_groups": 0.0, **figures}
    judgement = verdict([seen])
    assert judgement.case == "labels"
    assert f"{share:.0%} of the answers were not sampled by the weights of their label" in judgement.sentence
    assert Judge().say(seen)["verdict/case"] == "labels"


def test_weights_that_hardly_moved_and_few_tokens_say_nothing() -> None:
    batch, logprobs = batch_of([4] * ROWS, [5] * ROWS)
    judge = Labels()
    same = {version: [logprobs[4] + 1e-4 * version] for version in logprobs}
    judge.observe([batch], same, NEWEST)
    assert judge.take(OneRank())["weights/labels_doubted"] == 0.0
    short = replace(batch, mask=batch.mask & (batch.mask.cumsum(1) < LEAST_TOKENS))
    judge.observe([short], {version: [values] for version, values in logprobs.items()}, NEWEST)
    assert judge.take(OneRank()) == {}
    assert judge.take(OneRank()) == {}, "each step is judged once"
