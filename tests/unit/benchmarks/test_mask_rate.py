"""Reject rates on updates of which everything is known."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.mask_rate import OF_THE_RUN, Strata, all_rates, evidences, predictions, rates, table
from moe_trm import corrections
from moe_trm.config.schema import Config
from moe_trm.recording.scores import ScoredBatch, ScoredUpdate

ROWS, COLUMNS = 200, 64


def noise(num_rows: int = ROWS) -> ScoredUpdate:
    """Independent token log-ratios N(0, 0.1^2) between rollout and learner; lengths 1 to 64; right where even."""
    gen = torch.Generator().manual_seed(0)
    lengths = 1 + torch.arange(num_rows) * COLUMNS // num_rows
    mask = torch.arange(COLUMNS) < lengths[:, None]
    behavior = torch.where(mask, -1 + 0.1 * torch.randn(num_rows, COLUMNS, generator=gen), 0.0)
    right = torch.arange(num_rows) % 2 == 0
    batch = ScoredBatch(
        mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        current_logprobs=behavior,
        advantages=torch.where(right, 1.0, -1.0)[:, None] * mask,
        turn_ids=torch.zeros_like(mask, dtype=torch.int16),
        versions=torch.zeros_like(mask, dtype=torch.int32),
        sample_ids=torch.arange(num_rows),
        group_ids=torch.arange(num_rows) // 8,
        rewards=right.float(),
        anchor_logprobs=behavior,
    )
    return ScoredUpdate((batch,), num_rows, int(mask.sum()))


def test_a_rule_is_counted_where_it_rejects() -> None:
    found = evidences([noise(), noise()])
    strata = Strata(found)
    assert len(strata.length) == 2 * ROWS
    assert strata.lengths()[0] < 5
    assert strata.lengths()[-1] > 58
    one = rates("opsm", [corrections.get("opsm").bind(delta=1e-9)], found, strata, None)
    # Off-policy sequence masking leaves rows with a positive advantage alone.
    assert (one.positive, one.correct) == (0.0, 0.0)
    assert one.negative == one.wrong == pytest.approx(2 * one.rows)
    assert one.ess == pytest.approx(1 - one.tokens)
    nothing = rates("disabled", [], found, strata, None)
    assert (nothing.rows, nothing.tokens, nothing.ess, nothing.deciles) == (0.0, 0.0, 1.0, (0.0,) * 10)


def test_independent_tokens_are_predicted_by_one_minus_one_minus_p_to_the_t() -> None:
    found = evidences([noise(1000)])
    strata = Strata(found)
    for one in predictions(found, strata):
        assert one.predicted == pytest.approx(one.measured, abs=0.05)
        p = math.erfc(math.sqrt(one.max_kl) / 0.1)
        assert one.violation_probability == pytest.approx(p, rel=0.4)
    last = predictions(found, strata)[-1]
    assert last.measured_deciles[0] < 0.2 < 0.6 < last.measured_deciles[-1]


def test_thresholds_of_the_grid_reject_what_they_were_chosen_for() -> None:
    found = evidences([noise()])
    strata = Strata(found)
    results = all_rates(found, strata)
    assert {one.rule for one in results} >= {"trm_max", "ln_trm", "m2po", "bypass_pg_is", "decoupled_geo_rs_seq_tis"}
    for one in results:
        if one.target is not None and one.rule.startswith("seq_"):
            assert one.rows <= one.target + 1e-9
    assert table(results, predictions(found, strata))


def test_the_rules_of_the_run_have_a_row() -> None:
    """One of its own, and one whose threshold is chosen on what was recorded."""
    rules = [
        {"name": "examples/own_methods/methods.py:negative_gap_mask", "thresholds": {"max_gap": 0.2}},
        {"name": "seq_max_k2", "target_reject_rate": 0.25},
    ]
    batches = evidences([noise()])
    strata = Strata(batches)
    config = Config.model_validate({"model": {"checkpoint": "model"}, "correction": {"rules": rules}})
    last = all_rates(batches, strata, config)[-1]
    assert last.rule == OF_THE_RUN
    assert {key.split(".")[0] for key in last.setting} == {"negative_gap_mask", "seq_max_k2"}
    [line] = [line for line in table([last], []) if line["rule"] == OF_THE_RUN]
    assert "negative_gap_mask" in str(line["thresholds"])
    assert 0 < last.rows < 1
    assert all_rates(batches, strata)[-1].rule != OF_THE_RUN
