"""Verdicts over sequences of steps: a figure at its limit does not make them flap, and advice does not loosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from moe_trm.observe.advice.verdict import verdict
from moe_trm.observe.advice.verdict_changes import VerdictChanges
from moe_trm.observe.judge import LASTING, MEMORY, Judge
from tests.unit.diagnostics.test_verdict import HEALTHY

CALM = HEALTHY | {"optimizer/grad_norm": 1.0, "reward/zero_variance_groups": 0.1, "optimizer/lr": 1e-4}
RULE = {"correction/token_mis/kept_fraction": 0.7, "correction/kept_fraction": 0.7}
PLANTED: Mapping[str, tuple[Mapping[str, float], str]] = {
    "precision": ({"engine/k3_kl": 0.06}, "disagree at the same weights"),
    "unsplit": ({"merged/k3_kl": 0.06}, "far from what sampled"),
    "lag": ({"staleness/k3_kl": 0.07, "lag/k3_kl": 0.06, "update/k3_kl": 0.01}, "between sampling and this step"),
    "staleness": ({"staleness/k3_kl": 0.08}, "within the step"),
    "masking": (RULE, "Corrections drop 30%"),
    "variance": ({"total/chi2_token": 1.2}, "A few tokens dominate"),
    "sequence": ({"total/chi2_seq": 200.0, "total/log_ppl_abs_diff": 0.1}, "whole answers explode"),
    "drift": ({"total/chi2_token": 0.4}, "drift apart moderately"),
    "bias": ({"total/tv": 0.2}, "Token ratios are biased"),
    "router": (
        {"routing/moved_samples": 3.0, "routing/local_flip_rate": 0.2, "routing/local_flip_rate/layer_1": 0.3},
        "The router has moved",
    ),
}


def said_over(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, str]]:
    judge = Judge()
    return [judge.say(step) for step in steps]


def news(entries: Sequence[Mapping[str, str]]) -> list[str]:
    changes = VerdictChanges()
    return [entry["verdict/case"] for entry in entries if changes.of(entry)]


def case_step(case: str) -> Mapping[str, float]:
    step = {**CALM, **PLANTED[case][0]}
    # Without its parts, a mismatch has no engine's.
    return {key: value for key, value in step.items() if case != "unsplit" or not key.startswith("engine/")}


def test_every_case_with_a_limit_is_planted() -> None:
    assert {*PLANTED, "clipping"} == {*LASTING}


@pytest.mark.parametrize("case", PLANTED)
def test_a_figure_at_its_limit_is_one_verdict(case: str) -> None:
    """Over it in every second step, and then no longer: the fault is said once, and taken back ten steps after."""
    entries = said_over([CALM, *[case_step(case), CALM] * 10, *[CALM] * MEMORY])
    assert news(entries) == ["ok", case, "ok"]
    assert PLANTED[case][1] in entries[1]["verdict"]
    assert entries[2]["verdict"].endswith("(Not in the last step.)")
    assert entries[-2]["verdict"].endswith(f"(Not in the last {MEMORY} steps.)")
    assert entries[-1]["verdict/case"] == "ok"


@pytest.mark.parametrize(("first", "second"), [("precision", "drift"), ("lag", "variance"), ("masking", "bias")])
def test_the_graver_of_two_faults_stays(first: str, second: str) -> None:
    steps = [CALM, case_step(second), *[case_step(first), case_step(second)] * 6]
    assert news(said_over(steps)) == ["ok", second, first]


def test_a_run_that_goes_on_remembers_as_one_that_did_not_end() -> None:
    steps = [CALM] * 3 + [case_step("drift"), CALM] * 4
    judge, resumed = Judge(), Judge()
    for step in steps:
        judge.say(step)
    resumed.restore(judge.state())
    rest = [judge.say(CALM) for _ in range(12)]
    assert rest == [resumed.say(CALM) for _ in range(12)]
    assert news(rest) == ["drift", "ok"]


def test_a_finished_task_is_one_verdict() -> None:
    """Eight groups a step: shares of single steps go to both sides of one half."""
    draw = np.random.default_rng(0)
    for equal, solved, case in ((0.7, 0.62, "learned"), (0.62, 0.2, "signal"), (0.3, 0.2, "ok")):
        steps = [
            CALM | {"reward/zero_variance_groups": draw.binomial(8, equal) / 8, "reward/solved_groups": share}
            for share in draw.binomial(8, solved, 40) / 8
        ]
        told = news(said_over(steps))
        assert told[-1] == case
        assert len(told) <= 3, told


def test_the_advised_age_never_loosens_while_the_lag_grows() -> None:
    """Ages rise with the lag: each step alone would allow one version less than its own oldest sample."""
    steps = [
        CALM
        | {"lag/k3_kl": lag, "staleness/k3_kl": lag, "update/k3_kl": 0.01}
        | {"rollout/age_max": age, "rollout/age_mean": mean}
        for lag, age, mean in ((0.055, 2.0, 1.5), (0.052, 3.0, 2.0), (0.06, 4.0, 3.0), (0.23, 4.0, 3.0))
    ]
    weighed = {"correction.preset": "decoupled_token_is"}
    advised = [verdict(steps[:end], settings=weighed).config for end in range(1, len(steps) + 1)]
    assert advised == [f"pipeline.max_staleness={bound}" for bound in (1, 1, 1, 0)]
    # By the lag of a version: ten versions old, half of them fit.
    old = steps[0] | {"lag/k3_kl": 0.1, "staleness/k3_kl": 0.1, "rollout/age_max": 10.0, "rollout/age_mean": 10.0}
    assert verdict([old], settings=weighed | {"pipeline.max_staleness": 10}).config == "pipeline.max_staleness=5"


def test_half_of_the_rate_is_half_of_what_is_configured() -> None:
    """In warm-up a step has less."""
    steep = CALM | {"optimizer/grad_norm": 200.0, "optimizer/lr": 1e-6}
    assert verdict([steep], settings={"optimizer.lr": 1e-4}).config == "optimizer.lr=5e-05"
