"""Corrections and loss against each other and against what is known of the rollout: all refused on loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.config import InvalidConfigError, load
from moe_trm.config.rules import warnings
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, SeveralRefusals
from moe_trm.step.recipe import recipe


def test_every_contradiction_is_told_at_once_before_torch_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {checkpoint: none}\n", encoding="utf-8")
    rules = "{name: token_tis, by_length: true}, {name: icepop, thresholds: {ratio: lag}}"
    with pytest.raises(InvalidConfigError) as refused:
        load(
            file,
            [
                "pipeline.mode=async",
                "pipeline.behavior=interpolate",
                "correction.preset=bypass_pg_is",
                "correction.batch_normalize=token",
                f"correction.rules=[{rules}]",
                "loss.name=minirl",
                "loss.clip_low=0.1",
                "loss.parameters={clip_low: 0.2}",
            ],
        )
    said = [problem.what for problem in refused.value.problems]
    for expected in (
        "chosen from a target",
        "has its own loss",
        "given twice",
        "rule token_tis reads a ratio that is not known",
        "rule icepop reads a ratio that is not known",
        "look at the whole minibatch",
        "counted twice",
    ):
        assert any(expected in what for what in said), (expected, said)


def test_noise_on_layers_needs_the_ratio_to_what_sampled(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {checkpoint: none}\n", encoding="utf-8")
    noise = "learner.layer_noise.sigma=0.01"
    for others in ([], ["pipeline.mode=async"], ["correction.preset=decoupled_token_is"]):
        with pytest.raises(InvalidConfigError, match="current / proximal would be the noise"):
            load(file, [noise, *others])
    for others in (
        ["correction.preset=bypass_ppo_clip"],
        ["pipeline.mode=async", "pipeline.behavior=bypass"],
        ["loss.name=unclipped", "loss.parameters={ratio: total}"],
    ):
        load(file, [noise, *others])
    idle = "learner.layer_noise.sigma_lr has no effect"
    assert any(idle in warning for warning in warnings(load(file, ["learner.layer_noise.sigma_lr=0.1"])))
    assert not any(idle in warning for warning in warnings(load(file, [noise, "correction.preset=bypass_pg_is"])))


@pytest.mark.parametrize(("weight", "refused"), [("one", True), ("ratio", False)])
def test_a_rule_that_only_rejects_has_no_weights_to_normalise(weight: str, refused: bool, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {checkpoint: none}\n", encoding="utf-8")
    overrides = [
        "correction.batch_normalize=token",
        f"correction.rules=[{{name: icepop, thresholds: {{weight: {weight}}}}}]",
    ]
    if not refused:
        load(file, overrides)
        return
    with pytest.raises(InvalidConfigError, match="no weights to normalise"):
        load(file, overrides)


def test_a_rule_of_ones_own_is_asked_the_same_once_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from moe_trm.corrections import Correction\nfrom moe_trm.corrections.rule import rule\n"
        "@rule(ratio='lag', scope='batch')\ndef mine(e, x):\n    return Correction(e.mask.float(), e.mask, {})\n"
    )
    pipeline = {"mode": "async", "behavior": "interpolate"}
    rules = {"rules": [{"name": f"{tmp_path / 'mine.py'}:mine"}]}
    settings = Config.model_validate({"model": {"checkpoint": "none"}, "pipeline": pipeline, "correction": rules})
    with pytest.raises(InvalidConfigError) as refused:
        recipe(settings)
    assert len(refused.value.problems) == 2, refused.value


def test_thresholds_and_parameters_are_refused_together() -> None:
    rules = [{"name": "token_tis", "thresholds": {"cop": 1.0}}, {"name": "trm_max"}]
    sections = {"correction": {"rules": rules}, "loss": {"parameters": {"beta": 1.0}}}
    with pytest.raises(SeveralRefusals) as refused:
        recipe(Config.model_validate({"model": {"checkpoint": "none"}, **sections}))
    assert len(refused.value.reasons) == 3
    assert isinstance(refused.value, ConfigError)


@pytest.mark.parametrize("rule", ["{name: icepop}", "{name: token_tis, thresholds: {ratio: merged, cap: 2.0}}"])
def test_a_refusal_says_which_rule_the_preset_brought(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{checkpoint: m}}\ncorrection: {{preset: decoupled_token_is, rules: [{rule}]}}\n")
    with pytest.raises(
        ConfigError, match=r"beside rule token_tis \(of correction.preset=decoupled_token_is: token_tis\)"
    ):
        load(path)
