"""Summed parts finish into the same numbers as the whole, and nothing finishes into nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_trm.methods.summable import (
    add,
    bins,
    compared,
    finalize,
    fraction,
    highest,
    histogram,
    lowest,
    mean,
    moments,
)


def correlation(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sums of a correlation, of values that are 0 where they do not count."""
    x, y = x.double(), y.double()
    return {"r:x": x.sum(), "r:y": y.sum(), "r:xx": x @ x, "r:yy": y @ y, "r:xy": x @ y, "r:count": count}


def build(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return (
        mean("m", x, mask)
        | moments("w", y.exp(), mask)
        | correlation(torch.where(mask, x, 0), torch.where(mask, y, 0), mask.sum(dtype=torch.float64))
        | fraction("f", x > 0, mask)
    )


def test_parts_add_up_to_the_whole() -> None:
    gen = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 40, generator=gen)
    y, mask = x + noise, torch.rand(40, generator=gen) < 0.7
    x[~mask] = torch.nan
    got = finalize(add([build(x[part], y[part], mask[part]) for part in (slice(0, 13), slice(13, 40), slice(40, 40))]))
    a, b = x[mask].double().numpy(), y[mask].double().exp().numpy()
    assert got["m"] == pytest.approx(a.mean())
    assert got["w_mean"] == pytest.approx(b.mean())
    assert got["w_std"] == pytest.approx(b.std(), rel=1e-6)
    assert got["w_eff_sample_size"] == pytest.approx(b.mean() ** 2 / (b**2).mean(), rel=1e-6)
    assert got["r"] == pytest.approx(np.corrcoef(a, y[mask].double().numpy())[0, 1], rel=1e-9)
    assert got["f"] == pytest.approx((a > 0).mean())


def test_empty_parts_have_the_same_keys_and_finish_into_nothing() -> None:
    full = build(torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.bool))
    empty = build(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert full.keys() == empty.keys()
    assert finalize(empty) == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([0.0, 0.0, -1.0, 5e-7], 0.0),
        ([1.0] * 5, 1.0),
        ([0.01] * 94 + [0.5] * 6, 0.5),
        ([0.01] * 96 + [0.5] * 4, 0.01),
        ([1e9, torch.inf, torch.nan], 2.0),
        ([-torch.nan] * 3, 2.0),
        ([0.1] * 5 + [-1.0, -1e-30, 1e-40], 0.1),
        ([3e-6, 3e-6], 3e-6),
    ],
)
def test_a_percentile_is_right_to_its_bin(values: list[float], expected: float | None) -> None:
    """Too small a value counts as 0, too large a one or no number as the last edge; other roles finish too."""
    given = torch.tensor(values, dtype=torch.float64)
    halves = [histogram("h", bins(part, 1)) for part in (given[::2], given[1::2])]
    summed = add(halves) | mean("h", given.nan_to_num(), torch.ones(len(values), dtype=torch.bool))
    got = finalize(summed)
    assert ("h_p95" in got) == ("h" in got) == (expected is not None)
    if expected is not None:
        assert got["h_p95"] == pytest.approx(expected, rel=0.5)


def test_equal_constants_correlate_fully_and_plain_keys_pass() -> None:
    same, count = torch.full((3,), -0.3), torch.tensor(3.0, dtype=torch.float64)
    assert finalize(correlation(same, same, count)) == {"r": 1.0}
    assert finalize(correlation(same, torch.arange(3.0), count)) == {}
    assert finalize({"plain": 2.0}) == {"plain": 2.0}


def test_extremes_are_compared_where_sums_are_added() -> None:
    parts = [
        {"a_max:max": highest(x), "a_min:min": lowest(x)}
        for x in (torch.tensor([1.0, 5.0]), torch.zeros(0), -torch.ones(1))
    ]
    assert finalize(add(parts)) == {"a_max": 5.0, "a_min": -1.0}
    assert finalize(parts[1]) == {}
    assert [compared(name) for name in ("a:max", "a:min", "a:sum")] == [True, True, False]
    assert finalize({"d:sum": 4.0, "d:squared": 10.0, "d:count": 2.0}) == {"d_mean": 2.0, "d_std": 1.0}


def test_a_slope_has_the_standard_error_of_its_logarithm_and_none_of_two_pairs() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    y = torch.tensor([0.1, 1.9, 4.2, 7.8], dtype=torch.float64)

    def finished(n: int) -> dict[str, float]:
        return finalize(correlation(x[:n], y[:n], torch.tensor(float(n))) | {"r:slope": torch.zeros(())})

    fit = np.polyfit(x, y, 1, full=True)
    error = math.sqrt(fit[1][0] / (len(x) - 2) / float(((x - x.mean()) ** 2).sum())) / fit[0][0]
    assert finished(4)["r_slope"] == pytest.approx(fit[0][0])
    assert finished(4)["r_slope_error"] == pytest.approx(error)
    assert finished(2).keys() == {"r"}
