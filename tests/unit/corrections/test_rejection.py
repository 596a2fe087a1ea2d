"""The eleven rejection modes: golden decisions, band orientation; the nineteen presets."""

from __future__ import annotations

import pytest
import torch

from moe_trm import corrections, losses
from moe_trm.corrections.evidence import Evidence
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample

STATISTICS = {
    "seq_sum_k1": [0.3, 0.1, -2.5, 0.1],
    "seq_mean_k1": [0.075, 0.025, -1.25, 0.033333],
    "seq_sum_k2": [0.055, 0.025, 3.125, 0.005],
    "seq_mean_k2": [0.01375, 0.00625, 1.5625, 0.001667],
    "seq_max_k2": [0.045, 0.02, 3.125, 0.005],
    "seq_sum_k3": [0.050827, 0.023902, 8.682494, 0.004837],
    "seq_mean_k3": [0.012707, 0.005975, 4.341247, 0.001612],
    "seq_max_k3": [0.040818, 0.018731, 8.682494, 0.004837],
}
LOOSE = {"k1": {"low": 1e-9, "high": 1e9}, "k2": {"upper": 1e9}, "k3": {"upper": 1e9}}


@pytest.mark.parametrize(("mode", "values"), STATISTICS.items())
def test_golden_statistics(fx: WorkedExample, mode: str, values: list[float]) -> None:
    got = corrections.get(mode)(fx.evidence, **LOOSE[mode[-2:]])
    assert got.score.tolist() == pytest.approx(values, abs=1e-6)


def one_token(*ratios: float) -> Evidence:
    zero = torch.zeros(1, len(ratios), dtype=torch.float64)
    log_ratio = torch.tensor([ratios], dtype=torch.float64).log()
    return Evidence(LogRatios(zero, log_ratio, zero, torch.ones_like(zero, dtype=torch.bool)), zero)


def test_band_orientation_is_explicit() -> None:
    """The field's own test mirrors bands that are not reciprocal: 0.5_5.0 keeps the ratio 0.3 and drops 4.0."""
    evidence, rule = one_token(0.3, 4.0), corrections.get("token_k1")
    assert rule(evidence, low=0.5, high=5.0).keep.tolist() == [[True, False]]
    assert rule(evidence, low=0.5, high=5.0, orientation="ratio").keep.tolist() == [[False, True]]
    assert rule(evidence, low=0.2, high=5.0).keep.tolist() == [[True, True]]
    assert rule(one_token(0.861), low=0.1, high=1.1).keep.tolist() == [[False]]
    assert rule(one_token(0.861), low=0.1, high=1.1, orientation="ratio").keep.tolist() == [[True]]
    with pytest.raises(ConfigError, match="orientation"):
        rule.bind(low=0.5, high=2.0, orientation="mirror")


def test_bands_must_be_bands() -> None:
    with pytest.raises(ConfigError, match="band"):
        corrections.get("token_k1").bind(low=3.0, high=2.0)
    with pytest.raises(ConfigError):
        corrections.get("token_k1").bind(low=0.0, high=2.0)
    with pytest.raises(ConfigError):
        corrections.get("token_k3").bind(upper=-1.0)


def test_modes_see_all_tokens_not_each_others_leftovers(fx: WorkedExample) -> None:
    """Joined in either order, and equal to the AND of each alone."""
    rules = [corrections.get("token_k2").bind(upper=0.03), corrections.get("seq_mean_k3").bind(upper=0.0127)]
    alone = rules[0](fx.evidence).keep & rules[1](fx.evidence).keep
    for order in (rules, rules[::-1]):
        assert torch.equal(corrections.compose(order)(fx.evidence).keep, alone)
    assert corrections.compose(rules)(fx.evidence).keep[0].sum() == 0


def test_all_nineteen_presets_bind() -> None:
    assert len(corrections.presets) == 19
    for name, preset in corrections.presets.items():
        bound = [corrections.get(rule).bind(**thresholds) for rule, thresholds in preset.rules]
        corrections.compose(bound)
        assert all(rule.ratio == ("total" if preset.bypass else "merged") for rule in bound), name
        assert preset.bypass == name.startswith("bypass_")
        if preset.loss:
            loss, parameters = preset.loss
            losses.get(loss).bind(**parameters)
    rules = {name: tuple(rule for rule, _ in preset.rules) for name, preset in corrections.presets.items()}
    assert rules["decoupled_geo_rs_seq_tis"] == ("seq_tis", "seq_mean_k1")
    assert rules["decoupled_k3_rs_token_tis"] == ("token_tis", "seq_mean_k3")
    assert rules["bypass_pg_token_icepop"] == ("icepop",)
    assert rules["disabled"] == ()
