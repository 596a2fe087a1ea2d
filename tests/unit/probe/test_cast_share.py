"""Numerics split into the cast of the weights and the rest: literal numbers, and when it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import LearnerError
from moe_trm.learner.protocol import Scores
from moe_trm.probe.cast_share import CAST, cast_share, narrower_dtype
from moe_trm.types import TokenBatch
from routing.replay import RouteSource
from tests.unit.doubles import StandInLearner


class FakeLearner(StandInLearner):
    """Scores a constant under the rounded weights."""

    def __init__(self, logprob: float) -> None:
        self.logprob, self.held = logprob, dict[str, str]()

    def snapshot(self, name: str, *, saved: bool = False, rounded_to: str | None = None) -> int:
        assert rounded_to is not None
        self.held[name] = rounded_to
        return 0

    def forget(self, name: str) -> None:
        del self.held[name]

    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
    ) -> list[Scores]:
        if self.held.get(weights or "") != "bfloat16":
            raise LearnerError("no such snapshot")
        return [Scores(torch.full(batch.mask.shape, self.logprob)) for batch in batches]


def test_both_parts_by_hand() -> None:
    mask = torch.tensor([[True, True, False]])
    batch: Any = SimpleNamespace(mask=mask, routes=(), origins=(), rollout_logprobs=torch.tensor([[-1.0, -1.3, 9.0]]))
    own = Scores(torch.tensor([[-1.0, -1.4, 5.0]]))
    learner = FakeLearner(-1.2)
    found = cast_share(learner, [batch], [own], "bfloat16")
    # e^x - 1 - x of x = 0.2, -0.2 (own minus cast), then of -0.2, 0.1 (cast minus rollout).
    assert found["probe/cast_k3_kl"] == pytest.approx((0.0214028 + 0.0187308) / 2, rel=1e-4)
    assert found["probe/arithmetic_k3_kl"] == pytest.approx((0.0187308 + 0.0051709) / 2, rel=1e-4)
    assert learner.held == {}, CAST


def test_nothing_is_left_behind_when_scoring_fails() -> None:
    learner = FakeLearner(0.0)
    with pytest.raises(LearnerError):
        cast_share(learner, [], [], "float16")
    assert learner.held == {}


@pytest.mark.parametrize(
    ("learner", "rollout", "quantization", "expected"),
    [
        ("float32", "bfloat16", None, "bfloat16"),
        ("float32", "float16", None, "float16"),
        ("float32", "float32", None, None),
        ("bfloat16", "bfloat16", None, None),
        ("float32", "bfloat16", "fp8", None),
    ],
)
def test_only_where_the_push_rounds_and_nothing_else_does(
    learner: str, rollout: str, quantization: str | None, expected: str | None
) -> None:
    config = Config.model_validate(
        {
            "model": {"checkpoint": "m"},
            "learner": {"dtype": learner},
            "rollout": {"server": {"dtype": rollout}, "quantization": quantization},
        }
    )
    assert narrower_dtype(config) == expected
