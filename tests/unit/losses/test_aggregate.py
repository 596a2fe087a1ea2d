"""Denominators are those of the batch before correction, in every aggregation and however the batch is split."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.losses import Aggregation, aggregate
from tests.unit.conftest import WorkedExample


def trm_loss(fx: WorkedExample, mode: str, **counts: Any) -> float:
    keep = fx.mask & torch.tensor([True, True, False, False])[:, None]
    return float(aggregate(-fx.ratios.total.exp() * fx.advantages, keep, fx.mask, mode, **counts))


def test_golden_values_of_a_masked_batch(fx: WorkedExample) -> None:
    counts: dict[str, Any] = {"num_sequences": 4, "num_tokens": 13}
    assert trm_loss(fx, "seq-mean-token-sum", **counts) == pytest.approx(0.012082, abs=1e-6)
    assert trm_loss(fx, "seq-mean-token-mean", **counts) == pytest.approx(0.003020, abs=1e-6)
    assert trm_loss(fx, "token-mean", **counts) == pytest.approx(0.003718, abs=1e-6)
    assert trm_loss(fx, "token-sum", **counts) == pytest.approx(4 * 0.012082, abs=4e-6)
    assert trm_loss(fx, "seq-mean-token-sum-norm", horizon=5, **counts) == pytest.approx(0.012082 / 5, abs=1e-6)


def test_counting_survivors_would_give_other_numbers(fx: WorkedExample) -> None:
    """The defect of dividing by what is left: rejected rows would raise the weight of the rest."""
    assert trm_loss(fx, "seq-mean-token-sum", num_sequences=2, num_tokens=8) == pytest.approx(0.024164, abs=1e-6)
    assert trm_loss(fx, "token-mean", num_sequences=2, num_tokens=8) == pytest.approx(0.006041, abs=1e-6)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_micro_batches_sum_to_the_whole(mode: str) -> None:
    gen = torch.Generator().manual_seed(1)
    values = torch.randn(7, 6, generator=gen, dtype=torch.float64)
    mask = torch.rand(7, 6, generator=gen) < 0.6
    mask[3] = False
    keep = mask & (torch.rand(7, 6, generator=gen) < 0.7)
    counts: dict[str, Any] = {"num_sequences": 6, "num_tokens": int(mask.sum()), "horizon": 6}
    whole = aggregate(values, keep, mask, mode, **counts)
    parts = [aggregate(values[s], keep[s], mask[s], mode, **counts) for s in (slice(0, 2), slice(2, 7), slice(7, 7))]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_nothing_kept_is_zero_with_zero_gradient(mode: str) -> None:
    values = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    total = aggregate(values, torch.zeros_like(mask), mask, mode, num_sequences=0, num_tokens=0, horizon=3)
    total.backward()
    assert total.item() == 0
    assert not values.grad.any()


def test_settings_that_cannot_work_are_refused() -> None:
    nothing = torch.zeros(0, 1)
    with pytest.raises(ConfigError, match="unknown aggregation"):
        aggregate(nothing, nothing.bool(), nothing.bool(), "mean", num_sequences=1, num_tokens=1)
    with pytest.raises(ConfigError, match="horizon"):
        aggregate(nothing, nothing.bool(), nothing.bool(), "seq-mean-token-sum-norm", num_sequences=1, num_tokens=1)


def test_dropped_tokens_do_not_raise_the_weight_of_their_row(fx: WorkedExample) -> None:
    keep = fx.mask.clone()
    keep[0, :3] = False
    ones = torch.ones_like(fx.current)
    counts: dict[str, Any] = {"num_sequences": 4, "num_tokens": 13}
    assert aggregate(ones, keep, fx.mask, "seq-mean-token-mean", **counts).item() == pytest.approx((1 / 4 + 3) / 4)
    assert aggregate(ones, keep, fx.mask, "token-mean", **counts).item() == pytest.approx(10 / 13)
