"""Sampling that an engine would do otherwise than it is asked to is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config


@pytest.mark.parametrize(
    ("rollout", "refused"),
    [
        ({"temperature": 1e-9}, True),
        ({"temperature": 1e-6}, False),
        ({"temperature": 1e-3}, False),
        ({"temperature": 1e-3, "engine": "vllm"}, True),
        ({"temperature": 0.01, "engine": "vllm"}, False),
    ],
)
def test_a_temperature_that_the_engine_changes(rollout: dict[str, Any], refused: bool) -> None:
    config = Config.model_validate({"model": {"checkpoint": "m"}, "rollout": rollout})
    problems = [problem for problem in refusals(config) if problem.key == "rollout.temperature"]
    assert bool(problems) is refused
