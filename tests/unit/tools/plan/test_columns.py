"""Columns that the planner expects, against those of the real plan of a step."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.packed_rows import rows_of
from moe_trm.batch.plan import plan_metrics, plan_step
from moe_trm.config.schema import Config
from moe_trm.tools.plan.columns import columns_per_token

LENGTHS = [int(length) for length in np.clip(np.random.default_rng(0).lognormal(4, 0.7, 96), 9, 500)]


def config(**settings: object) -> Config:
    learner = {key: value for key, value in settings.items() if key != "layout"}
    return Config.model_validate(
        {"model": {"checkpoint": "model"}, "batch": {"layout": settings.get("layout", "padded")}, "learner": learner}
    )


def planned(given: Config, world: int) -> float:
    learner = given.learner
    packed = given.batch.layout == "packed"
    plan = plan_step(
        rows_of(LENGTHS),
        seed=0,
        step=1,
        minibatches=learner.minibatches,
        data_size=world,
        micro_batch_rows=learner.micro_batch_rows,
        micro_batch_tokens=learner.micro_batch_tokens,
        packed=packed,
    )
    return 1 / (1 - plan_metrics(plan, packed=packed)["batch/padding_fraction"])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [{"micro_batch_rows": 8}, {"micro_batch_tokens": 1024}, {"micro_batch_tokens": 600, "minibatches": 3}, {}],
)
def test_padding_is_that_of_the_real_plan(settings: dict[str, object], world: int) -> None:
    """Which rows meet in a minibatch is chance, and little else."""
    given = config(**settings)
    assert columns_per_token(given.learner, given.batch, LENGTHS, world) == pytest.approx(
        planned(given, world), rel=0.04
    )
    packed = config(**settings, layout="packed")
    assert columns_per_token(packed.learner, packed.batch, LENGTHS, world) == 1.0


def test_ranks_that_share_sequences_fill_packs_up() -> None:
    given = config(layout="packed", parallel={"context": 2})
    assert columns_per_token(given.learner, given.batch, [5, 8, 3], 2) == (8 + 8 + 4) / 16
