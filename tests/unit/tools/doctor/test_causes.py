"""Each cause leaves a trace, and is named by it; nothing is named where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest

from moe_trm.tools.doctor.causes import find_cause, traces
from tests.unit.tools.doctor.synthetic import N, clean, with_ratio


def noise(size: float, seed: int = 1) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(N)


def test_engines_of_equal_arithmetic_have_no_cause() -> None:
    assert find_cause(clean(noise=1e-5)).cause == "none"


def test_rounding() -> None:
    found = find_cause(with_ratio(noise(0.01)))
    assert (found.cause, found.config) == ("precision", "")


def test_large_and_everywhere_is_other_weights() -> None:
    assert find_cause(with_ratio(noise(0.3))).cause == "weights"


@pytest.mark.parametrize("size", [0.01, 0.3])
def test_a_rollout_that_rounds_its_weights_is_no_fault(size: float) -> None:
    found = find_cause(with_ratio(noise(size)), "fp8")
    assert (found.cause, found.config) == ("quantization", "")
    assert "rounded (fp8)" in found.sentence
    assert f"k3 {found.figures['native_k3']:.1e}" in found.sentence


def test_what_rounding_does_not_explain_is_still_named() -> None:
    assert find_cause(clean(noise=1e-5), "fp8").cause == "none"
    measurements = clean()
    assert find_cause(with_ratio(0.4 * (measurements.full + measurements.entropy)), "fp8").cause == "temperature"


@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.1, 1.4])
def test_temperature_and_how_much(temperature: float) -> None:
    measurements = clean()
    x = (1 / temperature - 1) * (measurements.full + measurements.entropy) + noise(0.01)
    found = find_cause(with_ratio(x))
    assert found.cause == "temperature"
    assert f"at a {'lower' if temperature < 1 else 'higher'} temperature" in found.sentence


def test_a_learner_without_the_mask() -> None:
    kept_mass = np.log(np.random.default_rng(3).uniform(0.7, 1.0, N))
    measurements = clean()
    found = find_cause(with_ratio(kept_mass + noise(0.01), full=measurements.rollout + kept_mass))
    assert (found.cause, found.config) == ("mask", "sampling_mask.mode=keep")


def test_a_fault_that_grows_with_the_context() -> None:
    x = noise(0.4) * (clean().position > 2)
    assert find_cause(with_ratio(x)).cause == "positions"


def test_one_expert_is_named() -> None:
    x = np.where(clean().touched[:, 1, 5], noise(0.5), noise(1e-4, seed=2))
    found = find_cause(with_ratio(x))
    assert found.cause == "expert"
    assert "expert 5 of MoE layer 1" in found.sentence


def test_disturbed_routers() -> None:
    flips = np.random.default_rng(4).integers(0, 2, N)
    found = find_cause(clean(native=noise(0.3) * flips, replayed=noise(0.02), flipped_layers=flips))
    assert (found.cause, found.config) == ("routing", "replay.mode=R3")


def test_figures_are_finite_on_one_token() -> None:
    one = clean()
    single = {
        name: getattr(one, name)[:1]
        for name in (
            "group",
            "position",
            "rollout",
            "full",
            "replayed",
            "native",
            "entropy",
            "flipped_layers",
            "touched",
        )
    }
    assert all(np.isfinite(value) for value in traces(clean(**single)).values())
