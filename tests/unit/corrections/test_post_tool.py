"""Truncated importance sampling on the tokens that follow a tool's output, and on no others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.config import InvalidConfigError, load
from moe_trm.corrections import Evidence
from moe_trm.corrections.calibration import calibrate, scores
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios

TURNS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0]]).bool()
"""Row 0 has tool tokens in columns 2 and 4; row 1 is one turn."""


def evidence(engine: Tensor, lag: Tensor | None = None, *, known: bool = True) -> Evidence:
    """With `lag` samples are stale; not `known`: and the weights that sampled are gone."""
    zero = torch.zeros_like(engine)
    proximal = engine if lag is None else engine + lag
    ratios = LogRatios(zero, engine if known else None, proximal, MASK, proximal)
    return Evidence(ratios, torch.ones_like(zero), turn_ids=TURNS)


def drawn(seed: int = 0) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("stale", [False, True])
def test_weights_by_a_loop(stale: bool) -> None:
    """Also of stale samples, where the rule reads proximal / rollout."""
    engine, lag = drawn(), drawn(1) if stale else torch.zeros(2, 6, dtype=torch.float64)
    rule = corrections.get("token_tis").bind(
        cap=1.5, floor=0.5, tokens="post_tool", ratio="merged" if stale else "engine"
    )
    got = rule(evidence(engine, lag, known=not stale))
    for i in range(2):
        for t in range(6):
            ratio = math.exp(float(engine[i, t] + lag[i, t]))
            expected = min(max(ratio, 0.5), 1.5) if TURNS[i, t] else 1.0
            assert float(got.weights[i, t]) == pytest.approx(expected * bool(MASK[i, t]))
    assert torch.equal(got.keep, MASK)


def test_shares_and_targets_are_of_the_tokens_it_weighs() -> None:
    """Two of five sampled tokens follow a tool; one of these is above the cap, as is one that is not weighed."""
    engine = torch.zeros(2, 6, dtype=torch.float64)
    engine[0, 0], engine[0, 3] = 5.0, 1.0
    rule = corrections.get("token_tis")
    found = corrections.finalize(rule(evidence(engine), tokens="post_tool").metrics)
    assert found["correction/token_tis/truncated_fraction"] == 0.5
    assert sorted(scores(rule, evidence(engine), tokens="post_tool").tolist()) == [0.0, 1.0]
    window = [scores(rule, evidence(engine), tokens="post_tool")]
    assert calibrate(rule, window, 0.1, tokens="post_tool").thresholds["cap"] == pytest.approx(math.e)


def test_a_bad_token_of_any_turn_is_dropped_alone() -> None:
    engine = drawn()
    for place in ((0, 0), (0, 5)):
        broken = engine.clone()
        broken[place] = torch.nan
        got = corrections.get("token_tis")(evidence(broken), tokens="post_tool")
        expected = MASK.clone()
        expected[place] = False
        assert torch.equal(got.keep, expected)
        assert got.weights[place] == 0


def test_beside_another_rule() -> None:
    """Kept and dropped tokens: what a veto drops has weight 0, all others their own."""
    engine = torch.tensor([[0.1, 0.1, 0, 0.2, 0, 0.3], [-9.0, 0.1, 0.1, 0, 0, 0]], dtype=torch.float64)
    rules = [corrections.get("token_tis").bind(tokens="post_tool"), corrections.get("token_veto").bind(min_ratio=0.01)]
    got = corrections.compose(rules)(evidence(engine))
    assert got.weights[0][MASK[0]].tolist() == pytest.approx([1, 1, math.exp(0.2), math.exp(0.3)])
    assert not got.weights[1].any()


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    alone = replace(evidence(drawn()), turn_ids=None)
    with pytest.raises(ConfigError, match="after a tool"):
        corrections.get("token_tis")(alone, tokens="post_tool")
    with pytest.raises(ConfigError, match="unknown tokens"):
        corrections.get("token_tis").bind(tokens="tool")
    file = tmp_path / "c.yaml"
    file.write_text("model: {checkpoint: none}\n")
    rule = "correction.rules=[{name: token_tis, thresholds: {tokens: post_tool}}]"
    with pytest.raises(InvalidConfigError, match="every sample is one turn"):
        load(file, [rule])
    load(file, [rule, "rollout.function=examples/agent.py:play"])
    load(file, [rule, "rollout.engine=bundle", "rollout.bundle=b"])
