"""Properties that every registered correction must satisfy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_trm import corrections
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import BoundRule
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios

THRESHOLDS: dict[str, dict[str, float | str]] = {
    "geometric_mask": {"low": 0.9, "high": 1.2},
    "ln_trm": {"delta": 0.02, "max_score": 0.3},
    "opsm": {"delta": 0.05},
    "seq_icepop": {"low": 0.8, "high": 1.3},
    "seq_max_k2": {"upper": 0.3},
    "seq_max_k3": {"upper": 0.3},
    "seq_mean_k1": {"low": 0.8, "high": 1.3},
    "seq_mean_k2": {"upper": 0.15},
    "seq_mean_k3": {"upper": 0.15},
    "seq_sum_k1": {"low": 0.4, "high": 3.0},
    "seq_sum_k2": {"upper": 0.8},
    "seq_sum_k3": {"upper": 0.8},
    "token_k1": {"low": 0.7, "high": 1.4},
    "token_k2": {"upper": 0.1},
    "token_k3": {"upper": 0.1},
    "seq_mis": {"low": 0.4, "high": 3.0},
    "ser": {"max_score": 0.3},
    "token_mis": {"low": 0.7, "high": 1.4},
    "token_veto": {"min_ratio": 0.4},
    "trm": {"score": "ser", "max_score": 0.3},
    "trm_avg": {"mean_kl": 0.1},
    "trm_max": {"max_kl": 0.3},
    "trm_max_avg": {"max_kl": 0.4, "mean_kl": 0.1},
    "trm_soft": {"max_score": 0.1},
}
LENGTH_NEUTRAL = tuple(
    name for name in corrections.names() if not name.startswith(("seq_sum", "seq_tis", "seq_mis", "ln_trm", "m2po"))
)
every_rule = pytest.mark.parametrize("rule", corrections.names())
Logprobs = tuple[Tensor, Tensor, Tensor]
LOCAL = [name for name in corrections.names() if corrections.get(name).scope != "batch"]


def each(change: Callable[[Tensor], Tensor], logprobs: Logprobs) -> Logprobs:
    a, b, c = logprobs
    return change(a), change(b), change(c)


def bound(name: str) -> BoundRule:
    return corrections.get(name).bind(**THRESHOLDS.get(name, {}))


def batch(rows: int = 6, tokens: int = 9, seed: int = 0, spread: float = 0.5) -> tuple[Logprobs, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    base = -torch.rand(rows, tokens, generator=gen, dtype=torch.float64) * 2
    noise = torch.randn(2, rows, tokens, generator=gen, dtype=torch.float64) * spread
    mask = torch.rand(rows, tokens, generator=gen) < 0.7
    advantages = torch.randn(rows, 1, generator=gen, dtype=torch.float64).expand(rows, tokens)
    return (base, base + noise[0], base + noise[0] + noise[1]), mask, advantages


def apply(name: str, logprobs: Logprobs, mask: Tensor, advantages: Tensor) -> Correction:
    return bound(name)(Evidence(LogRatios(*logprobs, mask), advantages * mask))


def same(left: Correction, right: Correction, exact: bool = True) -> None:
    torch.testing.assert_close(left.weights, right.weights, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)
    assert torch.equal(left.keep, right.keep)
    for key, value in corrections.finalize(left.metrics).items():
        assert corrections.finalize(right.metrics)[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


@every_rule
def test_declares_what_it_reads_and_needs(rule: str) -> None:
    registered = corrections.get(rule)
    assert registered.name == rule
    assert registered.ratio in ("engine", "staleness", "total")
    assert registered.scope in ("token", "sequence", "batch")
    assert registered.__doc__
    assert "Source:" in registered.__doc__


@every_rule
def test_drops_something_and_keeps_something(rule: str) -> None:
    """Without this the other properties could hold for a rule that does nothing."""
    got = apply(rule, *batch(rows=40))
    if not corrections.get(rule).rejects:
        assert len(got.weights.unique()) > 2
    else:
        assert 0 < corrections.finalize(got.metrics)[f"correction/{rule}/kept_fraction"] < 1


@every_rule
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e9])
def test_masked_cells_do_not_matter(rule: str, poison: float) -> None:
    logprobs, mask, advantages = batch()
    poisoned = each(lambda values: torch.where(mask, values, poison), logprobs)
    same(apply(rule, logprobs, mask, advantages), apply(rule, poisoned, mask, advantages))


@every_rule
def test_padding_and_tool_tokens_do_not_matter(rule: str) -> None:
    logprobs, mask, advantages = batch()

    def insert(values: Tensor, fill: float) -> Tensor:
        column = torch.full((len(values), 1), fill, dtype=values.dtype)
        return torch.cat([values[:, :4], column, values[:, 4:], column, column], dim=1)

    widened = apply(
        rule, each(lambda v: insert(v, -7.0), logprobs), insert(mask.double(), 0).bool(), insert(advantages, 1.0)
    )
    original = apply(rule, logprobs, mask, advantages)
    columns = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    same(original, Correction(widened.weights[:, columns], widened.keep[:, columns], widened.metrics), exact=False)
    assert not widened.keep[:, [4, 10, 11]].any()
    assert not widened.weights[:, [4, 10, 11]].any()


@every_rule
def test_row_order_does_not_matter(rule: str) -> None:
    (a, b, c), mask, advantages = batch()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    original, moved = (
        apply(rule, (a, b, c), mask, advantages),
        apply(rule, (a[order], b[order], c[order]), mask[order], advantages[order]),
    )
    same(Correction(original.weights[order], original.keep[order], original.metrics), moved)


@every_rule
def test_one_policy_everywhere_changes_nothing(rule: str) -> None:
    (a, _, _), mask, advantages = batch()
    got = apply(rule, (a, a, a), mask, advantages)
    assert torch.equal(got.keep, mask)
    assert torch.equal(got.weights, mask.double())


@pytest.mark.parametrize("rule", LENGTH_NEUTRAL)
def test_tiling_rows_changes_no_decision(rule: str) -> None:
    logprobs, mask, advantages = batch(rows=20)
    tiled = apply(rule, each(lambda v: v.repeat(1, 3), logprobs), mask.repeat(1, 3), advantages.repeat(1, 3))
    assert torch.equal(tiled.keep, apply(rule, logprobs, mask, advantages).keep.repeat(1, 3))


@every_rule
def test_rows_without_sampled_tokens_count_for_nothing(rule: str) -> None:
    logprobs, mask, advantages = batch()
    emptied = mask.clone()
    emptied[2] = False
    rest = [0, 1, 3, 4, 5]
    got = apply(rule, logprobs, emptied, advantages)
    expected = apply(rule, each(lambda v: v[rest], logprobs), mask[rest], advantages[rest])
    same(expected, Correction(got.weights[rest], got.keep[rest], got.metrics))


@every_rule
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches_have_the_same_metrics(rule: str, shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    got = apply(rule, (nothing,) * 3, nothing.bool(), nothing)
    assert got.weights.shape == got.keep.shape == shape
    assert got.metrics.keys() == apply(rule, *batch()).metrics.keys()
    assert corrections.finalize(got.metrics) == {}


@every_rule
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0, float("inf"), float("-inf")])
def test_extreme_ratios_give_finite_results(rule: str, log_ratio: float) -> None:
    (a, _, _), mask, advantages = batch()
    got = apply(rule, (a, a + log_ratio, a + log_ratio), mask, advantages)
    assert got.weights.isfinite().all()
    assert all(value.isfinite() for key, value in got.metrics.items() if not key.endswith("score:sum"))


@every_rule
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
def test_a_nan_ratio_never_passes_with_a_weight(rule: str, sign: float, alone: bool) -> None:
    (a, b, c), _, advantages = batch()
    b, c = b.clone(), c.clone()
    b[1, 2] = c[1, 2] = torch.nan
    mask = c.isnan() if alone else torch.ones_like(a, dtype=torch.bool)
    got = apply(rule, (a, b, c), mask, sign * advantages.abs())
    assert not got.keep[1, 2]
    assert got.weights.isfinite().all()


@every_rule
def test_is_detached_and_off_mask_weights_are_zero(rule: str) -> None:
    (a, b, c), mask, advantages = batch()
    got = apply(rule, (a, b, c.requires_grad_()), mask, advantages)
    assert not got.weights.requires_grad
    assert all(not value.requires_grad and value.shape == () for value in got.metrics.values())
    assert not got.weights[~got.keep].any()
    assert not (got.keep & ~mask).any()


@every_rule
def test_half_precision_is_judged_in_float32(rule: str) -> None:
    (a, b, c), mask, advantages = batch()
    half = each(Tensor.bfloat16, (a, b, c))
    got = apply(rule, half, mask, advantages.float())
    assert got.weights.dtype == torch.float32
    same(apply(rule, each(Tensor.float, half), mask, advantages.float()), got)


@pytest.mark.parametrize("rule", LOCAL)
@settings(max_examples=15)
@given(
    rows=st.integers(1, 7),
    tokens=st.integers(1, 12),
    cut=st.integers(0, 7),
    seed=st.integers(0, 999),
    spread=st.floats(0, 4),
)
def test_micro_batches_decide_as_the_whole(
    rule: str, rows: int, tokens: int, cut: int, seed: int, spread: float
) -> None:
    (a, b, c), mask, advantages = batch(rows, tokens, seed, spread)
    whole = apply(rule, (a, b, c), mask, advantages)
    parts = [apply(rule, (a[s], b[s], c[s]), mask[s], advantages[s]) for s in (slice(None, cut), slice(cut, None))]
    assert torch.equal(torch.cat([p.weights for p in parts]), whole.weights)
    assert torch.equal(torch.cat([p.keep for p in parts]), whole.keep)
    merged = corrections.finalize(corrections.add([p.metrics for p in parts]))
    for key, value in corrections.finalize(whole.metrics).items():
        assert merged[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)


def refuses(pattern: str) -> AbstractContextManager[object]:
    return pytest.raises(ConfigError, match=pattern)


def test_configuration_errors_say_what_to_do() -> None:
    with refuses("did you mean 'icepop'"):
        corrections.get("ice_pop")
    with refuses("did you mean 'max_kl'"):
        corrections.get("trm_max").bind(max_k=0.1)
    with refuses("quantile"):
        corrections.get("trm_max").bind()
    with refuses("not a band"):
        corrections.get("icepop").bind(low=3.0, high=2.0)
    with refuses("above 0"):
        corrections.get("ser").bind(max_score=0.0)
    with refuses("NaN"):
        corrections.get("ser").bind(max_score=float("nan"))
    with refuses("unknown ratio"):
        corrections.get("ser").bind(max_score=1.0, ratio="engines")
    with refuses("unknown divergence"):
        corrections.get("trm_avg").bind(mean_kl=1.0, divergence="exakt")
    with refuses("unknown weight"):
        corrections.get("icepop").bind(weight="two")
    with refuses("listed twice"):
        corrections.compose([bound("icepop"), bound("icepop")])


def test_a_rule_can_be_told_to_read_another_ratio() -> None:
    (a, b, c), mask, advantages = batch()
    evidence = Evidence(LogRatios(a, b, c, mask), advantages)
    total = corrections.get("token_tis")(evidence, cap=1e9, ratio="total")
    torch.testing.assert_close(total.weights, torch.where(mask, (c - a).exp(), 0))
    gone = Evidence(LogRatios(a, None, c, mask, proximal_logprobs=b), advantages)
    with refuses("no log-probs under the weights that sampled"):
        corrections.get("token_tis")(gone)
    assert corrections.get("token_tis")(gone, ratio="merged").keep.any()


def test_repeating_tokens_powers_the_product_and_leaves_the_geometric_mean() -> None:
    (a, b, c), mask, advantages = batch(rows=1)
    tiled = each(lambda v: v.repeat(1, 3), (a, b, c))
    product = [
        apply("seq_tis", lp, m, adv).weights.max()
        for lp, m, adv in (((a, b, c), mask, advantages), (tiled, mask.repeat(1, 3), advantages.repeat(1, 3)))
    ]
    expected = min(float(((b - a) * mask).sum().exp() ** 3), 2.0)
    assert float(product[1]) == pytest.approx(expected)
    assert float(product[0]) == pytest.approx(min(float(((b - a) * mask).sum().exp()), 2.0))
