"""Corrections and losses of the user's own: refusals before anything runs, short names for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm import corrections
from moe_trm.cli import main
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.methods.corrections import CORRECTIONS
from moe_trm.methods.losses import LOSSES
from moe_trm.methods.own import is_own
from moe_trm.step.recipe import recipe

RULE = "from moe_trm.corrections import Correction\nfrom moe_trm.corrections.rule import rule\n"
LOSS = "from moe_trm.losses import TokenLoss\nfrom moe_trm.losses.loss import loss\n"
TOKEN = f"{RULE}@rule(ratio='engine', scope='token')\n"
MEAN = f"{LOSS}@loss(aggregation='token-mean')\n"
KEEP = "    return Correction(e.mask.float(), e.mask, {})\n"


def chosen(**sections: object) -> Config:
    return Config.model_validate({"model": {"checkpoint": "none"}, **sections})


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("a.py:f", True),
        ("pack.age:f", True),
        ("/x/a.py:f", True),
        ("trm_max", False),
        (":f", False),
        ("a.py:", False),
        ("a.py:not a name", False),
    ],
)
def test_a_place_and_a_function_is_a_name_of_ones_own(name: str, own: bool) -> None:
    assert is_own(name) is own


@pytest.mark.parametrize(
    ("code", "thresholds", "said"),
    [
        (f"{RULE}def f(e, x):\n{KEEP}", {}, "no correction"),
        (f"{RULE}f = 3", {}, "not a function"),
        (f"{RULE}@rule(ratio='engin', scope='token')\ndef f(e, x):\n{KEEP}", {}, "unknown ratio"),
        (f"{RULE}@rule(ratio='engine', scope='word')\ndef f(e, x):\n{KEEP}", {}, "unknown scope"),
        (f"{TOKEN}def f(e):\n{KEEP}", {}, "takes two values"),
        (f"{TOKEN}def f(e, x, cap=1.0):\n{KEEP}", {}, "takes two values"),
        (f"{TOKEN}def f(e, x, *, cap):\n{KEEP}", {}, "has no default"),
        (f"{TOKEN}def f(e, x):\n{KEEP}", {"cap": 1.0}, "unknown threshold"),
        (f"{TOKEN}def f(e, x):\n    return x", {}, "returns a Correction"),
        (f"{TOKEN}def f(e, x):\n    return Correction(x.sum(1), e.mask, {{}})", {}, "for every token"),
        (f"{TOKEN}def f(e, x):\n    return x.max()", {}, "without rows"),
        (f"{TOKEN}def icepop(e, x):\n{KEEP}f = icepop", {}, "built-in correction"),
        ("import no_such_module\n", {}, "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_correction_that_cannot_work_is_refused_with_the_reason(
    code: str, thresholds: dict[str, float], said: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    name = f"{tmp_path / 'mine.py'}:f"
    with pytest.raises(ConfigError, match=said):
        recipe(chosen(correction={"rules": [{"name": name, "thresholds": thresholds}]}))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"{LOSS}def f(i, x):\n    return TokenLoss(x, {{}})", "no loss"),
        (f"{LOSS}@loss(aggregation='mean')\ndef f(i, x):\n    return TokenLoss(x, {{}})", "unknown aggregation"),
        (f"{LOSS}@loss(aggregation='token-mean', needs=['noise'])\ndef f(i, x):\n    return x", "unknown need"),
        (f"{MEAN}def f(i, x):\n    return x.sum()", "loss of each token"),
        (f"{MEAN}def f(i, x):\n    return TokenLoss(x.sum(), {{}})", "loss of each token"),
        (f"{MEAN}def f(i, x):\n    return x.max()", "without rows"),
        (f"{MEAN}def sapo(i, x):\n    return TokenLoss(x, {{}})\nf = sapo", "built-in loss"),
    ],
)  # fmt: skip
def test_a_loss_that_cannot_work_is_refused_with_the_reason(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=said):
        recipe(chosen(loss={"name": f"{tmp_path / 'mine.py'}:f"}))


def test_the_refusal_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bounded(evidence, log_ratio):\n    pass\n")
    with pytest.raises(ConfigError) as refused:
        corrections.get(f"{tmp_path / 'mine.py'}:bounded")
    assert "from moe_trm.corrections.rule import rule" in str(refused.value)
    assert '@rule(ratio="engine", scope="token")' in str(refused.value)


def test_two_files_of_one_name_and_two_functions_of_one_file(tmp_path: Path) -> None:
    """Neither file takes the other's place, nor that of a module that is loaded, and a file runs once."""
    for folder, size in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        body = f"@rule(ratio='engine', scope='token')\ndef one(e, x, *, cap: float = {size}):\n{KEEP}"
        (tmp_path / folder / "json.py").write_text(RULE + body + body.replace("one", "two"))
    names = [f"{tmp_path / folder / 'json.py'}:{function}" for folder in "ab" for function in ("one", "two")]
    found = [corrections.get(name) for name in names]
    assert [rule.defaults["cap"] for rule in found] == [1.0, 1.0, 2.0, 2.0]
    assert found[0].function.__globals__ is found[1].function.__globals__
    assert sys.modules["json"].__name__ == "json"
    with pytest.raises(ConfigError, match="listed twice"):
        recipe(chosen(correction={"rules": [{"name": names[0]}, {"name": names[2]}]}))


def test_needs_of_a_loss_reach_the_recipe(tmp_path: Path) -> None:
    decorated = "@loss(aggregation='token-sum', needs=['entropy'])\ndef f(i, x):\n    return TokenLoss(x, {})\n"
    (tmp_path / "mine.py").write_text(LOSS + decorated)
    found = recipe(chosen(loss={"name": f"{tmp_path / 'mine.py'}:f"}))
    assert (found.entropy, found.aggregation, found.loss.loss.name) == (True, "token-sum", "f")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("x.detach() * i.advantages", "no gradient"),
        ("x * 0.0", "no gradient"),
        ("x * float('nan')", "no finite number"),
        ("x / x.detach().abs().mul(0)", "no finite number"),
        ("x[7]", "fails on made-up rows"),
    ],
)
def test_a_loss_that_would_train_nothing_is_refused(values: str, reason: str, tmp_path: Path) -> None:
    """It works on no rows, and so only made-up ones show it."""
    body = f"def f(i, x):\n    return TokenLoss({values} if len(x) else x, {{}})\n"
    (tmp_path / "mine.py").write_text(MEAN + body)
    with pytest.raises(ConfigError, match=reason):
        recipe(chosen(loss={"name": f"{tmp_path / 'mine.py'}:f"}))


@pytest.mark.parametrize("weight", ["float('nan')", "-1.0", "float('inf')"])
def test_a_correction_with_weights_that_are_none_is_refused(weight: str, tmp_path: Path) -> None:
    body = f"def f(e, x):\n    return Correction(e.mask.float() * {weight}, e.mask, {{}})\n"
    (tmp_path / "mine.py").write_text(TOKEN + body)
    name = f"{tmp_path / 'mine.py'}:f"
    with pytest.raises(ConfigError, match="would train nothing"):
        recipe(chosen(correction={"rules": [{"name": name}]}))


def test_methods_that_train_are_let_through(tmp_path: Path) -> None:
    """Also where they read every optional field, and weigh stale tokens by an unbounded ratio."""
    loss_body = (
        "def f(i, x):\n    fields = (i.turn_ids, i.rewards, i.group_ids, i.entropy, i.reference_logprobs)\n"
        "    assert all(field is not None for field in fields)\n"
        "    return TokenLoss(-x.exp() * i.advantages * i.weights, {})\n"
    )
    rule_body = "def g(e, x):\n    return Correction(x.exp() * e.mask, e.mask & (x.abs() < 0.1), {})\n"
    (tmp_path / "mine.py").write_text(MEAN + loss_body + RULE + TOKEN + rule_body)
    names = [f"{tmp_path / 'mine.py'}:{function}" for function in "fg"]
    recipe(chosen(loss={"name": names[0]}, correction={"rules": [{"name": names[1]}]}))


def test_the_configuration_explains_what_a_name_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    for key, known in (("loss.name", LOSSES), ("correction.rules.0.name", CORRECTIONS)):
        assert main(["config", "explain", key]) == 0
        said = capsys.readouterr().out
        assert all(name in said for name in [*known, "path/to/file.py:function"])


def test_the_configuration_and_its_tables_load_no_torch() -> None:
    program = "import moe_trm.config.commands, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
