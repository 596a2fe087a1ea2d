"""KPop by a loop over probabilities, against IcePop as engines drift apart; and trust-region masking that fades."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios


def evidence(q: Tensor, p: Tensor, *, current: Tensor | None = None, known: bool = True) -> Evidence:
    """Rollout probabilities, the learner's, and those of the policy in training `[B, T]`."""
    now = p if current is None else current
    ratios = LogRatios(q.log(), p.log() if known else None, now.log(), torch.ones_like(q).bool(), p.log())
    return Evidence(ratios, torch.ones_like(q))


def probabilities(seed: int = 0, rows: int = 20, tokens: int = 30) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, rows, tokens, generator=gen, dtype=torch.float64)
    return (3 * logits).sigmoid(), (3 * logits + noise).sigmoid()


def binary(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize("weight", ["one", "ratio"])
@pytest.mark.parametrize("ratio", ["engine", "merged", "total"])
def test_by_a_loop_on_any_ratio_to_the_rollout(ratio: str, weight: str) -> None:
    """Also of stale samples, where only merged and total are known."""
    q, p = probabilities()
    rule = corrections.get("kpop").bind(max_kl=0.1, weight=weight, ratio=ratio)
    given = evidence(q, p) if ratio != "total" else evidence(q, (q + p) / 2, current=p)
    got = rule(replace(given, ratios=evidence(q, p, known=False).ratios) if ratio == "merged" else given)
    kept = 0
    for i in range(len(q)):
        for t in range(q.shape[1]):
            near = max(binary(float(p[i, t]), float(q[i, t])), binary(float(q[i, t]), float(p[i, t]))) <= 0.1
            kept += near
            assert bool(got.keep[i, t]) == near
            expected = near * (float(p[i, t] / q[i, t]) if weight == "ratio" else 1.0)
            assert float(got.weights[i, t]) == pytest.approx(expected)
    assert 0 < kept < q.numel()
    assert corrections.finalize(got.metrics)["correction/kpop/kept_fraction"] == pytest.approx(kept / q.numel())


def test_golden() -> None:
    """q = 0.9 and p = 0.5: D(p||q) = 0.510826, D(q||p) = 0.368064."""
    q, p = torch.tensor([[0.9]], dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
    score = corrections.get("kpop")(evidence(q, p)).score
    assert score is not None
    assert score.tolist() == [[pytest.approx(0.510826, abs=1e-6)]]


def test_likely_tokens_are_held_tighter_than_unlikely_ones() -> None:
    """0.9 against 0.6 is within IcePop's band, 0.0001 against 0.00001 is not; KPop says the reverse."""
    given = evidence(torch.tensor([[0.9, 1e-4]]), torch.tensor([[0.6, 1e-5]]))
    assert corrections.get("kpop")(given).keep.tolist() == [[False, True]]
    assert corrections.get("icepop")(given).keep.tolist() == [[True, False]]


def test_the_masked_share_grows_with_the_gap() -> None:
    """Likely tokens get less likely for the learner: KPop's share rises from nothing to all, IcePop's stays 0."""
    gen = torch.Generator().manual_seed(0)
    q = 0.7 + 0.3 * torch.rand(50, 40, generator=gen, dtype=torch.float64)
    shares: dict[str, list[float]] = {"kpop": [], "icepop": []}
    for gap in (0.01, 0.1, 0.2, 0.4, 0.6):
        for name, found in shares.items():
            decision = corrections.get(name)(evidence(q, q * math.exp(-gap)))
            found.append(float((~decision.keep).double().mean()))
    assert shares["icepop"] == [0.0] * 5
    assert shares["kpop"] == sorted(shares["kpop"])
    assert shares["kpop"][0] < 0.05 < 0.95 < shares["kpop"][-1]


def test_sure_engines_agree_and_a_bad_token_goes_alone() -> None:
    q = torch.tensor([[1.0, 1.0, 0.5]], dtype=torch.float64)
    given = evidence(q, torch.tensor([[1.0, 1 - 1e-7, 0.5]], dtype=torch.float64))
    assert corrections.get("kpop")(given).keep.all()
    for bad in (torch.nan, 0.0, torch.inf):
        given = evidence(q, torch.tensor([[bad, 1.0, 0.5]], dtype=torch.float64))
        assert corrections.get("kpop")(given).keep.tolist() == [[False, True, True]]


def test_only_ratios_to_the_rollout_have_these_probabilities() -> None:
    for ratio in ("lag", "staleness", "update"):
        with pytest.raises(ConfigError, match="unknown ratio") as caught:
            corrections.get("kpop").bind(ratio=ratio)
        assert "engine, merged, total" in str(caught.value)
    with pytest.raises(ConfigError, match="unknown weight"):
        corrections.get("kpop").bind(weight="two")
    with pytest.raises(ConfigError, match="above 0"):
        corrections.get("kpop").bind(max_kl=0.0)


def test_soft_masking_fades_and_does_not_jump() -> None:
    """One token a row with k3 scores below, just beyond and far beyond the bound."""
    far = torch.tensor([[0.0], [0.1], [0.45], [2.0]], dtype=torch.float64)
    zero = torch.zeros_like(far)
    given = Evidence(LogRatios(zero, zero, far, zero == 0), zero)
    scores = [math.expm1(x) - x for x in far[:, 0].tolist()]
    for power in (1.0, 3.0):
        got = corrections.get("trm_soft")(given, max_score=0.1, power=power)
        expected = [min(1.0, 0.1 / score) ** power if score else 1.0 for score in scores]
        assert got.weights[:, 0].tolist() == pytest.approx(expected)
        assert got.keep.all()
        assert corrections.finalize(got.metrics)["correction/trm_soft/faded_fraction"] == 0.5
    hard = corrections.get("trm")(given, max_score=0.1).keep[:, 0]
    soft = corrections.get("trm_soft")(given, max_score=0.1, power=1e4).weights[:, 0]
    assert soft.tolist() == pytest.approx(hard.double().tolist())


def test_soft_masking_beside_other_rules_and_a_bad_row() -> None:
    """Weights multiply, keep masks join; a row of unknown distance is dropped, as `trm` drops it."""
    gen = torch.Generator().manual_seed(3)
    engine, stale = torch.randn(2, 8, 6, generator=gen, dtype=torch.float64) * 0.4
    engine[2, 1] = torch.nan
    zero, mask = torch.zeros_like(engine), torch.ones_like(engine).bool()
    given = Evidence(LogRatios(zero, engine, engine + stale, mask), zero)
    settings: dict[str, Any] = {"max_score": 0.1, "score": "ser"}
    alone = corrections.get("trm_soft")(given, **settings)
    band = corrections.get("icepop")(given, low=0.6, high=1.6)
    rules = [corrections.get("trm_soft").bind(**settings), corrections.get("icepop").bind(low=0.6, high=1.6)]
    got = corrections.compose(rules)(given)
    torch.testing.assert_close(got.weights, alone.weights * band.weights)
    assert torch.equal(got.keep, alone.keep & band.keep)
    assert not got.keep[2].any()
    assert got.keep.any()
