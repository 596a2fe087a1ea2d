"""The parts of the worked examples that need no engine."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_trm import corrections, losses
from moe_trm.corrections import Evidence
from moe_trm.losses import LossInputs
from moe_trm.methods.load import load_function
from moe_trm.ratios import LogRatios
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.tasks import RewardInput
from moe_trm.tasks.problems import ArithmeticProblem

REPOSITORY = Path(__file__).parents[2]
CALCULATOR = REPOSITORY / "examples" / "calculator" / "rollout.py"
AGENT = REPOSITORY / "examples" / "agent" / "agent.py"
TERMINAL = REPOSITORY / "examples" / "terminal" / "agent.py"
PARSER = REPOSITORY / "examples" / "openai_agents" / "parser.py"
OWN_METHODS = REPOSITORY / "examples" / "own_methods" / "methods.py"
PAGE = (REPOSITORY / "docs" / "tasks.md").read_text(encoding="utf-8")


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
    """The tool's text is the text that the model was warmed up to write itself."""
    calculate = load_function(f"{CALCULATOR}:calculate", key="test")
    for problem in (
        ArithmeticProblem(672, "+", 39),
        ArithmeticProblem(999, "+", 1),
        ArithmeticProblem(52, "-", 7),
        ArithmeticProblem(7, "-", 52),
    ):
        for step in problem.working().removeprefix("~").split(","):
            question, _, answer = step.rpartition("=")
            assert calculate(f"{question}=") == answer


def test_the_agent_calculates_as_the_rollout_function_does() -> None:
    """The text of an answer comes without the `=` that ended it."""
    pytest.importorskip(
        "openai.resources", reason="the openai package, or a part of it, is missing", exc_type=ImportError
    )
    calculate, other = (load_function(f"{path}:calculate", key="test") for path in (AGENT, CALCULATOR))
    for text in ("2+9", ",7+3+1", "~2-7", "12+34", "", "2+"):
        assert calculate(text) == other(f"{text}=")


def test_the_terminal_calculates_as_the_rollout_function_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real shell, which cannot see the key of its session."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    calculate = load_function(f"{CALCULATOR}:calculate", key="test")
    with load_function(f"{TERMINAL}:Terminal", key="test")() as terminal:
        for text in ("2+9", "7+3+1", "2-7", "2-7-1", "12+34", "0-10", "5-25"):
            assert terminal.run(f"calc {text}") == calculate(f"{text}=")
        assert "secret" not in terminal.run("env")
        assert terminal.run("pwd") == str(tmp_path)
        terminal.run("x=3")
        assert terminal.run("echo $x; no-such-command").startswith("3\n")
        with pytest.raises(EOFError):
            terminal.run("exit")


def test_the_parser_of_the_frameworks_example() -> None:
    calls = load_function(f"{PARSER}:calls", key="test")
    for text, beside, expression in (("2+9", "", "2+9"), (",7+3+1", ",", "7+3+1"), ("~2-7", "~", "2-7")):
        assert calls(text, ()) == (beside, [{"name": "calculator", "arguments": {"expression": expression}}])
    for text in ("#711", "#-5", "", "2+", "12"):
        assert calls(text, ()) == (text, [])


def test_the_correction_of_ones_own() -> None:
    """Log-ratios of the engine: 0, 0.6, -0.4 at advantage -1, then 0.6 at advantage 1."""
    rollout, mask = torch.full((2, 3), -2.0), torch.tensor([[True, True, True], [True, False, False]])
    behavior = rollout + torch.tensor([[0.0, 0.6, -0.4], [0.6, 9.0, 9.0]])
    evidence = Evidence(LogRatios(rollout, behavior, behavior, mask), torch.tensor([[-1.0] * 3, [1.0] * 3]))
    got = corrections.get(f"{OWN_METHODS}:negative_gap_mask")(evidence, max_gap=0.5)
    assert got.keep.tolist() == [[True, False, True], [True, False, False]]
    assert got.weights.tolist() == [[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert corrections.finalize(got.metrics)["correction/negative_gap_mask/kept_fraction"] == 0.75


def test_the_unit_test_on_the_page_of_own_methods_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    page = (OWN_METHODS.parent / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    names["test_negative_gap_mask"]()


def test_a_target_chooses_the_threshold_of_the_correction_of_ones_own() -> None:
    """Gaps 0.01 to 1.00, half of them at a negative advantage: at most a tenth of those 50 is beyond the threshold."""
    rollout, mask = torch.full((1, 100), -2.0), torch.ones(1, 100, dtype=torch.bool)
    behavior = rollout + torch.arange(1, 101)[None] / 100
    sign = torch.tensor([[-1.0, 1.0]]).repeat(1, 50)
    evidence = Evidence(LogRatios(rollout, behavior, behavior, mask), sign)
    own = corrections.get(f"{OWN_METHODS}:negative_gap_mask")
    bound = corrections.calibrate(own, [corrections.scores(own, evidence)], 0.1)
    assert bound.thresholds["max_gap"] == pytest.approx(0.91)
    assert int((~bound(evidence).keep).sum()) == 4


def test_the_loss_of_ones_own() -> None:
    """Ratios 1, 1.5, 1.5, 0.5 at advantages 2, 1, -1, 1: outside of the clip the slope is a tenth, where PPO's is 0."""
    ratio, advantages = torch.tensor([[1.0, 1.5, 1.5, 0.5]]), torch.tensor([[2.0, 1.0, -1.0, 1.0]])
    old, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    current = (old + ratio.log()).requires_grad_()
    inputs = LossInputs.uncorrected(LogRatios(old, old, current, mask), current, advantages)
    got = losses.get(f"{OWN_METHODS}:leaky_clip")(inputs, clip=0.2, leak=0.1)
    torch.testing.assert_close(got.values, torch.tensor([[-2.0, -1.23, 1.5, -0.5]]))
    (slope,) = torch.autograd.grad(got.values.sum(), current)
    torch.testing.assert_close(slope, torch.tensor([[-2.0, -0.15, 1.5, -0.5]]))
    assert corrections.finalize(got.metrics)["loss/leaked_fraction"] == 0.75


def test_the_agents_page_has_functions_that_load() -> None:
    page = (REPOSITORY / "docs" / "agents.md").read_text(encoding="utf-8")
    agent_code, parser_code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(parser_code, names)
    reader = AnswerReader(names["tools"], names["reasoning"])  # type: ignore[arg-type]
    assert reader("anything", ({},))["reasoning_content"] == "the reasoning"
    compile(agent_code, "docs/agents.md", "exec")


def test_the_named_rewards() -> None:
    reward = load_function(f"{OWN_METHODS.with_name('rewards.py')}:reward", key="test")
    right = RewardInput("p", "2+2", "4", "2+2=4#4", (1, 2, 3), "2+2=4#4", 1, "stop")
    assert reward(right) == {"right": 1.0, "brief": 0.25}
    assert reward(replace(right, completion="#5"))["right"] == 0.0
    assert reward(replace(right, finish_reason="length"))["right"] == 0.0


def test_the_code_on_the_page_runs() -> None:
    reward_code, rollout_code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(reward_code, names)
    exec(rollout_code, names)
    sample = RewardInput("p", "2+2", "4", " 4 ", (4,), " 4 ", 1, "stop")
    assert names["reward"](sample) == 1.0  # type: ignore[operator]
    assert iscoroutinefunction(names["rollout"])


def test_the_page_of_own_methods_names_every_field_that_they_are_given() -> None:
    page = (OWN_METHODS.parent / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (both|loss) \|", page, re.MULTILINE))
    rules, of_losses = ({each.name for each in fields(kind)} | {"mask"} for kind in (Evidence, LossInputs))
    assert set(listed) == rules | of_losses
    assert {name for name, who in listed.items() if who == "both"} == rules & of_losses
