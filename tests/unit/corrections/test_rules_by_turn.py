"""Rules on rows that judge each turn by itself: as rows cut into turns by hand, in every combination of rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.config import InvalidConfigError, load
from moe_trm.corrections import BoundRule, Evidence, calibrate, scores
from moe_trm.corrections.by_length import LengthTracker
from moe_trm.corrections.calibration import scores_and_lengths
from moe_trm.errors import ConfigError
from moe_trm.methods.summable import finalize
from moe_trm.ratios import LogRatios

RULES: dict[str, dict[str, Any]] = {
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "ln_trm": {"delta": 0.1, "max_score": 0.2},
    "opsm": {"delta": 0.05},
    "seq_icepop": {"low": 0.9, "high": 1.1},
    "seq_mean_k1": {"low": 0.9, "high": 1.1},
    "seq_max_k2": {"upper": 0.1},
    "seq_mis": {"low": 0.5, "high": 2.0},
    "seq_tis": {"cap": 1.2},
    "ser": {"max_score": 0.2},
    "token_veto": {"min_ratio": 0.8},
    "trm": {"max_score": 0.05},
    "trm_avg": {"mean_kl": 0.03, "divergence": "exact"},
    "trm_max": {"max_kl": 0.1},
    "trm_max_avg": {"max_kl": 0.1, "mean_kl": 0.03},
    "trm_soft": {"max_score": 0.02},
}
# Prompt and tool tokens are between turns; the last row has none, the one before it a single turn.
TURNS = torch.tensor([
    [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 9],
    [0, 0, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8],
    [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
])  # fmt: skip


def evidence(seed: int = 0, *, age: bool = True) -> Evidence:
    gen = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(TURNS.shape, generator=gen, dtype=torch.float64)

    mask = torch.rand(TURNS.shape, generator=gen) < 0.75
    mask[3] = False
    behavior = -torch.rand(TURNS.shape, generator=gen, dtype=torch.float64) - 0.5
    proximal = behavior + (normal(0.2) if age else 0.0)
    rollout = torch.where(mask, behavior + normal(0.2), torch.nan)
    ratios = LogRatios(rollout, behavior, proximal + normal(0.1), mask, proximal)
    advantages = torch.where(mask, torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None].double(), 0.0)
    return Evidence(ratios, advantages, turn_ids=TURNS, exact_kl=normal(0.2).abs(), rewards=torch.ones(4))


def cut(whole: Evidence) -> list[tuple[int, int, Evidence]]:
    """Every turn as a row of its own, by masks: row, turn, evidence."""
    found = []
    for row in range(len(TURNS)):
        for turn in sorted(set(TURNS[row].tolist())):
            mask = torch.zeros_like(whole.mask)
            mask[row] = whole.mask[row] & (TURNS[row] == turn)
            if mask.any():
                old = whole.ratios
                own = LogRatios(old._rollout, old._behavior, old._current, mask, old._proximal)
                found.append((row, turn, replace(whole, ratios=own)))
    return found


def by_hand(name: str, thresholds: dict[str, Any], whole: Evidence) -> tuple[Tensor, Tensor]:
    keep, weights = torch.zeros_like(whole.mask), torch.zeros(whole.mask.shape, dtype=torch.float64)
    for _, _, turn in cut(whole):
        one = corrections.get(name)(turn, **thresholds)
        keep, weights = keep | one.keep, weights + one.weights
    return keep, weights


def of_turns(name: str, **more: Any) -> BoundRule:
    return corrections.get(name).bind(**{**RULES[name], "scope": "turn", **more})


def test_every_rule_on_rows_is_here() -> None:
    assert {name for name in corrections.names() if corrections.get(name).scope == "sequence"} - set(RULES) <= {
        name for name in corrections.names() if name.startswith("seq_")
    }


@pytest.mark.parametrize("age", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("name", RULES)
def test_it_is_the_rule_on_turns_cut_by_hand(name: str, age: bool) -> None:
    acted = False
    for seed in range(4):
        whole = evidence(seed, age=age)
        keep, weights = by_hand(name, RULES[name], whole)
        got = of_turns(name)(whole)
        assert torch.equal(got.keep, keep)
        torch.testing.assert_close(got.weights, weights)
        acted |= bool((weights[whole.mask] != 1).any())
    assert acted, "a rule that does nothing here is not tested"


def test_one_bad_turn_does_not_cost_the_others() -> None:
    """And the share that is kept is told by turn; that of tokens is over what was sampled, as before."""
    zero = torch.zeros(2, 6, dtype=torch.float64)
    current = zero.clone()
    current[0, 2] = 2.0
    turns = torch.tensor([[0, 0, 1, 1, 9, 9], [0, 0, 0, 1, 1, 9]])
    mask = torch.ones(2, 6, dtype=torch.bool)
    seen = Evidence(LogRatios(zero, zero, current, mask), zero + 1, turn_ids=turns)
    whole, by_turn = (corrections.get("trm_max")(seen, max_kl=0.1, **own) for own in ({}, {"scope": "turn"}))
    assert whole.keep.sum().item() == 6
    assert by_turn.keep.tolist() == [[True, True, False, False, True, True], [True] * 6]
    shares = finalize(by_turn.metrics)
    prefix = "correction/trm_max/"
    assert shares[f"{prefix}kept_fraction"] == pytest.approx(10 / 12)
    assert shares[f"{prefix}kept_sequence_fraction"] == 0.5
    assert shares[f"{prefix}kept_turn_fraction"] == pytest.approx(5 / 6)
    assert [shares[f"{prefix}kept_turn_fraction/{turn}"] for turn in ("0", "1", "8_up")] == [1.0, 0.5, 1.0]
    assert f"{prefix}kept_turn_fraction" not in whole.metrics


def test_beside_other_rules_masks_are_joined_and_weights_multiply() -> None:
    whole = evidence(1)
    row, token = corrections.get("trm_avg").bind(mean_kl=0.05), corrections.get("icepop").bind(low=0.7, high=1.4)
    joint = corrections.compose([of_turns("seq_tis"), row, token])(whole)
    parts = [of_turns("seq_tis")(whole), row(whole), token(whole)]
    keep = parts[0].keep & parts[1].keep & parts[2].keep
    assert torch.equal(joint.keep, keep)
    assert 0 < keep.sum() < whole.mask.sum()
    expected = parts[0].weights * parts[1].weights * parts[2].weights
    torch.testing.assert_close(joint.weights[keep], expected[keep])


def test_thresholds_are_chosen_among_turns() -> None:
    whole = evidence(2)
    fixed: dict[str, Any] = {"scope": "turn"}
    found = scores(corrections.get("trm_max"), whole, **fixed)
    expected = torch.stack([corrections.get("trm_max")(turn, max_kl=1.0).score.max() for _, _, turn in cut(whole)])
    torch.testing.assert_close(found.sort().values, expected.sort().values)
    bound = calibrate(corrections.get("trm_max"), [found], 0.3, **fixed)
    assert bound.by_turn
    share = finalize(bound(whole).metrics)["correction/trm_max/kept_turn_fraction"]
    assert share == pytest.approx(1 - int(0.3 * len(found)) / len(found), abs=1 / len(found))
    by_length, lengths = scores_and_lengths(corrections.get("trm_max"), whole, **fixed)
    assert len(by_length) == len(lengths) == len(found)
    assert sorted(lengths.tolist()) == sorted(int(turn.mask.sum()) for _, _, turn in cut(whole))
    tracker = LengthTracker(0.3, 1)
    assert of_turns("trm_max").following(tracker.thresholds)(whole).keep.equal(whole.mask), "no octave is known yet"


def test_rows_without_tokens_and_batches_without_rows_are_defined() -> None:
    zero = torch.zeros(4, 12)
    nothing = replace(evidence(), ratios=LogRatios(zero, zero, zero, zero.bool()))
    for name in RULES:
        got = of_turns(name)(nothing)
        assert not got.keep.any()
        assert not got.weights.any()


def test_what_cannot_be_by_turn_is_refused(tmp_path: Path) -> None:
    for name, scope in (("icepop", "turn"), ("m2po", "turn"), ("trm_max", "token")):
        with pytest.raises(ConfigError, match="cannot judge by that scope"):
            corrections.get(name).bind(**{**RULES.get(name, {}), "scope": scope})
    with pytest.raises(ConfigError, match="turn of each token"):
        of_turns("trm_max")(replace(evidence(), turn_ids=None))
    file = tmp_path / "c.yaml"
    file.write_text("model: {checkpoint: none}\n")
    rules = ["correction.rules=[{name: trm_max, thresholds: {max_kl: 0.1, scope: turn}}]"]
    with pytest.raises(InvalidConfigError, match="every sample is one turn"):
        load(file, rules)
    load(file, [*rules, "rollout.function=examples/calculator/calculator.py:rollout"])
