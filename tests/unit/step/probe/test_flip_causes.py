"""Flips by cause on one rank, worked by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from moe_trm.learner.protocol import Scores
from moe_trm.step.probe.flip_causes import flip_causes, flips_of
from moe_trm.step.probe.load_balance import load_balance
from moe_trm.step.probe.run import summarize
from moe_trm.step.probe.sample import ProbeRows
from moe_trm.step.probe.tokens import compared
from moe_trm.types import TokenBatch
from routing import RouteRecord
from routing.record.sources import Recorded
from tests.unit.doubles import StandInLearner
from tests.unit.records import make_record


class OneRank(StandInLearner):
    moe_layer_ids = model_moe_layer_ids = (1, 3)


# One row of four tokens; layer 1 and layer 3 each choose two of four experts.
ROLLOUT = [[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]]
NOW = [[[0, 1], [0, 1]], [[1, 0], [2, 3]], [[2, 3], [0, 1]], [[0, 2], [0, 3]]]
THEN = [[[9, 9], [9, 9]], [[9, 9], [9, 9]], [[0, 1], [0, 1]], [[0, 1], [0, 3]]]
"""At the older version, which sampled what follows the last two rows."""


def scores(routes: list[list[list[int]]], margins: list[float] | None = None) -> Scores:
    """`margins`: of layer 3."""
    ids = torch.tensor(routes)
    if margins is not None:
        return Scores(
            torch.zeros(1, 4), recorded=Recorded({1: ids[:, 0], 3: ids[:, 1]}, margins={3: torch.tensor(margins)})
        )
    return Scores(torch.zeros(1, 4), recorded=Recorded({1: ids[:, 0], 3: ids[:, 1]}))


def batch() -> TokenBatch:
    mask = torch.tensor([[False, True, True, True]])
    record = RouteRecord(np.array(ROLLOUT, np.uint8), (1, 3), 4, None)
    other = {
        name: torch.zeros(1, 4)
        for name in ("input_ids", "target_ids", "rollout_logprobs", "full_logprobs", "turn_ids", "advantages")
    }
    made: Any = {**other, "valid": mask, "mask": mask, "versions": torch.tensor([[-1, 5, 4, 4]])}
    return TokenBatch(**made, routes=(record,), kept_ids=None, kept_offsets=None)


def causes(older: Mapping[int, list[Scores]], now: Scores | None = None) -> dict[str, float]:
    native = now or scores(NOW)
    return flip_causes(OneRank(), [batch()], [native], older, [flips_of(native, batch(), OneRank.moe_layer_ids)])


def test_engine_and_staleness_are_told_apart() -> None:
    found = causes({4: [scores(THEN)]})
    # Against the rollout, at the weights that sampled: only the last row's layer 3 differs, of three scored rows.
    assert found["routing/flips/engine/layer_1"] == 0.0
    assert found["routing/flips/engine/layer_3"] == pytest.approx(1 / 3)
    assert found["routing/flips/engine"] == pytest.approx(1 / 6)
    # Between the two versions: layer 1 of both stale rows; layer 3 chose the same set.
    assert found["routing/flips/staleness/layer_1"] == 1.0
    assert found["routing/flips/staleness/layer_3"] == 0.0
    assert found["routing/flips/staleness"] == 0.5
    assert found["routing/flips/engine/position_1_64"] == pytest.approx(1 / 6)
    assert "routing/flips/engine/position_65_256" not in found


def test_without_older_versions_all_is_the_engines() -> None:
    found = causes({})
    assert found["routing/flips/engine"] == pytest.approx(3 / 6)
    assert not any("staleness" in name for name in found)


def test_an_older_version_that_sampled_nothing_here_says_nothing() -> None:
    assert not any("staleness" in name for name in causes({3: [scores(THEN)]}))


def test_flips_by_router_margin_use_the_margins_of_the_weights_that_sampled() -> None:
    now, then = scores(NOW, [0.5, 0.5, 0.5, 0.5]), scores(THEN, [9.0, 9.0, 0.002, 0.001])
    found = causes({4: [then]}, now)
    rates = {name: rate for name, rate in found.items() if "/margin_" in name}
    # Layer 3 alone has margins: its last row flips, at 0.001. The row before is in the same class, the first scored one
    # at 0.5.
    assert rates == {"routing/flips/engine/margin_0.001_0.003": 0.5, "routing/flips/engine/margin_0.1_up": 0.0}


@pytest.mark.parametrize("prompt", [0, 1, 63])
def test_classes_of_position_against_a_loop_over_tokens(prompt: int) -> None:
    """A row that predicts token number n + 1 of its sequence stands at n, counted from 1."""
    rng, length = np.random.default_rng(prompt), 300
    sets = np.argsort(rng.random((2, length, 2, 4)), axis=-1)[..., :2]
    mask = torch.arange(length)[None] >= prompt
    blank = torch.zeros(1, length)
    names = ("input_ids", "target_ids", "rollout_logprobs", "full_logprobs", "turn_ids", "advantages")
    made: Any = {**dict.fromkeys(names, blank), "valid": mask, "mask": mask, "versions": blank.long()}
    record = RouteRecord(sets[0].astype(np.uint8), (1, 3), 4, None)
    one = TokenBatch(**made, routes=(record,), kept_ids=None, kept_offsets=None)
    own = torch.from_numpy(sets[1])
    native = Scores(blank, recorded=Recorded({1: own[:, 0], 3: own[:, 1]}))
    found = flip_causes(OneRank(), [one], [native], {}, [flips_of(native, one, OneRank.moe_layer_ids)])
    for low, high in ((1, 64), (65, 256), (257, 1024)):
        flips = [
            set(sets[0, row, layer]) != set(sets[1, row, layer])
            for row in range(prompt, length)
            for layer in range(2)
            if low <= row + 1 <= high
        ]
        assert found[f"routing/flips/engine/position_{low}_{high}"] == pytest.approx(sum(flips) / len(flips))


@pytest.mark.parametrize("mask_known", [False, True])
def test_the_kept_mass_of_a_token_is_one_without_a_sampling_mask(mask_known: bool) -> None:
    native = replace(scores(NOW), log_kept_mass=torch.tensor([[0.0, -0.1, -0.2, -0.3]]) if mask_known else None)
    records = [make_record(num_prompt=2, num_sampled=3)]
    flipped = flips_of(native, batch(), OneRank.moe_layer_ids)
    tokens = compared(OneRank(), batch(), records, native, scores(ROLLOUT), flipped)
    summary = summarize(OneRank(), tokens, ProbeRows([batch()], [records], (), 1, 1, 1.0))
    expected = [math.exp(-0.1 * n) if mask_known else 1.0 for n in (1, 2, 3)]
    assert summary["probe/kept_mass_mean"] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("has_rows", [True, False])
def test_balance_does_not_depend_on_ranks_without_rows(has_rows: bool) -> None:
    """Two of three ranks have rows, or one; every rank names the same sums."""

    class OneOfThree(OneRank):
        data_size = 3
        told: ClassVar[list[dict[str, torch.Tensor]]] = []

        def reduce(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
            self.told.append(dict(sums))
            number = len(self.told) - 1
            zeros = dict.fromkeys(sums, 0.0) if number != 0 else {"experts": 4.0, "ranks": 1.0}
            return {name: float(value) + zeros[name] for name, value in sums.items()}

    OneOfThree.told.clear()
    found = load_balance(OneOfThree(), [batch()] * has_rows)
    assert set(OneOfThree.told[1]) == {f"{layer}/{expert}" for layer in range(2) for expert in range(4)}
    if not has_rows:
        return
    # Layer 1 has sets {0, 1} four times; layer 3 thrice, and {2, 3} once. A mean is 2 of 8.
    assert found["routing/load_max_over_mean"] == pytest.approx((4 / 2 + 3 / 2) / 2)
    entropy = [np.log(2) / np.log(4), -(2 * 3 / 8 * np.log(3 / 8) + 2 / 8 * np.log(1 / 8)) / np.log(4)]
    assert found["routing/load_entropy"] == pytest.approx(np.mean(entropy))
