"""Speeds that the benchmark of predicted steps takes from short runs."""

from __future__ import annotations

import pytest

from benchmarks.plan_seconds import MANY, Speeds, cores, decoding, predicted
from benchmarks.side_cores import SideClock
from moe_trm.config.schema import Config
from moe_trm.plan.lengths import Lengths

ANSWERS = Lengths((40,), 8, "measured", "all alike")


def speeds(server_cores: float = 0.0, learner_cores: float = 0.1) -> Speeds:
    return Speeds(0.01, 0.0005, 0.2, 0.6, 0.05, server_cores, learner_cores, ANSWERS)


def config(mode: str, **pipeline: object) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "model"},
            "rollout": {"prompts_per_step": 16, "group_size": 8, "concurrency": MANY},
            "pipeline": {"mode": mode, **pipeline},
        }
    )


def test_seconds_of_a_pass_and_of_a_row_are_found_again() -> None:
    def seconds(passes: float, tokens: float) -> float:
        return 0.01 * passes + 0.002 * tokens

    runs = [(seconds(48, 4000), 48, 4000), (seconds(270, 4100), 270, 4100)]
    assert decoding(runs) == pytest.approx((0.01, 0.002))


def test_noise_makes_no_speed_negative() -> None:
    assert decoding([(1.0, 48, 4000), (0.5, 270, 4100)]) == (0.0, 1.0 / 4000)
    assert decoding([(1.0, 48, 4000), (10.0, 270, 4100)]) == (1.0 / 48, 0.0)


def test_cores_are_those_of_each_side_while_it_computes() -> None:
    """The servers use one core in a step's first two seconds, the learner two in the last one; both little else."""
    clock = SideClock()
    clock._times = [0.0, 2.0, 3.0, 5.0, 6.0]
    clock._totals = {"server": [0, 2, 2, 4, 4], "learner": [0, 0, 2, 2, 4]}
    rows = [{"time/unix_s": end, "time/step_s": 3.0, "time/wait_s": 2.0} for end in (3.0, 6.0)]
    assert cores(clock, rows) == pytest.approx((1.0, 2.0))


def test_steps_in_turn_are_sampling_training_and_a_push() -> None:
    """128 answers of 40 tokens at once: 40 passes of 128 rows. Sharing does not matter to them."""
    sampling = 40 * (0.01 + 0.0005 * 128)
    expected, idle = predicted(config("sync"), speeds(), 8)
    assert expected == pytest.approx(sampling + 0.2 + 0.6 + 0.05)
    assert idle == pytest.approx((sampling + 0.05) / expected)
    assert predicted(config("sync"), speeds(9.0, 9.0), 8)[0] == pytest.approx(expected)


def test_stale_samples_are_scored_twice_as_often_on_all_minibatches() -> None:
    """In turn, the second of two minibatches has a pass of its own; stale ones have two each. The learner is slower."""
    expected, _ = predicted(config("one_step"), speeds(), 8)
    sampling = 40 * (0.01 + 0.0005 * 128)
    assert expected == pytest.approx(max(sampling + 0.05, 0.6 + 4 * 0.2), rel=0.05)


def test_cores_that_both_sides_want_slow_them_down() -> None:
    shared = speeds(50.0, 50.0)
    assert shared.sharing < 0.9
    assert predicted(config("async"), shared, 8)[0] > predicted(config("async"), speeds(), 8)[0]
