"""The parts of the worked examples that need no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.functions.load import load_function
from moe_trm.tasks.problems import Problem

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator" / "rollout.py"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+9=", "11"),
        (",7+3+1=", "11"),
        (",5-0-1=", "4"),
        ("~2-7=", "5b"),
        ("12+34=", "46"),
        ("=", "?"),
        ("2+=", "?"),
        ("2+2", "?"),
    ],
)
def test_the_calculator(text: str, value: str) -> None:
    assert load_function(f"{CALCULATOR}:calculate", key="test")(text) == value


def test_the_calculator_agrees_with_the_quickstarts_working() -> None:
    """What the tool says is what the model was warmed up to write itself."""
    calculate = load_function(f"{CALCULATOR}:calculate", key="test")
    for problem in (Problem(672, "+", 39), Problem(999, "+", 1), Problem(52, "-", 7), Problem(7, "-", 52)):
        for step in problem.working().removeprefix("~").split(","):
            question, _, answer = step.rpartition("=")
            assert calculate(f"{question}=") == answer
