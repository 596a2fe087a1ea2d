"""The decomposition sums without remainder, ignores what is masked, and says what it cannot know."""

from __future__ import annotations

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.methods.ratios import RATIO_NAMES
from moe_trm.ratios import LogRatios, clamp_log_ratio, k3

MASK = torch.tensor([[True, True, False], [False, True, True]])


def random_logprobs(count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return [-torch.rand(2, 3, generator=gen, dtype=torch.float64).to(dtype) for _ in range(count)]


def test_parts_sum_to_the_total() -> None:
    rollout, behavior, proximal, current = random_logprobs(4)
    ratios = LogRatios(rollout, behavior, current, MASK, proximal)
    torch.testing.assert_close(ratios.engine + ratios.lag + ratios.update, ratios.total)
    torch.testing.assert_close(ratios.lag + ratios.update, ratios.staleness)
    torch.testing.assert_close(ratios.engine + ratios.lag, ratios.merged)
    torch.testing.assert_close(ratios.total, torch.where(MASK, current - rollout, 0))
    torch.testing.assert_close(ratios.engine, torch.where(MASK, behavior - rollout, 0))
    torch.testing.assert_close(ratios.lag, torch.where(MASK, proximal - behavior, 0))


def test_age_zero_has_no_lag_and_an_unchanged_policy_has_exactly_no_update() -> None:
    rollout, behavior = random_logprobs(2, torch.float32)
    ratios = LogRatios(rollout, behavior, behavior.clone(), MASK)
    assert not ratios.lag.any()
    assert not ratios.staleness.any()
    assert torch.equal(ratios.total, ratios.engine)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e9])
def test_masked_cells_reach_neither_values_nor_gradients(poison: float) -> None:
    clean = random_logprobs(4)
    dirty = [torch.where(MASK, values, poison) for values in clean]
    results = []
    for rollout, behavior, proximal, current in (clean, dirty):
        leaf = current.clone().requires_grad_()
        ratios = LogRatios(rollout, behavior, leaf, MASK, proximal)
        (ratios.total.exp() * ratios.staleness).sum().backward()
        results.append([*(ratios.get(name).detach() for name in RATIO_NAMES), leaf.grad])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_only_the_current_policy_carries_gradient() -> None:
    inputs = [values.requires_grad_() for values in random_logprobs(4)]
    ratios = LogRatios(inputs[0], inputs[1], inputs[3], MASK, inputs[2])
    assert [name for name in RATIO_NAMES if ratios.get(name).requires_grad] == ["update", "staleness", "total"]
    ratios.total.sum().backward()
    assert [values.grad is None for values in inputs] == [True, True, True, False]
    assert inputs[3].grad is not None
    assert torch.equal(inputs[3].grad, MASK.double())


def test_half_precision_is_computed_in_float32() -> None:
    rollout, behavior, current = random_logprobs(3, torch.bfloat16)
    ratios = LogRatios(rollout, behavior, current, MASK)
    assert ratios.total.dtype == torch.float32
    assert torch.equal(ratios.engine, torch.where(MASK, behavior.float() - rollout.float(), 0))


def test_merged_when_the_sampling_weights_are_gone() -> None:
    rollout, proximal, current = random_logprobs(3)
    ratios = LogRatios(rollout, None, current, MASK, proximal)
    assert not ratios.split
    torch.testing.assert_close(ratios.merged, torch.where(MASK, proximal - rollout, 0))
    torch.testing.assert_close(ratios.total, torch.where(MASK, current - rollout, 0))
    for name in ("engine", "lag", "staleness"):
        with pytest.raises(ConfigError, match=f"the {name} ratio is unknown"):
            ratios.get(name)
    with pytest.raises(ConfigError, match="neither"):
        LogRatios(rollout, None, current, MASK)
    with pytest.raises(ConfigError, match="unknown ratio"):
        ratios.get("everything")


def test_clamp_bounds_infinities_and_lets_nan_through() -> None:
    got = clamp_log_ratio(torch.tensor([1000.0, -torch.inf, 0.5, torch.nan]))
    assert got[:3].tolist() == [20.0, -20.0, 0.5]
    assert got[3].isnan()


def test_k3_of_tiny_log_ratios_is_not_their_float32_rounding() -> None:
    """At 1e-4 nats e^x - 1 - x is 5e-9, far below what float32 keeps of e^x; beyond the clamp it stays finite."""
    assert float(k3(torch.full((1000,), 1e-4)).sum()) == pytest.approx(5e-6, rel=1e-3)
    assert float(k3(torch.full((1000,), 1e-6)).sum()) == pytest.approx(5e-10, rel=1e-5)
    assert torch.isfinite(k3(torch.tensor([1e4])).sum())


@pytest.mark.parametrize("name", ["update", "staleness", "total"])
def test_a_ratio_first_read_without_gradients_has_one_for_the_loss(name: str) -> None:
    rollout, behavior, proximal, current = random_logprobs(4)
    ratios = LogRatios(rollout, behavior, current.requires_grad_(), MASK, proximal)
    with torch.no_grad():
        ratios.get(name)
    ratios.get(name).sum().backward()
    torch.testing.assert_close(current.grad, MASK.double())


@pytest.mark.parametrize("behavior", [True, False])
@pytest.mark.parametrize("measured", [True, False])
def test_ratios_of_rows_that_are_taken_are_those_rows(behavior: bool, measured: bool) -> None:
    """Of stale samples too, whichever policies are known: a rule by turn reads them so."""
    if behavior and not measured:
        return
    gen = torch.Generator().manual_seed(0)
    rollout, sampled, proximal, current = torch.randn(4, 3, 5, generator=gen, dtype=torch.float64)
    mask, order = torch.rand(3, 5, generator=gen) < 0.7, torch.tensor([2, 0])
    whole = LogRatios(rollout, sampled if behavior else None, current, mask, proximal, measured=measured)
    taken = whole.taking(lambda values: values[order], mask[order])
    assert taken.known == whole.known
    assert taken.split == behavior
    for name in whole.known:
        assert torch.equal(taken.get(name), whole.get(name)[order]), name
    assert not taken.total.requires_grad
