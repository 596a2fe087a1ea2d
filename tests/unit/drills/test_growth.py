"""Made-up memory of a run, and what is said of it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.drills.growth import NEGLIGIBLE, growth

STEPS = 500
AT = np.repeat(np.arange(STEPS + 1, dtype=np.float64), 2)
MIB = float(1 << 20)


def noise(size: float, seed: int = 0) -> NDArray[np.float64]:
    """Of looks that remember the look before, as memory does: an autoregression of standard deviation `size`."""
    rng, values = np.random.default_rng(seed), np.zeros(len(AT))
    for n in range(1, len(AT)):
        values[n] = 0.9 * values[n - 1] + rng.normal()
    scaled: NDArray[np.float64] = size * values / values.std()
    return scaled


def verdict(values: NDArray[np.float64]) -> str:
    found = growth(AT, values, STEPS)
    assert found is not None
    return found.verdict


def test_a_line_has_its_slope_and_no_error() -> None:
    found = growth(AT, 100 * MIB + 3000 * AT, STEPS)
    assert found is not None
    assert found.settled.slope == pytest.approx(3000)
    assert found.late.slope == pytest.approx(3000)
    assert found.settled.error == pytest.approx(0, abs=1e-3)
    assert found.verdict == "grows"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *((400 * MIB + 5 * AT + 0.66 * MIB * (at < AT), "flat") for at in (150, 260, 310, 400, 480)),  # a single jump
        (np.full(len(AT), 100 * MIB), "flat"),
        (100 * MIB + 5e4 * np.minimum(AT, 100) + noise(1e4), "flat"),  # a warm-up that ends
        (300 * MIB + 0.9 * NEGLIGIBLE * AT, "flat"),
        (300 * MIB + 1.1 * NEGLIGIBLE * AT, "grows"),
        (300 * MIB + 1e4 * (AT % 30), "flat"),  # given back now and then
        (300 * MIB - 6144 * AT, "flat"),
        *((300 * MIB + 6144 * AT + noise(5e4, seed), "grows") for seed in range(5)),  # a leak, through noise
        *((300 * MIB + 2 * MIB * np.log1p(AT) + noise(1e4, seed), "levels off") for seed in range(5)),
    ],
)
def test_what_is_said_of_memory(values: NDArray[np.float64], expected: str) -> None:
    assert verdict(values) == expected


def test_noise_is_seldom_taken_for_growth() -> None:
    found = [verdict(100 * MIB + noise(MIB, seed)) for seed in range(200)]
    assert found.count("flat") >= 0.93 * len(found)


def test_nothing_is_said_of_a_process_that_came_late() -> None:
    late = AT > 300
    assert growth(AT[late], AT[late], STEPS) is None
