"""Each case of the decision tree, in its order, and the alarms."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from moe_trm.config import resolve
from moe_trm.observe.advice.verdict import escalation, mask_hides_gap, rising, verdict
from moe_trm.observe.advice.verdict_mismatch import TAIL_STEPS

HEALTHY = {
    "engine/k3_kl": 0.001,
    "engine/probs_pearson": 0.999,
    "engine/ppl_ratio": 1.001,
    "staleness/k3_kl": 0.002,
    "total/k3_kl": 0.003,
    "total/chi2_token": 0.01,
    "total/rollout_is_eff_sample_size": 0.98,
    "loss/pg_clipfrac": 0.05,
    "response/length_mean": 100.0,
}
ROUTED = {
    "engine/k3_kl": 0.06,
    "probe/native_k3_kl": 0.06,
    "probe/replayed_k3_kl": 0.012,
    "probe/token_fraction": 0.25,
}
"""Routes make four fifths of the mismatch."""


def typed(config: str) -> list[str]:
    """The advice of a verdict as words of a command line."""
    return [part for part in re.split(r" (?=[a-z_.]+=)", config) if part]


@pytest.mark.parametrize(
    ("high", "low", "steps", "rings"),
    [
        (0.03, 0.021, TAIL_STEPS, True),
        (0.03, 0.019, TAIL_STEPS, False),
        (0.0, 0.051, TAIL_STEPS, True),
        (0.06, 0.06, TAIL_STEPS - 1, False),
    ],
)
def test_the_alarm_before_a_fall_rings_above_five_percent_of_tokens_in_ten_steps(
    high: float, low: float, steps: int, rings: bool
) -> None:
    tail = {"engine/rollout_is_high_fraction": high, "engine/rollout_is_low_fraction": low}
    history = [HEALTHY | {"engine/k3_kl": 0.1} | tail] * steps
    assert ("rewards of a tiny model fell later" in verdict(history).sentence) == rings
    # One quiet step among them counts as well, and a healthy mismatch has no alarm.
    quiet = [*history[:-1], history[-1] | dict.fromkeys(tail, 0.0)]
    assert "fell later" not in verdict(quiet).sentence or high + low > 0.05 * TAIL_STEPS / (TAIL_STEPS - 1)
    assert "fell later" not in verdict([HEALTHY | tail] * steps).sentence


@pytest.mark.parametrize(
    ("native", "replayed", "error", "age", "case"),
    [
        (7e-5, 1.1e-3, 2.0, 0.0, "routes"),
        (7e-5, 2e-5, 0.1, 0.0, "ok"),
        (7e-5, 1.1e-3, 9.0, 0.0, "ok"),
        (7e-5, 1.1e-3, 2.0, 4.0, "ok"),
        (1e-6, 9e-5, 1.0, 0.0, "ok"),
        (1e-3, 1.9e-3, 0.0, 0.0, "ok"),
    ],
    ids=["older routes", "right routes", "not sure", "stale samples", "next to nothing", "less than twice"],
)
def test_routes_that_explain_samples_worse_than_none_are_not_theirs(
    native: float, replayed: float, error: float, age: float, case: str
) -> None:
    probe = {"probe/native_k3_kl": native, "probe/replayed_k3_kl": replayed, "probe/routing_share_se": error}
    judgement = verdict([HEALTHY | probe | {"rollout/age_max": age}, HEALTHY | {"rollout/age_max": age}])
    assert judgement.case == case
    if case == "routes":
        assert "16 times what it is with the learner's own (k3 0.0011 instead of 7e-05)" in judgement.sentence


def test_older_routes_are_in_every_probe_of_fresh_samples() -> None:
    """In one, a few tokens may make any ratio."""
    right, wrong = (
        HEALTHY | {"probe/native_k3_kl": 7e-4, "probe/replayed_k3_kl": replayed} for replayed in (2e-4, 3e-3)
    )
    stale = right | {"rollout/age_max": 2.0}
    assert verdict([right, wrong, HEALTHY, wrong]).case == "ok"
    assert verdict([wrong, right, HEALTHY, wrong, wrong, HEALTHY, wrong]).case == "routes"
    assert verdict([wrong, wrong, stale, HEALTHY, wrong, HEALTHY]).case == "routes"
    assert verdict([wrong, stale]).case == "ok"


def test_a_share_of_a_sample_is_told_with_its_error() -> None:
    said = verdict([HEALTHY, HEALTHY | ROUTED | {"probe/routing_share_se": 0.1}]).sentence
    assert "80% of it, ±20%, by a probe of 25% of the tokens" in said
    assert "%" not in verdict([HEALTHY, HEALTHY | ROUTED | {"probe/token_fraction": 1.0}]).sentence


def test_steps_between_probes_are_given_the_advice_of_the_last_one() -> None:
    between = HEALTHY | {"engine/k3_kl": 0.07}
    assert verdict([HEALTHY | ROUTED, between, between]).config == "replay.mode=R3"
    rounding = HEALTHY | ROUTED | {"probe/replayed_k3_kl": 0.055}
    assert "dtype" in verdict([HEALTHY | ROUTED, between, rounding, between]).config


def test_a_tail_between_the_engines_over_ten_steps_warns_of_a_fall() -> None:
    far = HEALTHY | {"engine/k3_kl": 0.2, "engine/rollout_is_high_fraction": 0.02}
    heavy, light = (far | {"engine/rollout_is_low_fraction": share} for share in (0.04, 0.02))
    said = verdict([heavy] * 10)
    assert (said.case, "6.0% of the tokens" in said.sentence, "fell later in 25 of 35 runs" in said.sentence) == (
        "precision",
        True,
        True,
    )
    assert said.evidence["engine/rollout_is_low_fraction"] == 0.04
    for calm in ([heavy] * 9, [light] * 10, [light] * 6 + [heavy] * 4, [far] * 10):
        assert "fell later" not in verdict(calm).sentence
    assert "fell later" not in verdict([heavy] * 9 + [heavy | {"engine/k3_kl": 0.01}]).sentence


@pytest.mark.parametrize(
    ("changes", "case", "config"),
    [
        ({}, "ok", ""),
        ({"engine/k3_kl": 0.03}, "ok", ""),
        ({"engine/k3_kl": 0.06}, "precision", "dtype"),
        ({"engine/probs_pearson": 0.9}, "precision", "dtype"),
        ({"engine/ppl_ratio": 0.9}, "precision", "dtype"),
        (
            {"engine/k3_kl": 0.06, "probe/native_k3_kl": 0.06, "probe/replayed_k3_kl": 0.006},
            "precision",
            "replay.mode=R3",
        ),
        (ROUTED | {"probe/routing_share_se": 0.1}, "precision", "replay.mode=R3"),
        (ROUTED | {"probe/routing_share_se": 0.2}, "precision", "dtype"),
        ({"engine/k3_kl": 0.06, "staleness/k3_kl": 0.5}, "precision", "dtype"),
        ({"staleness/k3_kl": 0.08, "total/chi2_token": 3.0}, "staleness", "minibatches"),
        ({"total/rollout_is_eff_sample_size": 0.4, "total/chi2_token": 0.5}, "variance", "icepop"),
        ({"total/chi2_token": 1.2}, "variance", "icepop"),
        ({"total/chi2_token": 0.4}, "drift", "geometric_mask"),
        ({"rollout/servers": 1.0, "rollout/servers_lost": 1.0, "rollout/losses": 1.0}, "servers", ""),
        ({"rollout/servers": 1.0, "rollout/servers_lost": 0.0, "rollout/losses": 2.0}, "servers", ""),
        ({"rollout/servers": 1.0, "rollout/servers_lost": 0.0, "rollout/losses": 0.0}, "ok", ""),
    ],
)
def test_cases_in_their_order(changes: dict[str, float], case: str, config: str) -> None:
    got = verdict([HEALTHY, HEALTHY | changes])
    assert got.case == case
    assert config in got.config
    assert bool(config) == bool(got.config)
    assert got.evidence
    assert got.sentence.endswith(".")


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"optimizer/lr": 1e-4}, "optimizer.lr=5e-05"),
        ({"optimizer/lr": 1e-4, "rollout/age_max": 3.0}, "pipeline.max_staleness=2"),
    ],
)
def test_a_router_that_moved_is_not_healthy_and_is_no_accusation(changes: dict[str, float], config: str) -> None:
    flips = {"routing/local_flip_rate": 0.21, "routing/local_flip_rate/layer_1": 0.09}
    flips |= {"routing/local_flip_rate/layer_7": 0.33, "optimizer/grad_norm": 1.0, "reward/zero_variance_groups": 0.1}
    calm = HEALTHY | flips
    assert "nothing needs to change" in verdict([calm]).sentence
    said = verdict([calm | changes | {"routing/moved_samples": 16.0}])
    assert (said.case, said.config) == ("router", config)
    assert "33% in layer 7" in said.sentence
    assert "healthy" not in said.sentence
    assert verdict([calm | {"routing/moved_samples": 16.0, "engine/k3_kl": 0.06}]).case == "precision"


def test_clipping_needs_a_high_and_rising_share() -> None:
    climb = [HEALTHY | {"loss/pg_clipfrac": 0.1 + 0.01 * step} for step in range(20)]
    assert verdict(climb).case == "clipping"
    assert verdict([HEALTHY | {"loss/pg_clipfrac": 0.3}] * 20).case == "ok"
    assert verdict(climb[:5]).case == "ok"


def test_length_surge_over_a_hundred_steps() -> None:
    surge = [HEALTHY] * 100 + [HEALTHY | {"response/length_mean": 121.0}]
    assert verdict(surge).case == "length"
    assert verdict(surge[1:]).case == "ok"
    assert verdict([HEALTHY] * 100 + [HEALTHY | {"response/length_mean": 119.0}]).case == "ok"


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0.6] * 20 + [0.4] * 10, True),
        ([0.6] * 20 + [0.43] * 10, False),
        ([0.6] * 20 + [0.4] * 5, False),
        ([0.6] * 9 + [0.1] * 10, False),
        ([0.1, 0.9] * 10 + [0.2, 0.4] * 5, False),
        ([-0.2] * 20 + [-0.5] * 10, False),
        ([0.6] * 20 + [math.nan] * 3 + [0.3] * 10, True),
        ([0.2] * 20 + [0.6] * 10, False),
    ],
)
def test_a_reward_that_falls_is_told(rewards: list[float], told: bool) -> None:
    """By 30% from the best ten steps, and by more than chance; a step without a reward says nothing."""
    history = [HEALTHY | {"reward/mean": value, "optimizer/lr": 2e-4} for value in rewards]
    found = verdict([*history[:12], HEALTHY, *history[12:]])
    assert (found.case == "reward") is told
    if told:
        assert found.config == "optimizer.lr=0.0001"
        assert "fell from 0.6 to " in found.sentence


def test_nothing_measured_nothing_said() -> None:
    assert verdict([]).case == verdict([{"reward": 1.0}]).case == "unclear"


def test_alarm_when_rejection_falls_while_the_gap_widens(tmp_path: Path) -> None:
    steps = [{"correction/kept_fraction": 0.8 + 0.01 * i, "total/k3_kl": 0.01 * i} for i in range(10)]
    alarm = mask_hides_gap(steps)
    assert alarm is not None
    assert alarm.config
    file = tmp_path / "config.yaml"
    file.write_text("model: {checkpoint: none}\n")
    resolve(file, typed(alarm.config))
    assert mask_hides_gap([step | {"total/k3_kl": 0.01} for step in steps]) is None
    assert mask_hides_gap([step | {"correction/kept_fraction": 0.9} for step in steps]) is None


def test_rising_ignores_noise() -> None:
    assert rising([1, 2, 3, 4, 5])
    assert not rising([1, 2, 3, 4])
    assert not rising([3, 1, 4, 1, 5, 2, 3, 1, 4, 2])
    assert not rising([1.0] * 9)


@pytest.mark.parametrize(
    ("chi2", "masked", "size", "pearson", "stage"),
    [
        (1.0, 0.05, 0.9, 0.99, "rejection"),
        (2.5, 0.05, 0.9, 0.99, "rejection and token_tis"),
        (1.0, 0.1, 0.9, 0.99, "rejection and token_tis"),
        (1.0, 0.26, 0.9, 0.99, "systems"),
        (1.0, 0.05, 0.2, 0.99, "systems"),
        (1.0, 0.05, 0.9, 0.94, "systems"),
        (4.1, 0.05, 0.9, 0.99, "systems"),
    ],
)
def test_escalation_ladder(chi2: float, masked: float, size: float, pearson: float, stage: str) -> None:
    assert escalation(chi2, masked, size, pearson) == stage


def test_a_server_that_was_lost_is_told_in_the_step_in_which_it_was_lost() -> None:
    before, lost = HEALTHY | {"rollout/losses": 1.0}, HEALTHY | {"rollout/losses": 2.0, "rollout/lost_s": 41.0}
    assert verdict([before]).case == "servers"
    away = verdict([lost | {"rollout/servers": 1.0, "rollout/servers_lost": 1.0}])
    assert away.sentence.startswith("1 of 2 rollout servers is out of service")
    found = verdict([before, lost])
    assert (found.case, "2 losses, 41 s" in found.sentence) == ("servers", True)
    assert verdict([lost, lost]).case == "ok"
