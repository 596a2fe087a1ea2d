"""Numerics split into quantisation, cast and the rest: literal numbers, and when each is measured."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import LearnerError
from moe_trm.learner.protocol import Scores
from moe_trm.step.probe.rounding_shares import ROUNDED, rounding_shares, roundings
from moe_trm.step.probe.sample import ProbeRows
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing.record.sources import ReplayRecords, RouteSource
from tests.unit.doubles import StandInLearner

CAST, INT8 = Rounding("bfloat16"), Rounding("float32", "int8")
BOTH = Rounding("bfloat16", "int8")


class FakeLearner(StandInLearner):
    """Scores a constant under each rounding of the weights."""

    def __init__(self, logprobs: dict[Rounding, float]) -> None:
        self.logprobs, self.held = logprobs, dict[str, Rounding]()

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        assert rounding is not None
        self.held[name] = rounding
        return 0

    def forget(self, name: str) -> None:
        del self.held[name]

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        rounding = self.held[weights or ""]
        if rounding not in self.logprobs:
            raise LearnerError("no such snapshot")
        return [Scores(torch.full(batch.mask.shape, self.logprobs[rounding])) for batch in batches]


def one_batch() -> Any:
    mask = torch.tensor([[True, True, False]])
    rollout_logprobs = torch.tensor([[-1.0, -1.3, 9.0]])
    routes = ReplayRecords((None,))
    return SimpleNamespace(mask=mask, routes=(None,), rollout_routes=routes, rollout_logprobs=rollout_logprobs)


OWN = Scores(torch.tensor([[-1.0, -1.4, 5.0]]))
WHOLE = ProbeRows([], [], (), 1, 1, 1.0)


def test_both_parts_by_hand() -> None:
    learner = FakeLearner({CAST: -1.2})
    found = rounding_shares(learner, [one_batch()], [OWN], {"cast": CAST}, WHOLE)
    # e^x - 1 - x of x = 0.2, -0.2 (own minus cast), then of -0.2, 0.1 (cast minus rollout).
    assert found == {
        "probe/cast_k3_kl": pytest.approx((0.0214028 + 0.0187308) / 2, rel=1e-4),
        "probe/arithmetic_k3_kl": pytest.approx((0.0187308 + 0.0051709) / 2, rel=1e-4),
    }
    assert learner.held == {}, ROUNDED


def test_each_part_begins_where_the_one_before_ends() -> None:
    learner = FakeLearner({INT8: -1.2, BOTH: -1.1})
    found = rounding_shares(learner, [one_batch()], [OWN], {"quantization": INT8, "cast": BOTH}, WHOLE)
    # x = 0.2, -0.2 (own minus quantised), then twice -0.1 (quantised minus cast), then -0.1, 0.2 (cast minus rollout).
    assert found == {
        "probe/quantization_k3_kl": pytest.approx((0.0214028 + 0.0187308) / 2, rel=1e-4),
        "probe/cast_k3_kl": pytest.approx(0.0048374, rel=1e-4),
        "probe/arithmetic_k3_kl": pytest.approx((0.0048374 + 0.0214028) / 2, rel=1e-4),
    }


def test_nothing_is_left_behind_when_scoring_fails() -> None:
    learner = FakeLearner({})
    with pytest.raises(LearnerError):
        rounding_shares(learner, [one_batch()], [OWN], {"cast": CAST}, WHOLE)
    assert learner.held == {}


@pytest.mark.parametrize(
    ("learner", "rollout", "expected"),
    [
        ({}, {"server": {"dtype": "bfloat16"}}, {"cast": CAST}),
        ({}, {"server": {"dtype": "float16"}}, {"cast": Rounding("float16")}),
        ({}, {"server": {"dtype": "float32"}}, {}),
        ({"dtype": "bfloat16"}, {"server": {"dtype": "bfloat16"}}, {}),
        ({}, {"server": {"dtype": "bfloat16"}, "quantization": "fp8"}, {}),
        ({}, {"server": {"dtype": "float32"}, "fake_quantization": "int8"}, {"quantization": INT8}),
        (
            {},
            {"server": {"dtype": "bfloat16"}, "fake_quantization": "int8"},
            {"quantization": INT8, "cast": BOTH},
        ),
        ({"dtype": "bfloat16"}, {"server": {"dtype": "bfloat16"}, "fake_quantization": "int8"}, {"quantization": BOTH}),
        ({}, {"server": {"dtype": "bfloat16"}, "fake_quantization": "int8", "fake_quantization_block": 64}, {}),
        ({"parallel": {"tensor": 2}}, {"server": {"dtype": "bfloat16"}, "fake_quantization": "int8"}, {}),
        (
            {"backend": "deepspeed", "deepspeed": {"zero_stage": 3}},
            {"server": {"dtype": "bfloat16"}, "fake_quantization": "int8"},
            {},
        ),
    ],
)
def test_only_what_the_push_rounds_and_ranks_can_repeat(
    learner: dict[str, Any], rollout: dict[str, Any], expected: dict[str, Rounding]
) -> None:
    config = Config.model_validate(
        {"model": {"checkpoint": "m"}, "learner": {"dtype": "float32", **learner}, "rollout": rollout}
    )
    assert roundings(config.learner, config.rollout) == expected
