"""Records that are not what they claim to be are named, though every figure of the mismatch is healthy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_trm import diagnostics
from moe_trm.corrections import Evidence
from moe_trm.observe.advice.verdict import verdict
from moe_trm.ratios import LogRatios
from tests.unit.diagnostics.test_verdict import HEALTHY


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"sampling_mask/refused_fraction": 1 / 128}, "sampling masks of 0.8% of the rows"),
        ({"response/copies": 3.0, "response/copies_log_p": -40.0}, "3 answers are copies"),
        ({"engine/log_odds_slope": 1.3, "engine/log_odds": 0.99}, "a higher temperature than the run's 0.7"),
        ({"engine/log_odds_slope": 0.75, "engine/log_odds": 0.99}, "a lower temperature"),
    ],
)
def test_each_is_named_before_the_size_of_the_mismatch(metrics: dict[str, float], words: str) -> None:
    judgement = verdict([HEALTHY | metrics], settings={"rollout.temperature": 0.7})
    assert judgement.case == "records"
    assert words in judgement.sentence
    assert judgement.evidence.items() >= metrics.items()


@pytest.mark.parametrize(
    "metrics",
    [
        {"sampling_mask/refused_fraction": 0.0, "sampling_mask/judged_fraction": 0.0},
        {"response/copies": 0.0, "response/copies_log_p": -2.0},
        {"engine/log_odds_slope": 1.05, "engine/log_odds": 0.99},
        {"engine/log_odds_slope": 0.86, "engine/log_odds": 0.9},
        {"engine/log_odds_slope": 2.0, "engine/log_odds": 1.0, "engine/log_odds_slope_error": 0.0},
        {"engine/log_odds_slope": 1.7, "engine/log_odds": 0.99, "engine/log_odds_slope_error": 0.1},
    ],
)
def test_what_is_clean_or_not_known_is_not(metrics: dict[str, float]) -> None:
    assert verdict([HEALTHY | metrics]).case not in ("records", "outlier")


FAR = {"engine/probs_diff_max": 0.5, "engine/probs_diff_p95": 0.005, "engine/rollout_is_min": 0.01}


def test_a_lone_token_far_off_is_named_where_the_others_agree() -> None:
    assert verdict([HEALTHY | FAR]).case == "outlier"
    assert verdict([HEALTHY | FAR | {"engine/rollout_is_min": 1.0, "engine/rollout_is_max": 40.0}]).case == "outlier"
    for calm in ({"engine/probs_diff_max": 0.1}, {"engine/probs_diff_p95": 0.1}, {"engine/rollout_is_min": 0.2}):
        assert verdict([HEALTHY | FAR | calm]).case == "ok"


def test_a_temperature_is_of_every_step_of_a_server() -> None:
    """A policy that repeats few tokens may have any slope in one step."""
    odd = HEALTHY | {"engine/log_odds_slope": 0.75, "engine/log_odds": 0.99}
    clean = HEALTHY | {"engine/log_odds_slope": 1.0, "engine/log_odds": 0.99}
    assert verdict([clean, clean, odd]).case == verdict([clean, odd, odd]).case == "ok"
    assert verdict([odd, odd, HEALTHY]).case == verdict([odd, odd, odd | {"engine/log_odds_slope": 1.3}]).case == "ok"
    assert verdict([clean, odd, odd, HEALTHY, odd]).case == "records"


def of_temperature(engine_temperature: float, noise: float) -> str:
    """The case of a learner at temperature 1 and an engine at another, over 800 tokens of a vocabulary of 50."""
    gen = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(1, 800, 50, generator=gen, dtype=torch.float64)
    token = torch.multinomial(logits[0].softmax(-1), 1, generator=gen)[None]

    def at(temperature: float) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, token)[..., 0]

    rollout = at(engine_temperature) + noise * torch.randn(1, 800, generator=gen, dtype=torch.float64)
    ratios = LogRatios(rollout.clamp(max=-1e-6), at(1.0), at(1.0), torch.ones(1, 800, dtype=torch.bool))
    metrics = diagnostics.finalize(diagnostics.metrics(Evidence(ratios, torch.zeros(1, 800))))
    return verdict([HEALTHY | {name: metrics[name] for name in metrics if name.startswith("engine/log_odds")}]).case


def test_log_probs_of_another_temperature_are_told_from_noise() -> None:
    assert [of_temperature(temperature, 0.01) for temperature in (1 / 0.7, 1.25, 0.8, 0.7)] == ["records"] * 4
    assert [of_temperature(temperature, 0.0) for temperature in (1 / 0.7, 0.7)] == ["records"] * 2
    assert [of_temperature(1.0, noise) for noise in (0.0, 0.02, 0.1, 0.2, 0.4, 1.0)] == ["ok"] * 6
