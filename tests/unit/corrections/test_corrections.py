"""Hand-worked decisions of each correction on the worked example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.corrections import Correction
from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.rule import rule
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample


def test_a_missing_threshold_is_chosen_as_its_meaning_says() -> None:
    """A quantile of the score is a threshold of it, and nothing else."""
    with pytest.raises(ConfigError, match="'delta' has no default") as refused:
        corrections.get("ln_trm").bind(max_score=0.1)
    assert refused.value.fix == "`moe-trm config explain ln_trm` says what delta is"
    with pytest.raises(ConfigError, match="'max_score' has no default") as refused:
        corrections.get("ln_trm").bind(delta=0.1)
    assert "95th percentile" in refused.value.fix


def close(got: Tensor, expected: Sequence[float] | Sequence[Sequence[float]], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=atol)


def rows_kept(correction: Correction, fx: WorkedExample) -> list[int]:
    assert torch.equal(correction.keep, correction.keep.any(1)[:, None] & fx.mask)
    return correction.keep.any(dim=1).int().tolist()


ENGINE_RATIO = [
    [0.904837, 1, 1.105171, 0.740818, 0],
    [1, 0, 0.818731, 1.105171, 1],
    [1, 12.182494, 0, 0, 0],
    [1, 1, 0.904837, 0, 0],
]


def replaced(outlier: float) -> list[list[float]]:
    return [[outlier if x == 12.182494 else x for x in row] for row in ENGINE_RATIO]


def test_token_tis(fx: WorkedExample) -> None:
    got = corrections.get("token_tis")(fx.evidence)
    close(got.weights, replaced(2.0))
    assert torch.equal(got.keep, fx.mask)
    close(corrections.get("token_tis")(fx.evidence, cap=100.0).weights, ENGINE_RATIO)
    assert corrections.get("token_tis")(fx.evidence, floor=0.8).weights[0, 3].item() == pytest.approx(0.8)


def test_seq_tis(fx: WorkedExample) -> None:
    got = corrections.get("seq_tis")(fx.evidence)
    close(
        got.weights,
        [
            [w * m for m in row]
            for w, row in zip([0.740818, 0.904837, 2, 0.904837], fx.mask.int().tolist(), strict=True)
        ],
    )
    assert torch.equal(got.keep, fx.mask)


def test_opsm_of_slime_reads_the_update(fx: WorkedExample) -> None:
    """D = mean(log proximal - log current): rows [-.05, 0, -.15, .333]; only the last is negative and far."""
    got = corrections.get("opsm")(fx.evidence, delta=0.1, ratio="update")
    assert got.keep.any(dim=1).tolist() == [True, True, True, False]
    far = corrections.get("opsm")(fx.evidence, delta=0.35, ratio="update")
    assert torch.equal(far.keep, fx.mask)
    assert not corrections.get("opsm")(fx.evidence, delta=0.35).keep[3].any()


def test_truncated_shares_are_of_tokens_and_of_rows(fx: WorkedExample) -> None:
    """13 tokens: one above 2, one below 0.8. 4 rows: one above 2, one below 0.8; a row without tokens is none."""
    fx.mask = torch.cat([fx.mask, torch.zeros(1, 5, dtype=torch.bool)])
    for name in ("rollout", "behavior", "current"):
        setattr(fx, name, torch.cat([getattr(fx, name), torch.full((1, 5), torch.nan)]))
    fx.signs = torch.cat([fx.signs, torch.ones(1)])
    bound = [corrections.get(name).bind(cap=2.0, floor=0.8) for name in ("token_tis", "seq_tis")]
    got = corrections.finalize(corrections.compose(bound)(fx.evidence).metrics)
    for name, units in (("token_tis", 13), ("seq_tis", 4)):
        assert got[f"correction/{name}/truncated_fraction"] == pytest.approx(1 / units)
        assert got[f"correction/{name}/raised_fraction"] == pytest.approx(1 / units)
    plain = corrections.finalize(corrections.compose([corrections.get("seq_tis").bind()])(fx.evidence).metrics)
    assert plain["correction/seq_tis/raised_fraction"] == 0


@pytest.mark.parametrize(("cap", "floor"), [(2.0, 3.0), (0.0, 0.0), (2.0, -1.0)])
def test_a_floor_above_the_cap_is_refused(cap: float, floor: float) -> None:
    for name in ("token_tis", "seq_tis"):
        with pytest.raises(ConfigError, match="not a band"):
            corrections.get(name).bind(cap=cap, floor=floor)


@pytest.mark.parametrize("low", [0.0, 0.5])
def test_seq_mis_one_and_two_sided(fx: WorkedExample, low: float) -> None:
    got = corrections.get("seq_mis")(fx.evidence, low=low, high=2.0)
    close(got.weights.amax(dim=1), [0.740818, 0.904837, 0, 0.904837])
    assert rows_kept(got, fx) == [1, 1, 0, 1]


def test_token_mis(fx: WorkedExample) -> None:
    got = corrections.get("token_mis")(fx.evidence, low=0.8, high=1.2)
    assert got.keep.sum(dim=1).tolist() == [3, 4, 1, 3]


def test_icepop(fx: WorkedExample) -> None:
    got = corrections.get("icepop")(fx.evidence)
    close(got.weights, replaced(0.0))
    assert got.keep.sum().item() == 12
    finished = corrections.finalize(got.metrics)
    assert finished["correction/icepop/kept_fraction"] == pytest.approx(12 / 13)
    assert finished["correction/icepop/kept_sequence_fraction"] == pytest.approx(3 / 4)
    assert corrections.get("icepop")(fx.evidence, weight="one").weights[0, 3].item() == 1.0


def test_icepop_bounds_belong_to_the_band() -> None:
    ratios = torch.tensor([[0.5, 5.0, 5.0001, 0.4999, 1.0, torch.nan]], dtype=torch.float64)
    zero = torch.zeros_like(ratios)
    # exp(log(5)) rounds above 5; the bound itself is tested with the float that exp returns.
    high = float(ratios.log().exp()[0, 1])
    evidence = Evidence(LogRatios(zero, ratios.log(), zero, torch.ones_like(ratios, dtype=torch.bool)), zero)
    got = corrections.get("icepop")(evidence, low=0.5, high=high)
    close(got.weights, [[0.5, 5.0, 0, 0, 1, 0]])
    assert got.keep.tolist() == [[True, True, False, False, True, False]]


def test_geometric_mask(fx: WorkedExample) -> None:
    got = corrections.get("geometric_mask")(fx.evidence)
    assert rows_kept(got, fx) == [0, 0, 0, 0]
    expected = (0.075 + 0.025 + 1.25 + 0.033333) / 4
    assert corrections.finalize(got.metrics)["correction/geometric_mask/score"] == pytest.approx(expected, abs=1e-6)
    assert rows_kept(corrections.get("geometric_mask")(fx.evidence, low=0.95, high=1.05), fx) == [0, 1, 0, 1]


def test_token_veto(fx: WorkedExample) -> None:
    got = corrections.get("token_veto")(fx.evidence, min_ratio=0.75)
    assert rows_kept(got, fx) == [0, 1, 1, 1]
    assert corrections.finalize(got.metrics)["correction/token_veto/catastrophic_token_fraction"] == pytest.approx(
        1 / 13
    )


def test_opsm(fx: WorkedExample) -> None:
    got = corrections.get("opsm")(fx.evidence, delta=0.1)
    assert rows_kept(got, fx) == [1, 1, 1, 0]
    finished = corrections.finalize(got.metrics)
    assert finished["correction/opsm/score"] == pytest.approx((0.025 + 0.025 - 1.4 + 0.366667) / 4, abs=1e-6)
    assert finished["correction/opsm/negative_kept_fraction"] == pytest.approx(4 / 7)
    # Row 1 has D = 0.025 exactly: the comparison is strict, so the threshold itself keeps it.
    D = float(-(fx.ratios.total.sum(1) / fx.mask.sum(1))[1])
    assert rows_kept(corrections.get("opsm")(fx.evidence, delta=D), fx) == [1, 1, 1, 0]
    assert rows_kept(corrections.get("opsm")(fx.evidence, delta=D - 1e-9), fx) == [1, 0, 1, 0]


def test_opsm_with_mixed_signs_scores_the_row_and_drops_only_negative_tokens(fx: WorkedExample) -> None:
    """A row's own drift decides; dropping by each token's drift is the known defect."""
    advantages = fx.advantages.clone()
    advantages[3, 1] = 1.0
    advantages[2, 0] = -1.0
    got = corrections.get("opsm")(Evidence(fx.ratios, advantages), delta=0.1)
    assert got.keep[3].tolist() == [False, True, False, False, False]
    assert got.keep[2].tolist() == [True, True, False, False, False]


def test_opsm_parts_add_up(fx: WorkedExample) -> None:
    """Its score on the total ratio is the sum of its scores on the engine's part and on staleness, row by row."""
    scores = {}
    for ratio in ("engine", "staleness", "total"):
        score = corrections.get("opsm").bind(delta=0.01, ratio=ratio)(fx.evidence).score
        assert score is not None
        scores[ratio] = score
    close(scores["engine"], [0.075, 0.025, -1.25, 0.033333])
    close(scores["staleness"], [-0.05, 0, -0.15, 0.333333])
    close(scores["engine"] + scores["staleness"], scores["total"].tolist())


def test_trm_max(fx: WorkedExample) -> None:
    got = corrections.get("trm_max")(fx.evidence, max_kl=0.05)
    assert rows_kept(got, fx) == [1, 1, 0, 0]
    assert corrections.finalize(got.metrics)["correction/trm_max/score"] == pytest.approx(
        (0.02 + 0.045 + 3.92 + 0.125) / 4
    )
    for value, kept in zip((0.0199, 0.0201, 0.0449, 0.0451, 0.1249, 0.1251, 3.93), (0, 1, 1, 2, 2, 3, 4), strict=True):
        assert sum(rows_kept(corrections.get("trm_max")(fx.evidence, max_kl=value), fx)) == kept


def test_trm_avg(fx: WorkedExample) -> None:
    assert rows_kept(corrections.get("trm_avg")(fx.evidence, mean_kl=0.05), fx) == [1, 1, 0, 0]
    score = corrections.finalize(corrections.get("trm_avg")(fx.evidence, mean_kl=1.0).metrics)[
        "correction/trm_avg/score"
    ]
    assert score == pytest.approx((0.005975 + 0.018057 + 6.322323 + 0.065194) / 4, abs=1e-6)


def test_trm_max_avg_needs_both(fx: WorkedExample) -> None:
    rule = corrections.get("trm_max_avg")
    assert rows_kept(rule(fx.evidence, max_kl=0.05, mean_kl=0.01), fx) == [1, 0, 0, 0]
    assert rows_kept(rule(fx.evidence, max_kl=0.03, mean_kl=1.0), fx) == [1, 0, 0, 0]
    assert rows_kept(rule(fx.evidence, max_kl=1.0, mean_kl=1.0), fx) == [1, 1, 0, 1]


def test_trm_reads_the_exact_divergence_when_asked(fx: WorkedExample) -> None:
    exact = torch.where(fx.mask, 0.01, torch.nan).double()
    exact[0, 2] = 0.3
    evidence = Evidence(fx.ratios, fx.advantages, exact_kl=exact)
    assert rows_kept(corrections.get("trm_max")(evidence, max_kl=0.05, divergence="exact"), fx) == [0, 1, 1, 1]
    assert rows_kept(corrections.get("trm_avg")(evidence, mean_kl=0.05, divergence="exact"), fx) == [0, 1, 1, 1]
    with pytest.raises(ConfigError, match="exact KL"):
        corrections.get("trm_max")(fx.evidence, max_kl=0.05, divergence="exact")


def test_trm_tells_where_exact_and_sampled_divergence_disagree(fx: WorkedExample) -> None:
    """Sampled keeps rows 0 and 1 at 0.05, exact keeps 1, 2 and 3: they agree on row 1 alone."""
    exact = torch.where(fx.mask, torch.tensor([[0.5], [0.01], [0.01], [0.01]], dtype=torch.float64), 9.0)
    evidence = Evidence(fx.ratios, fx.advantages, exact_kl=exact)
    for name, threshold in (("trm_max", {"max_kl": 0.05}), ("trm_avg", {"mean_kl": 0.05})):
        for divergence in ("exact", "sampled"):
            got = corrections.finalize(corrections.get(name)(evidence, divergence=divergence, **threshold).metrics)
            assert got[f"correction/{name}/only_exact_keeps"] == 0.5
            assert got[f"correction/{name}/only_sampled_keeps"] == 0.25
    both = corrections.get("trm_max_avg")(evidence, max_kl=0.05, mean_kl=0.05, divergence="exact")
    assert corrections.finalize(both.metrics)["correction/trm_max_avg/only_exact_keeps"] == 0.5
    assert "correction/trm_max/only_exact_keeps" not in corrections.get("trm_max")(fx.evidence, max_kl=0.05).metrics


def test_ln_trm(fx: WorkedExample) -> None:
    rule = corrections.get("ln_trm")
    score = corrections.finalize(rule(fx.evidence, delta=0.02, max_score=1.0).metrics)["correction/ln_trm/score"]
    assert score == pytest.approx((0.087193 + 0.185734 + 0 + 0.269165) / 4, abs=1e-6)
    bounds = (0.0871, 0.0873, 0.1857, 0.1858, 0.2691, 0.2692)
    expected = ([0, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1])
    for bound, kept in zip(bounds, expected, strict=True):
        assert rows_kept(rule(fx.evidence, delta=0.02, max_score=bound), fx) == kept


def test_ln_trm_counts_rows_it_cannot_score() -> None:
    zero, far = torch.zeros(1, 3), torch.full((1, 3), 9.0)
    evidence = Evidence(LogRatios(zero, zero, far, torch.tensor([[False, True, False]])), zero)
    got = corrections.get("ln_trm")(evidence, delta=0.02, max_score=0.1)
    assert got.keep.tolist() == [[False, True, False]]
    assert corrections.finalize(got.metrics)["correction/ln_trm/unscored_fraction"] == 1.0


def test_ser(fx: WorkedExample) -> None:
    rule = corrections.get("ser")
    for bound, kept in (
        (0.0716, [0, 0, 0, 0]),
        (0.0717, [1, 0, 0, 0]),
        (0.1703, [1, 1, 0, 0]),
        (0.3015, [1, 1, 0, 1]),
        (7.73, [1, 1, 1, 1]),
    ):
        assert rows_kept(rule(fx.evidence, max_score=bound), fx) == kept


def test_compose_multiplies_weights_and_joins_keeps(fx: WorkedExample) -> None:
    tis = corrections.get("token_tis").bind(cap=2.0)
    veto = corrections.get("token_veto").bind(min_ratio=0.75)
    pop = corrections.get("icepop").bind(weight="one")
    got = corrections.compose([tis, veto, pop])(fx.evidence)
    close(got.weights[0], [0, 0, 0, 0, 0])
    close(got.weights[1], ENGINE_RATIO[1])
    close(got.weights[2], [1, 0, 0, 0, 0])
    finished = corrections.finalize(got.metrics)
    assert finished["correction/kept_fraction"] == pytest.approx(8 / 13)
    assert finished["correction/kept_sequence_fraction"] == pytest.approx(2 / 4)
    assert finished["correction/token_veto/kept_fraction"] == pytest.approx(9 / 13)
    assert finished["correction/icepop/kept_sequence_fraction"] == pytest.approx(3 / 4)
    assert finished["correction/token_tis/kept_fraction"] == 1.0


def test_compose_of_nothing_keeps_everything(fx: WorkedExample) -> None:
    got = corrections.compose([])(fx.evidence)
    assert torch.equal(got.keep, fx.mask)
    assert torch.equal(got.weights, fx.mask.double())
    finished = corrections.finalize(got.metrics)
    assert finished["correction/kept_fraction"] == finished["correction/kept_sequence_fraction"] == 1.0
    assert finished["correction/weight_eff_sample_size"] == 1.0


def test_trm_max_treats_a_ratio_and_its_inverse_alike_and_trm_avg_does_not() -> None:
    """At 0.01 and 100 the sampled k2 is 10.604 both times, k3 3.615 and 94.395: a maximum of k3 passes the first."""
    scores = {}
    for name, threshold in (("trm_max", "max_kl"), ("trm_avg", "mean_kl")):
        for ratio in (0.01, 100.0):
            zero = torch.zeros(1, 1, dtype=torch.float64)
            ratios = LogRatios(zero, zero, zero + torch.tensor(ratio).double().log(), zero == 0)
            score = corrections.get(name)(Evidence(ratios, zero), **{threshold: 1.0}).score
            assert score is not None
            scores[name, ratio] = float(score)
    assert scores["trm_max", 0.01] == pytest.approx(10.604, abs=1e-3)
    assert scores["trm_max", 100.0] == pytest.approx(10.604, abs=1e-3)
    assert scores["trm_avg", 0.01] == pytest.approx(3.615, abs=1e-3)
    assert scores["trm_avg", 100.0] == pytest.approx(94.395, abs=1e-3)


@rule(ratio="engine", scope="token")
def every_other(evidence: Evidence, log_ratio: Tensor) -> Correction:
    """A rule of somebody's own, which leaves a weight where it drops."""
    return Correction(torch.full_like(log_ratio, 2.0), evidence.mask & (torch.arange(log_ratio.shape[1]) % 2 == 0), {})


@pytest.mark.parametrize(
    "rules",
    [
        [("own", {})],
        [("own", {}), ("seq_tis", {})],
        [("token_tis", {})],
        [("seq_tis", {})],
        [("seq_mis", {"low": 0.5, "high": 2.0})],
        [("seq_tis", {}), ("seq_mis", {"low": 0.8, "high": 1.5})],
        [("token_tis", {}), ("trm_max", {"max_kl": 0.1}), ("seq_tis", {})],
        [("seq_tis", {"cap": 1.1}), ("seq_mis", {"low": 0.8, "high": 99.0}), ("ser", {"max_score": 0.3015})],
        [],
    ],
)
def test_joint_weights_against_a_loop_over_tokens(fx: WorkedExample, rules: list[tuple[str, dict[str, Any]]]) -> None:
    """Dropped tokens count with weight 0, and rows by their tokens; a row without tokens counts nothing."""
    fx.mask = fx.mask.clone()
    fx.mask[-1] = False
    found = [every_other if name == "own" else corrections.get(name) for name, _ in rules]
    bound = [one.bind(**chosen) for one, (_, chosen) in zip(found, rules, strict=True)]
    applied = corrections.compose(bound)(fx.evidence)
    alone = [one(fx.evidence, **chosen) for one, (_, chosen) in zip(found, rules, strict=True)]
    weights = []
    for row, column in fx.mask.nonzero().tolist():
        kept = all(bool(one.keep[row, column]) for one in alone)
        weights.append(math.prod(float(one.weights[row, column]) for one in alone) if kept else 0.0)
        assert bool(applied.keep[row, column]) == kept
        assert not kept or float(applied.weights[row, column]) == pytest.approx(weights[-1])
    mean = sum(weights) / len(weights)
    square = sum(weight**2 for weight in weights) / len(weights)
    told = corrections.finalize(applied.metrics)
    assert told["correction/weight_mean"] == pytest.approx(mean)
    assert told["correction/weight_std"] == pytest.approx(max(0.0, square - mean**2) ** 0.5, abs=1e-6)
    assert told["correction/weight_eff_sample_size"] == pytest.approx(mean**2 / square if square else 0.0)
