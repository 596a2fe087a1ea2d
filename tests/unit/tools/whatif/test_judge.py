"""Candidates on recorded updates: literal figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_trm.cli import main
from moe_trm.config.schema import Config, CorrectionConfig, LossConfig
from moe_trm.recording.scores import CONFIG_FILE, ScoredBatch, ScoredUpdate, write_scores
from moe_trm.tools.whatif.gradient import EffectiveWeights
from moe_trm.tools.whatif.judge import Candidate, RuleOutcome, judge

CONFIG = Config.model_validate({"model": {"checkpoint": "none"}})
ENGINE_RATIOS = torch.tensor([[1.0, 4.0, 1.0, 0.0], [0.2, 1.0, 0.0, 0.0]])
"""Behaviour over rollout of 3 + 2 tokens."""


def recorded(advantages: tuple[float, float] = (1.0, -1.0)) -> ScoredUpdate:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    rollout = torch.where(mask, -2.0, 0.0)
    behavior = torch.where(mask, rollout + ENGINE_RATIOS.clamp(min=1e-3).log(), 0.0)
    batch = ScoredBatch(
        mask=mask,
        rollout_logprobs=rollout,
        anchor_logprobs=behavior,
        current_logprobs=behavior,
        advantages=torch.tensor(advantages)[:, None] * mask,
        turn_ids=torch.zeros(2, 4, dtype=torch.int16),
        versions=torch.zeros(2, 4, dtype=torch.int32),
        sample_ids=torch.tensor([0, 1]),
        group_ids=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0]),
    )
    return ScoredUpdate((batch,), num_sequences=2, num_tokens=5)


def outcome(correction: dict[str, object], loss: dict[str, object] | None = None) -> RuleOutcome:
    candidate = Candidate("it", CorrectionConfig.model_validate(correction), LossConfig.model_validate(loss or {}))
    return judge(candidate, CONFIG, {1: [recorded()]})


def test_a_token_rule_keeps_what_it_keeps() -> None:
    found = outcome({"rules": [{"name": "icepop", "thresholds": {"low": 0.5, "high": 5.0}}]}, {"name": "reinforce"})
    assert found.steps is not None
    assert found.pooled is not None
    assert found.histogram is not None
    assert found.steps[1]["correction/kept_fraction"] == 4 / 5
    assert found.pooled["correction/kept_sequence_fraction"] == 1 / 2
    # Weights 1, 4, 1, 0, 1 of five tokens.
    assert found.pooled["gradient/trained_fraction"] == 4 / 5
    assert found.pooled["gradient/weight_mean"] == pytest.approx(7 / 5)
    assert found.pooled["gradient/eff_sample_size"] == pytest.approx(49 / (5 * 19))
    assert found.histogram["0"] == pytest.approx(0.2)
    assert found.histogram["to 1.25"] == pytest.approx(0.6)
    assert found.histogram["to 4"] + found.histogram["above 4"] == pytest.approx(0.2)
    assert found.verdict.startswith("The two engines disagree")


def test_clipping_shows_in_the_gradient_and_not_in_what_rules_keep() -> None:
    moved = recorded()
    batch = moved.batches[0]
    up = replace(
        batch,
        current_logprobs=torch.where(
            batch.mask, batch.rollout_logprobs + ENGINE_RATIOS.clamp(min=1e-3).log() + math.log(1.5), 0.0
        ),
    )
    candidate = Candidate("clip", CorrectionConfig(), LossConfig(name="ppo_clip"))
    found = judge(candidate, CONFIG, {1: [moved, replace(moved, batches=(up,))]})
    assert found.pooled is not None
    assert found.pooled["correction/kept_fraction"] == 1.0
    # The first update trains all five tokens; in the second, the three with a positive advantage are clipped.
    assert found.pooled["gradient/trained_fraction"] == 7 / 10


def test_a_candidate_that_cannot_run_says_why() -> None:
    assert "entropy" in outcome({}, {"name": "espo"}).refused


def test_tokens_without_advantage_have_no_weight() -> None:
    weights = EffectiveWeights()
    weights.add(torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3))
    assert weights.summary()["gradient/weight_mean"] == 0.5
    assert weights.histogram()["below 0"] == 0.5
    assert EffectiveWeights().summary() == EffectiveWeights().histogram() == {}


@pytest.mark.parametrize(
    ("rules", "bias", "variance"),
    [
        ([], (0 + 3 + 0 + 0.8 + 0) / 10, 0.0),
        ([{"name": "token_tis", "thresholds": {"cap": 9.0}}], 0.0, 5 * (16 + 3 + 0.04) / 7.2**2 - 1),
        ([{"name": "token_tis", "thresholds": {"cap": 2.0}}], 2 / 10, 5 * (4 + 3 + 0.04) / 5.2**2 - 1),
        ([{"name": "icepop", "thresholds": {"low": 0.5, "high": 2.0}}], 4.2 / 10, 5 * 3 / 9 - 1),
    ],
    ids=["none", "weights", "capped", "band"],
)
def test_bias_and_variance_of_what_a_rule_leaves(rules: list[object], bias: float, variance: float) -> None:
    """Ratios 1, 4, 1 and 0.2, 1: half the mean distance of weights to them, and the square of weights."""
    found = outcome({"rules": rules}, {"name": "reinforce"})
    assert found.pooled is not None
    assert found.pooled["gradient/bias_tv"] == pytest.approx(bias, abs=1e-6)
    assert found.pooled["gradient/variance_chi2"] == pytest.approx(variance, abs=1e-6)


TARGET = {"rules": [{"name": "token_k2", "target_reject_rate": 0.3}]}


def test_a_rule_by_length_that_only_measured_has_no_figures() -> None:
    rules = [{"name": "trm_avg", "target_reject_rate": 0.3, "by_length": True}]
    chosen = CorrectionConfig.model_validate({"rules": rules, "calibration_steps": 2})
    config = CONFIG.model_copy(update={"correction": chosen})
    measured, later = (
        judge(Candidate("it", chosen, LossConfig()), config, {1 + step: [recorded()] for step in range(steps)})
        for steps in (2, 3)
    )
    assert "trm_avg measures" in measured.uncalibrated
    assert measured.pooled == {}
    assert not later.uncalibrated
    assert later.pooled


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_rule_that_only_measured_has_no_figures(num_steps: int) -> None:
    """Two steps are measured: figures are of the steps after them, and there are none without such a step."""
    config = CONFIG.model_copy(update={"correction": CorrectionConfig(calibration_steps=2)})
    chosen = CorrectionConfig.model_validate({**TARGET, "calibration_steps": 2})
    found = judge(Candidate("it", chosen, LossConfig()), config, {1 + step: [recorded()] for step in range(num_steps)})
    assert found.pooled is not None
    if num_steps <= 2:
        assert found.pooled == found.histogram == {}
        assert f"token_k2 measures for correction.calibration_steps=2 steps, and the recording has {num_steps}" in (
            found.uncalibrated
        )
        return
    assert not found.uncalibrated
    assert found.steps is not None
    assert found.pooled["correction/kept_fraction"] == found.steps[num_steps]["correction/kept_fraction"] == 4 / 5
    assert found.steps[1]["correction/kept_fraction"] == 1.0


def test_the_table_shows_a_dash_for_an_uncalibrated_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # a long name has its figures on its own line
    write_scores(tmp_path, 1, [recorded()], data_rank=0, data_size=1)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG.dump()))
    target = "{name: token_k2, target_reject_rate: 0.3}"
    assert main(["whatif", str(tmp_path), "--rules", target, "--rules", "{name: icepop}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("uncalibrated: token_k2 measures"))
    assert lines[place - 1].split()[-6:] == ["-"] * 6
    assert any("0.8000" in line for line in lines[place:])
    assert not any("1.0000" in line for line in lines[place - 1 : place + 1])


def test_the_command_tries_everything_and_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_scores(tmp_path, 1, [recorded()], data_rank=0, data_size=1)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG.dump()))
    assert main(["whatif", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    names = [one["name"] for one in document["candidates"]]
    assert names[0] == "as trained"
    assert {"preset decoupled_geo_rs_seq_tis", "loss gspo", "loss espo"} <= set(names)
    assert [one["name"] for one in document["candidates"] if one["refused"]] == ["loss dpo", "loss espo", "loss rspo"]
    text = capsys.readouterr().out
    assert "verdict: The two engines disagree" in text
    assert main(["whatif", str(tmp_path), "--rules", "[{nam: icepop}]"]) == 2
    assert main(["whatif", str(tmp_path / "nowhere")]) == 2
    (tmp_path / CONFIG_FILE).write_text("{")
    assert main(["whatif", str(tmp_path)]) == 2


def test_the_command_tries_methods_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example's rule drops one token of five, that of ratio 0.2. What cannot be loaded is an error."""
    write_scores(tmp_path, 1, [recorded()], data_rank=0, data_size=1)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG.dump()))
    own = Path(__file__).parents[4] / "examples" / "own_methods" / "methods.py"
    chosen = ["--rules", f"{{name: '{own}:negative_gap_mask'}}", "--loss", f"{own}:leaky_clip", "gspo"]
    assert main(["whatif", str(tmp_path), *chosen, "--json", str(tmp_path / "out.json")]) == 0
    _, rules, mine, gspo = json.loads((tmp_path / "out.json").read_text())["candidates"]
    assert rules["pooled"]["correction/negative_gap_mask/kept_fraction"] == pytest.approx(0.8)
    assert mine["pooled"]["loss/leaked_fraction"] == 0.0
    assert not gspo["refused"]
    capsys.readouterr()
    for wrong in (["--loss", f"{own}:leaky"], ["--loss", "gspoo"], ["--rules", f"{{name: '{own}:torch'}}"]):
        assert main(["whatif", str(tmp_path), *wrong]) == 2
        assert "error: " in capsys.readouterr().err
