"""The loss scale of a float16 learner, step by step."""

from __future__ import annotations

from moe_trm.config.learning_rate import LearningRate
from moe_trm.config.schema import LossScaleConfig, OptimizerConfig
from moe_trm.learner.loss_scale import LossScale, loss_scale_of
from moe_trm.learner.steps import Steps

SETTINGS = LossScaleConfig(initial=8, growth_steps=2)


def moved(scale: LossScale, *applied: bool) -> list[int]:
    values = []
    for one in applied:
        scale.update(applied=one)
        values.append(scale.value)
    return values


def test_overflow_halves_and_applied_steps_in_a_row_double() -> None:
    assert moved(LossScale(SETTINGS), False, False, False, False) == [4, 2, 1, 1]
    assert moved(LossScale(SETTINGS), True, True, True, True) == [8, 16, 16, 32]
    # An overflow begins the count anew.
    assert moved(LossScale(SETTINGS), True, False, True, True) == [8, 4, 4, 8]


def test_only_float16_is_scaled() -> None:
    assert loss_scale_of("float32", SETTINGS) is None
    assert loss_scale_of("bfloat16", SETTINGS) is None
    scale = loss_scale_of("float16", SETTINGS)
    assert scale is not None
    assert scale.value == 8


def steps(loss_scale: LossScale | None) -> Steps:
    settings = OptimizerConfig(lr=1.0, warmup_steps=0, schedule="linear")
    return Steps(LearningRate(settings, num_steps=4), loss_scale)


def test_a_refused_step_advances_neither_rate_nor_count_but_the_scale() -> None:
    counted = steps(LossScale(SETTINGS))
    refused = counted.finish(float("inf"), counted.lr, applied=False)
    assert (refused.applied, refused.lr, refused.loss_scale) == (False, 1.0, 8)
    applied = counted.finish(1.0, counted.lr, applied=True)
    assert (applied.applied, applied.lr, applied.loss_scale) == (True, 1.0, 4)
    assert (counted.steps, counted.lr) == (1, 0.75)


def test_a_step_with_nothing_to_train_is_no_overflow() -> None:
    counted = steps(LossScale(SETTINGS))
    counted.finish(1.0, 1.0, applied=True)
    before = counted.counters()
    assert counted.finish(0.0, 1.0, applied=False).is_empty
    assert counted.counters() == before


def test_counters_come_back() -> None:
    counted = steps(LossScale(SETTINGS))
    for applied in (False, True):
        counted.finish(1.0, 1.0, applied=applied)
    again = steps(LossScale(SETTINGS))
    again.restore(counted.counters())
    assert again.counters() == counted.counters() == {"optimizer_steps": 1, "loss_scale": 4, "loss_scale_applied": 1}
    assert steps(None).counters() == {"optimizer_steps": 0}
    # A run in float16 may go on where one in another dtype ended.
    again.restore({"optimizer_steps": 7})
    assert again.steps == 7
