"""Every row and token rule against loops over Python floats, written from the definitions alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm import corrections
from moe_trm.corrections.evidence import Evidence
from moe_trm.ratios import LogRatios

Row = list[float]
Decision = list[float]  # weight of each token of the row, 0 where dropped


def k2(x: float) -> float:
    return x * x / 2


def k3(x: float) -> float:
    return math.exp(x) - 1 - x


def mean(values: Row) -> float:
    return sum(values) / len(values)


def two_way(x: float) -> float:
    q = 1 - 1e-6
    p = min(max(math.exp(x), 1e-6), q)
    return max(
        p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)),
        q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)),
    )


def all_or_none(keep: bool, row: Row, weight: float = 1.0) -> Decision:
    return [weight * keep] * len(row)


def ln_trm_score(f: Row, delta: float) -> float:
    omega = [min(1.0, math.sqrt(delta * (len(f) - t) / 2)) for t in range(1, len(f) + 1)]
    return sum(o * abs(math.exp(x) - 1) for o, x in zip(omega, f, strict=True)) / sum(omega) if sum(omega) else 0.0


# name -> thresholds, and the decision on a row from (engine log-ratios, total log-ratios, advantage)
REFERENCE: dict[str, tuple[dict[str, float | str], Callable[[Row, Row, float], Decision]]] = {
    "token_tis": ({"cap": 1.5, "floor": 0.5}, lambda e, f, A: [min(max(math.exp(x), 0.5), 1.5) for x in e]),
    "seq_tis": (
        {"cap": 1.5, "floor": 0.7},
        lambda e, f, A: all_or_none(True, e, min(max(math.exp(sum(e)), 0.7), 1.5)),
    ),
    "token_mis": ({"low": 0.7, "high": 1.4}, lambda e, f, A: [math.exp(x) * (0.7 <= math.exp(x) <= 1.4) for x in e]),
    "seq_mis": (
        {"low": 0.5, "high": 2.0},
        lambda e, f, A: all_or_none(0.5 <= math.exp(sum(e)) <= 2, e, math.exp(sum(e))),
    ),
    "icepop": ({"low": 0.6, "high": 2.0}, lambda e, f, A: [math.exp(x) * (0.6 <= math.exp(x) <= 2) for x in e]),
    "geometric_mask": ({"low": 0.9, "high": 1.1}, lambda e, f, A: all_or_none(0.9 <= math.exp(mean(e)) <= 1.1, e)),
    "token_veto": ({"min_ratio": 0.5}, lambda e, f, A: all_or_none(min(math.exp(x) for x in e) >= 0.5, e)),
    "opsm": ({"delta": 0.1}, lambda e, f, A: all_or_none(not (A < 0 and -mean(f) > 0.1), f)),
    "seq_icepop": (
        {"low": 0.8, "high": 1.3},
        lambda e, f, A: all_or_none(0.8 <= math.exp(mean(e)) <= 1.3, e, math.exp(mean(e))),
    ),
    "trm": (
        {"score": "ser", "max_score": 0.3},
        lambda e, f, A: all_or_none(mean([abs(math.exp(x) - 1) for x in f]) <= 0.3, f),
    ),
    "trm_soft": (
        {"max_score": 0.05, "power": 2.0},
        lambda e, f, A: all_or_none(True, f, min(1.0, 0.05 / mean([k3(x) for x in f])) ** 2),
    ),
    # The rollout is sure of every token here, q = 1 - 1e-6; other probabilities are in test_kpop.py.
    "kpop": ({"max_kl": 0.3}, lambda e, f, A: [float(two_way(x) <= 0.3) for x in e]),
    "trm_max": ({"max_kl": 0.2}, lambda e, f, A: all_or_none(max(map(k2, f)) <= 0.2, f)),
    "trm_avg": ({"mean_kl": 0.1}, lambda e, f, A: all_or_none(mean([k3(x) for x in f]) <= 0.1, f)),
    "trm_max_avg": (
        {"max_kl": 0.4, "mean_kl": 0.1},
        lambda e, f, A: all_or_none(max(map(k2, f)) <= 0.4 and mean([k3(x) for x in f]) <= 0.1, f),
    ),
    "ser": ({"max_score": 0.3}, lambda e, f, A: all_or_none(mean([abs(math.exp(x) - 1) for x in f]) <= 0.3, f)),
    "ln_trm": ({"delta": 0.3, "max_score": 0.3}, lambda e, f, A: all_or_none(ln_trm_score(f, 0.3) <= 0.3, f)),
    "token_k1": ({"low": 0.6, "high": 1.3}, lambda e, f, A: [float(math.log(0.6) <= -x <= math.log(1.3)) for x in e]),
    "token_k2": ({"upper": 0.1}, lambda e, f, A: [float(k2(x) <= 0.1) for x in e]),
    "token_k3": ({"upper": 0.1}, lambda e, f, A: [float(k3(x) <= 0.1) for x in e]),
    "seq_sum_k1": (
        {"low": 0.6, "high": 1.9},
        lambda e, f, A: all_or_none(math.log(0.6) <= -sum(e) <= math.log(1.9), e),
    ),
    "seq_sum_k2": ({"upper": 0.5}, lambda e, f, A: all_or_none(sum(map(k2, e)) <= 0.5, e)),
    "seq_sum_k3": ({"upper": 0.5}, lambda e, f, A: all_or_none(sum(map(k3, e)) <= 0.5, e)),
    "seq_mean_k1": (
        {"low": 0.8, "high": 1.3},
        lambda e, f, A: all_or_none(math.log(0.8) <= -mean(e) <= math.log(1.3), e),
    ),
    "seq_mean_k2": ({"upper": 0.1}, lambda e, f, A: all_or_none(mean([k2(x) for x in e]) <= 0.1, e)),
    "seq_mean_k3": ({"upper": 0.1}, lambda e, f, A: all_or_none(mean([k3(x) for x in e]) <= 0.1, e)),
    "seq_max_k2": ({"upper": 0.2}, lambda e, f, A: all_or_none(max(map(k2, e)) <= 0.2, e)),
    "seq_max_k3": ({"upper": 0.2}, lambda e, f, A: all_or_none(max(map(k3, e)) <= 0.2, e)),
}


def test_every_rule_but_batch_scope_has_a_reference() -> None:
    assert set(REFERENCE) == {name for name in corrections.names() if corrections.get(name).scope != "batch"}


@pytest.mark.parametrize("name", REFERENCE)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), tokens=st.integers(1, 10), spread=st.floats(0.05, 1.0))
def test_agrees_with_a_loop(name: str, seed: int, rows: int, tokens: int, spread: float) -> None:
    gen = torch.Generator().manual_seed(seed)
    engine, stale = torch.randn(2, rows, tokens, generator=gen, dtype=torch.float64) * spread
    mask = torch.rand(rows, tokens, generator=gen) < 0.6
    advantages = torch.randn(rows, generator=gen, dtype=torch.float64)
    zero = torch.zeros_like(engine)
    thresholds, reference = REFERENCE[name]
    evidence = Evidence(LogRatios(zero, engine, engine + stale, mask), advantages[:, None].expand(rows, tokens))
    got = corrections.get(name)(evidence, **thresholds).weights
    expected = zero.clone()
    for i in range(rows):
        if mask[i].any():
            e, f = engine[i][mask[i]].tolist(), (engine + stale)[i][mask[i]].tolist()
            expected[i, mask[i]] = torch.tensor(reference(e, f, float(advantages[i])), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
