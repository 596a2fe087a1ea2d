"""Speeds that the benchmark of predicted steps takes from short runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_seconds import MANY, SKIPPED, Speeds, busy_cores, decoding, predicted
from benchmarks.sharing import Cores
from benchmarks.side_cores import SideClock
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.tools.plan.lengths import Lengths

ANSWERS = Lengths((40,), 8, "measured", "all alike")


def speeds(server_cores: float = 0.0, learner_cores: float = 0.1) -> Speeds:
    return Speeds(0.01, 0.0005, 0.2, 0.6, 0.05, server_cores, learner_cores, Cores(2, 0.7), ANSWERS)


def config(mode: str, bundle: str | None = None) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "model"},
            "rollout": {"prompts_per_step": 16, "group_size": 8, "concurrency": MANY},
            "pipeline": {"mode": mode},
            "record": {"bundle": bundle},
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
    assert busy_cores(clock, rows) == pytest.approx((1.0, 2.0))


SAMPLING = 40 * (0.01 + 0.0005 * 128)
"""128 answers of 40 tokens at once: 40 passes of 128 rows."""


def test_steps_in_turn_are_sampling_training_and_a_push() -> None:
    """Sharing does not matter to them. The first of two minibatches needs no pass of log-probs of its own."""
    expected, idle = predicted(config("sync"), speeds(), 8)
    assert expected == pytest.approx(SAMPLING + 0.1 + 0.6 + 0.05)
    assert idle == pytest.approx((SAMPLING + 0.05) / expected)
    assert predicted(config("sync"), speeds(9.0, 9.0), 8)[0] == pytest.approx(expected)


def test_a_recording_has_the_scores_of_every_minibatch() -> None:
    """As the measured runs have, whose synchronous steps score all of the batch, not half of it."""
    recorded = config("sync", bundle="bundle")
    assert predicted(recorded, speeds(), 8)[0] == pytest.approx(SAMPLING + 0.2 + 0.6 + 0.05)


@pytest.mark.parametrize("bundle", [None, "bundle"])
def test_stale_samples_are_scored_under_their_own_weights_too(bundle: str | None) -> None:
    """By the learner's weights and by those that sampled, recorded or not. The learner is slower than the servers."""
    expected, _ = predicted(config("one_step", bundle=bundle), speeds(), 8)
    slow = replace(speeds(), train_s=4.0)
    assert predicted(config("one_step", bundle=bundle), slow, 8)[0] == pytest.approx(4.0 + 2 * 0.2)
    assert expected == pytest.approx(max(SAMPLING + 0.05, 0.6 + 2 * 0.2), rel=0.05)


def test_cores_that_both_sides_want_slow_them_down() -> None:
    shared = speeds(50.0, 50.0)
    assert shared.sharing < 0.9
    assert predicted(config("async"), shared, 8)[0] > predicted(config("async"), speeds(), 8)[0]


def test_the_shorter_side_is_slow_all_the_time_and_the_longer_one_as_long_as_they_meet() -> None:
    """A learner of 4.4 s that always computes, and servers that do for half of their time, on a core of 0.7."""
    found = replace(speeds(0.5, 1.0), train_s=4.0)
    shared = 1 / (1 + 0.5 * (1 / 0.7 - 1))
    assert found.sharing == pytest.approx(shared)
    expected, _ = predicted(config("one_step"), found, SKIPPED + 4)
    assert expected == pytest.approx(SAMPLING / shared + 4.4 - SAMPLING, rel=0.05)


def test_a_side_without_processes_is_no_side_without_work() -> None:
    clock = SideClock()
    clock._times, clock._totals = [0.0, 3.0], {"server": [0, 2], "learner": [0, 0]}
    with pytest.raises(MoeTrmError, match="not seen"):
        busy_cores(clock, [{"time/unix_s": 3.0, "time/step_s": 3.0, "time/wait_s": 2.0}])
