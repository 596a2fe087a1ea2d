"""One home of scores: every rule on rows takes the same ones, on every ratio, or says why it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.corrections.evidence import Evidence
from moe_trm.errors import ConfigError
from moe_trm.methods.ratios import RATIO_NAMES
from moe_trm.ratios import LogRatios

DELTA = 0.3
Row = list[float]


def position_weighted(values: Row) -> float:
    omega = [min(1.0, math.sqrt(DELTA * (len(values) - t) / 2)) for t in range(1, len(values) + 1)]
    return sum(o * v for o, v in zip(omega, values, strict=True)) / sum(omega) if sum(omega) else 0.0


def mean(values: Row) -> float:
    return sum(values) / len(values)


def error(x: float) -> float:
    return abs(math.exp(x) - 1)


REDUCED: dict[str, Callable[[Row], float]] = {"max": max, "mean": mean, "sum": sum, "ln": position_weighted}
DIVERGENCE: dict[str, Callable[[Row], float]] = {
    "max": lambda x: max(v * v / 2 for v in x),
    "mean": lambda x: mean([math.exp(v) - 1 - v for v in x]),
    "sum": lambda x: sum(math.exp(v) - 1 - v for v in x),
    "ln": lambda x: position_weighted([error(v) for v in x]),
    "ser": lambda x: mean([error(v) for v in x]),
}
EXACT: dict[str, Callable[[Row], float]] = {
    **REDUCED,
    "ln": lambda kl: position_weighted([min(2.0, math.sqrt(2 * v)) for v in kl]),
    "ser": lambda kl: mean([min(2.0, math.sqrt(2 * v)) for v in kl]),
}
BAND = {**REDUCED, "max": lambda x: abs(max(x, key=abs))}


def absolute(function: Callable[[Row], float]) -> Callable[[Row], float]:
    return lambda x: abs(function(x))


def lost(function: Callable[[Row], float]) -> Callable[[Row], float]:
    return lambda x: function([-v for v in x])


LOST = {score: lost(function) for score, function in REDUCED.items()}
BANDED = {score: absolute(function) for score, function in BAND.items()}
# rule -> its other thresholds, and the score it reports for a row of log-ratios (bands report the absolute value)
SAMPLED: dict[str, tuple[dict[str, float | str], dict[str, Callable[[Row], float]]]] = {
    "trm": ({"max_score": 0.1}, DIVERGENCE),
    "opsm": ({"delta": 0.05}, {**LOST, "ser": DIVERGENCE["ser"]}),
    "geometric_mask": ({"low": 0.9, "high": 1.2}, BANDED),
    "seq_icepop": ({"low": 0.9, "high": 1.2, "weight": "one"}, BANDED),
    "token_veto": ({"min_ratio": 0.9}, LOST),
}
CASES = [(rule, score) for rule, (_, scores) in SAMPLED.items() for score in scores]


def evidence(seed: int = 0) -> Evidence:
    """Twelve rows: one without sampled tokens, one with a single one, holes in the others."""
    gen = torch.Generator().manual_seed(seed)
    base = -torch.rand(12, 9, generator=gen, dtype=torch.float64)
    parts = torch.randn(3, 12, 9, generator=gen, dtype=torch.float64) * 0.2
    mask = torch.rand(12, 9, generator=gen) < 0.7
    mask[0], mask[1] = False, torch.arange(9) == 4
    ratios = LogRatios(base, base + parts[0], base + parts.sum(0), mask, base + parts[0] + parts[1])
    kl = torch.rand(12, 9, generator=gen, dtype=torch.float64) * 3
    return Evidence(ratios, torch.full_like(base, -1.0), exact_kl=torch.where(mask, kl, torch.nan))


def thresholds(rule: str, score: str, **others: float | str) -> dict[str, float | str]:
    return {**SAMPLED[rule][0], "score": score, **({"ln_delta": DELTA} if score == "ln" else {}), **others}


def expected(values: Tensor, mask: Tensor, function: Callable[[Row], float]) -> list[float]:
    return [function(row[chosen].tolist()) if chosen.any() else 0.0 for row, chosen in zip(values, mask, strict=True)]


@pytest.mark.parametrize("ratio", RATIO_NAMES)
@pytest.mark.parametrize(("rule", "score"), CASES)
def test_a_score_is_the_same_in_a_loop(rule: str, score: str, ratio: str) -> None:
    found = evidence()
    got = corrections.get(rule)(found, **thresholds(rule, score, ratio=ratio)).score
    assert got is not None
    requested = expected(found.ratios.get(ratio), found.mask, SAMPLED[rule][1][score])
    assert got.tolist() == pytest.approx(requested, abs=1e-12)


@pytest.mark.parametrize(("rule", "score"), [case for case in CASES if case[0] in ("trm", "opsm")])
def test_exact_divergence_is_scored_alike(rule: str, score: str) -> None:
    found = evidence()
    got = corrections.get(rule)(found, **thresholds(rule, score, divergence="exact")).score
    assert got is not None
    assert found.exact_kl is not None
    function = REDUCED[score] if rule == "opsm" and score != "ser" else EXACT[score]
    assert got.tolist() == pytest.approx(expected(found.exact_kl, found.mask, function), abs=1e-12)


@pytest.mark.parametrize(("rule", "score"), CASES)
def test_a_row_is_dropped_above_its_threshold_and_kept_at_it(rule: str, score: str) -> None:
    """The row whose own score is the threshold stays, all above it go: `<` would drop it."""
    found, registered = evidence(), corrections.get(rule)
    fixed: dict[str, float | str] = {"score": score, **({"ln_delta": DELTA} if score == "ln" else {})}
    fixed |= {"weight": "one"} if rule == "seq_icepop" else {}
    scores = registered(found, **fixed, **dict.fromkeys(registered.calibrated, 1.0)).score
    assert scores is not None
    chosen = scores.sort().values[7]
    assert registered.calibrate is not None
    limits = registered.calibrate(float(chosen) if rule in ("trm", "opsm") else float(chosen) * (1 + 1e-12))
    kept = registered(found, **fixed, **limits).keep.any(dim=1)
    some = found.mask.any(dim=1)
    assert kept[some].tolist() == (scores <= chosen)[some].tolist()
    assert 0 < int(kept.sum()) < int(some.sum())


def test_named_rules_are_scores_under_their_own_names() -> None:
    found = evidence()
    for name, score, named, limit in (
        ("trm_max", "max", {"max_kl": 0.1}, 0.1),
        ("trm_avg", "mean", {"mean_kl": 0.06}, 0.06),
        ("ser", "ser", {"max_score": 0.3}, 0.3),
        ("ln_trm", "ln", {"max_score": 0.3, "delta": DELTA}, 0.3),
    ):
        one = corrections.get(name)(found, **named)
        two = corrections.get("trm")(found, **thresholds("trm", score, max_score=limit))
        assert one.keep.equal(two.keep)
        assert one.score is not None
        assert two.score is not None
        assert one.score.equal(two.score)
        assert 0 < int(one.keep.sum()) < int(found.mask.sum()), name


def test_exact_scores_bound_what_the_sampled_ones_estimate() -> None:
    """E_mu |w - 1| is twice the total variation, which Pinsker's inequality bounds by the KL."""
    gen = torch.Generator().manual_seed(1)
    mu, pi = torch.randn(2, 50, 4, generator=gen, dtype=torch.float64).mul(2).log_softmax(dim=2)
    kl, tv = (mu.exp() * (mu - pi)).sum(1), (mu.exp() - pi.exp()).abs().sum(1) / 2
    zero = torch.zeros(50, 1, dtype=torch.float64)
    ratios = LogRatios(zero, zero, zero, torch.ones(50, 1, dtype=torch.bool))
    got = corrections.get("trm")(Evidence(ratios, zero, exact_kl=kl[:, None]), score="ser", max_score=1.0).score
    exact = corrections.get("trm")(
        Evidence(ratios, zero, exact_kl=kl[:, None]), score="ser", max_score=1.0, divergence="exact"
    ).score
    assert got is not None
    assert exact is not None
    assert not got.any()
    assert (exact >= 2 * tv).all()


@pytest.mark.parametrize("rule", ["geometric_mask", "seq_icepop"])
def test_bands_refuse_a_score_without_a_sign(rule: str) -> None:
    with pytest.raises(ConfigError, match="no sign"):
        corrections.get(rule).bind(score="ser")


@pytest.mark.parametrize(
    ("rule", "given", "said"),
    [
        ("token_veto", {"score": "ser"}, "over both directions"),
        ("trm", {"max_score": 0.1, "score": "median"}, "unknown score"),
        ("trm", {"max_score": 0.1, "score": "ln"}, "needs ln_delta"),
        ("trm", {"max_score": 0.1, "ln_delta": 0.1}, "score=ln only"),
        ("opsm", {"delta": 0.1, "score": "ln", "ln_delta": 0.0}, "above 0"),
        ("opsm", {"delta": 0.1, "divergence": "true"}, "unknown divergence"),
        ("seq_icepop", {"score": "max"}, "ratio of a row"),
        ("seq_icepop", {"weight": "two"}, "unknown weight"),
        ("trm_max", {"max_kl": 0.1, "score": "mean"}, "unknown threshold"),
    ],
)
def test_what_a_rule_cannot_score_is_refused(rule: str, given: dict[str, float | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        corrections.get(rule).bind(**given)


@pytest.mark.parametrize("rule", SAMPLED)
def test_rows_that_position_weights_cannot_score_are_counted(rule: str) -> None:
    metrics = corrections.finalize(corrections.get(rule)(evidence(), **thresholds(rule, "ln")).metrics)
    assert metrics[f"correction/{rule}/unscored_fraction"] == pytest.approx(1 / 11)


def test_icepop_on_rows_weighs_by_the_geometric_mean_or_the_product() -> None:
    found = evidence()
    for score, reduce in (("mean", mean), ("sum", sum)):
        got = corrections.get("seq_icepop")(found, low=0.9, high=1.2, score=score)
        for row, chosen, x, keep in zip(got.weights, found.mask, found.ratios.engine, got.keep, strict=True):
            requested = math.exp(reduce(x[chosen].tolist())) if chosen.any() else 0.0
            inside = 0.9 <= requested <= 1.2
            assert keep[chosen].all() == inside or not chosen.any()
            assert row[chosen].tolist() == pytest.approx([requested * inside] * int(chosen.sum()))


@pytest.mark.parametrize("rule", ["geometric_mask", "icepop", "seq_icepop", "seq_mis", "token_mis"])
def test_both_bounds_belong_to_a_band(rule: str) -> None:
    one = torch.zeros(2, 3)
    same = Evidence(LogRatios(one, one, one, torch.ones(2, 3, dtype=torch.bool)), one)
    assert corrections.get(rule)(same, low=1.0, high=1.0).keep.all()
    assert not corrections.get(rule)(same, low=1.1, high=1.2).keep.any()
    assert not corrections.get(rule)(same, low=0.1, high=0.9).keep.any()


@pytest.mark.parametrize("score", ["mean", "max", "ser"])
def test_opsm_drops_tokens_of_negative_advantage_only(score: str) -> None:
    """Tokens without advantage stay, in the same row as others that go."""
    log_ratio, mask = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    zero = torch.zeros_like(log_ratio)
    found = Evidence(LogRatios(zero, log_ratio, log_ratio, mask), torch.tensor([[-1.0, 0.0, 1.0]]))
    assert corrections.get("opsm")(found, delta=0.1, score=score).keep.tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("rule", "thresholds", "at", "beyond"),
    [
        ("token_veto", {"min_ratio": 0.5}, math.log(0.5), -0.7),
        ("token_veto", {"min_ratio": 0.5, "score": "mean"}, math.log(0.5), -0.7),
        ("token_k1", {"low": 0.5, "high": 2.0}, math.log(2.0), 0.7),
        ("seq_mean_k1", {"low": 0.5, "high": 2.0}, -math.log(2.0), -0.7),
        ("token_k2", {"upper": 0.5}, 1.0, 1.01),
        ("seq_max_k2", {"upper": 0.5}, -1.0, -1.01),
    ],
)
def test_what_lies_at_a_threshold_stays(
    rule: str, thresholds: dict[str, float | str], at: float, beyond: float
) -> None:
    log_ratio, mask = torch.tensor([[at], [beyond]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.bool)
    zero = torch.zeros_like(log_ratio)
    kept = corrections.get(rule)(Evidence(LogRatios(zero, log_ratio, log_ratio, mask), zero), **thresholds).keep
    assert kept[:, 0].tolist() == [True, False]
