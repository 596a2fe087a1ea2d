"""A jump of the mismatch is told at once with what carries it, and clean runs of every arithmetic raise nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moe_trm.observe.advice.verdict_jumps import LEAST_STEPS, jump
from moe_trm.observe.judge import Judge

STEPS, RUNS = 100, 8
RESULTS = Path(__file__).parents[3] / "benchmarks" / "evidence" / "results"


@dataclass(frozen=True)
class Engines:
    """Two engines: the spread of their log-ratios, the share of tokens that take another expert, and the age."""

    spread: float
    flips: float = 0.0
    age: int = 0


ARITHMETICS = {
    "float32": Engines(2e-6),
    "float32, flips": Engines(2e-6, 1e-4),
    "float16": Engines(8e-4, 3e-4),
    "bfloat16, replayed": Engines(6e-3),
    "bfloat16, own routes": Engines(6e-3, 5e-3),
    "bfloat16, stale": Engines(6e-3, 1e-3, age=8),
    "int8 weights": Engines(2e-2, 5e-3, age=2),
}
"""Of which seven a run of the suite has one (`benchmarks.clean_runs`)."""


def step_of(
    engines: Engines, step: int, draw: np.random.Generator, *, lag: float = 0.0, share: float = 1.0
) -> dict[str, float]:
    """Figures of a step. The policy gets surer and answers longer as the run goes on; age rises to its bound.

    `lag`: spread of log-ratios that older weights make in the first `share` of the rows, whose label is fresh.
    """
    rows, length = 16, 16 + step // 4
    logp = -draw.exponential(0.8 * np.exp(-step / 60), (rows, length))
    age = np.minimum(draw.integers(0, engines.age + 1, rows), step)
    # Sure tokens move less than others.
    x = draw.normal(0, engines.spread, logp.shape) * np.minimum(1, -logp + 0.05)
    x += (draw.random(logp.shape) < engines.flips) * draw.normal(0, 0.5, logp.shape)
    x[: round(share * rows)] += draw.normal(0, lag, (round(share * rows), length)) if lag else 0.0
    x = np.minimum(x, -logp)
    k3, gap = np.expm1(x) - x, np.abs(np.exp(logp) - np.exp(logp + x))
    middle = 16
    figures = {
        "engine/k3_kl": k3.mean(),
        "engine/probs_diff_p95": np.quantile(gap, 0.95),
        "engine/probs_diff_max": gap.max(),
        "engine/chi2_token_p95": np.quantile(np.expm1(2 * x).mean(1), 0.95),
        "places/engine_k3/1_16": k3[:, :middle].mean(),
        **({"places/engine_k3/17_64": k3[:, middle:].mean()} if length > middle else {}),
        **{f"ages/engine_k3/{number}": k3[age == number].mean() for number in np.unique(age)},
        "routing/native_flip_rate": 0.007 * (1 + age.max()) * draw.uniform(0.8, 1.2),
        "rollout/age_max": float(age.max()),
        "weights/version": float(step),
        "engine/ppl_ratio": 1.0,
    }
    return {name: float(value) for name, value in figures.items()}


def clean(engines: Engines, seed: int, steps: int = STEPS) -> Iterator[dict[str, float]]:
    draw = np.random.default_rng(seed)
    return (step_of(engines, step, draw) for step in range(1, steps + 1))


@pytest.mark.parametrize("name", ARITHMETICS)
def test_clean_runs_raise_nothing(name: str) -> None:
    """Over all arithmetics, 56 runs of 100 steps with learning, age and longer answers."""
    for seed in range(RUNS):
        history = list[dict[str, float]]()
        for metrics in clean(ARITHMETICS[name], seed):
            history = [*history[-100:], metrics]
            alarm = jump(history)
            assert alarm is None, f"seed {seed}, step {metrics['weights/version']:.0f}: {alarm.sentence}"


def test_recorded_runs_with_noisy_routers_raise_nothing_before_they_turn() -> None:
    """Eighty steps each of real runs at a hundred times the usual mismatch: what grows there does so step by step."""
    recorded = json.loads((RESULTS / "router_noise_steps.json").read_text())
    runs = {name: run for name, run in recorded.items() if isinstance(run, dict) and "engine/k3_kl" in run}
    assert len(runs) >= 20
    for name, run in runs.items():
        series = {key: values for key, values in run.items() if isinstance(values, list)}
        history = [{key: values[step] for key, values in series.items()} for step in range(40)]
        for step in range(1, 41):
            assert jump(history[:step]) is None, f"{name}, step {step}"


FAULTS = {
    "half of the groups, older weights": (0.04, 0.5),
    "all groups, older weights": (0.06, 1.0),
    "a cache that survived a push": (0.025, 1.0),
    "a cache that survived four pushes": (0.1, 1.0),
}
"""Spread of log-ratios and share of rows with which the figures are those that were measured of such faults."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_jump_below_every_absolute_limit_is_told_in_its_first_step(name: str) -> None:
    engines, (lag, share) = ARITHMETICS["bfloat16, replayed"], FAULTS[name]
    judge, draw = Judge(), np.random.default_rng(3)
    for step in range(1, 31):
        assert judge.say(step_of(engines, step, draw))["verdict/case"] == "ok"
    planted = step_of(engines, 31, draw, lag=lag, share=share)
    assert planted["engine/k3_kl"] < 0.01, "far below 0.05, where the verdict begins without a reference"
    entries = judge.say(planted)
    assert entries["verdict/case"] == "jump"
    assert "since step 31" in entries["verdict"]
    assert "in all classes of tokens" in entries["verdict"]
    later = judge.say(step_of(engines, 32, draw, lag=lag, share=share))
    assert "since step 31" in later["verdict"], "a jump does not become the reference"
    assert judge.say(step_of(engines, 33, draw))["verdict/case"] == "ok"


def test_the_version_label_that_carries_it_is_named() -> None:
    history = [
        {"engine/k3_kl": 2e-5, "engine/probs_diff_p95": 1e-3, "weights/version": float(step)}
        | {f"ages/engine_k3/{age}": 2e-5 for age in range(3)}
        for step in range(1, 21)
    ]
    planted = history[-1] | {"engine/k3_kl": 8e-4, "engine/probs_diff_p95": 5e-3, "weights/version": 21.0}
    alarm = jump([*history, planted | {"ages/engine_k3/0": 2.4e-3}])
    assert alarm is not None
    assert "carried by version label 20 (age 0) (120 times)" in alarm.sentence
    assert "40 times what this run's earlier steps had, since step 21" in alarm.sentence
    assert alarm.config == ""


def test_the_server_that_carries_it_is_named() -> None:
    calm = {"engine/k3_kl": 2e-5, "engine/probs_diff_p95": 1e-3, "ages/engine_k3/0": 2e-5}
    calm |= {f"servers/engine_k3/{place}": 2e-5 for place in range(4)}
    odd = calm | {"engine/k3_kl": 8e-4, "engine/probs_diff_p95": 5e-3, "ages/engine_k3/0": 8e-4}
    alarm = jump([*[calm] * 20, odd | {"servers/engine_k3/2": 3.2e-3}])
    assert alarm is not None
    assert "carried by server 2 (the first of rollout.urls is 0) (160 times)" in alarm.sentence


def test_single_tokens_are_told_when_they_come_again() -> None:
    calm = {"engine/k3_kl": 2e-5, "engine/probs_diff_p95": 1e-3}
    odd = calm | {"engine/k3_kl": 1e-3}
    assert jump([calm] * 20 + [odd, odd]) is None
    assert jump([calm] * 20 + [odd, odd, odd]) is not None
    assert jump([calm] * 20 + [odd, odd, calm, odd]) is None
    assert jump([odd] + [calm] * 20 + [odd, odd, odd]) is None, "a healthy step had as much"


def test_where_a_few_tokens_often_take_another_expert_a_row_of_jumps_is_told() -> None:
    """One at the beginning of an answer moves the tokens behind it, so such a jump is no fault by itself."""
    calm = {"engine/k3_kl": 2e-5, "engine/probs_diff_p95": 1e-3}
    flipped = {"engine/k3_kl": 4e-3, "engine/probs_diff_p95": 8e-3}
    odd = {"engine/k3_kl": 1e-3, "engine/probs_diff_p95": 5e-3}
    run = ([calm] * 14 + [flipped]) * 4
    assert jump([*run, calm, odd]) is None
    assert jump([*run, calm, *[odd] * 4]) is None
    assert jump([*run, calm, *[odd] * 6]) is not None
    assert jump([*[calm] * 61, odd]) is not None, "without any before"
    assert jump([*run, calm, odd | {"engine/k3_kl": 9e-3}]) is not None, "beyond those before"


def test_a_class_of_tokens_alone_is_told_too() -> None:
    calm = {"engine/k3_kl": 2e-5, "turns/engine_k3/0": 2e-5, "turns/engine_k3/3": 2e-5}
    odd = calm | {"engine/k3_kl": 5e-5, "turns/engine_k3/3": 1e-3}
    assert jump([calm] * 20 + [odd] * 2) is None
    alarm = jump([calm] * 20 + [odd] * 3)
    assert alarm is not None
    assert alarm.sentence.startswith("K3 between the engines at turn 3 jumped to 0.001, 50 times")


def test_flips_are_compared_at_the_same_age() -> None:
    young = {"engine/k3_kl": 2e-5, "routing/native_flip_rate": 0.005, "rollout/age_max": 0.0}
    old = young | {"routing/native_flip_rate": 0.116, "rollout/age_max": 4.0}
    assert jump([young] * 20 + [old] * 3) is None
    stale_routes = young | {"routing/native_flip_rate": 0.116}
    alarm = jump([young] * 20 + [stale_routes] * 3)
    assert alarm is not None
    assert alarm.sentence.startswith("The share of expert sets that the engines choose differently jumped to 0.12")


def test_a_reference_is_needed() -> None:
    calm, odd = {"engine/k3_kl": 2e-5}, {"engine/k3_kl": 2e-3}
    assert jump([]) is None
    assert jump([calm] * (LEAST_STEPS - 1) + [odd] * 3) is None
    assert jump([calm] * LEAST_STEPS + [odd] * 3) is not None


def test_a_jump_beyond_the_limits_keeps_their_advice() -> None:
    judge = Judge()
    for _ in range(20):
        judge.say({"engine/k3_kl": 2e-5, "engine/probs_diff_p95": 1e-3})
    entries = judge.say({"engine/k3_kl": 0.2, "engine/probs_diff_p95": 0.1})
    assert entries["verdict/case"] == "jump"
    assert "The two engines disagree at the same weights" in entries["verdict"]
    assert entries["verdict/config"] == "learner.dtype=float16 rollout.server.dtype=float16"
