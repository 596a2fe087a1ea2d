"""Minibatches of whole groups, for losses that compare the samples of a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.batch.plan import compares_groups, plan_step
from moe_trm.config import resolve
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.losses.oapl import _log_mean_exp
from moe_trm.types import MiniBatch, TrainRow
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, plan
from tests.unit.sections import sections_of

SETTINGS = "model: {checkpoint: none}\n"


def rows_of(sizes: list[int]) -> list[TrainRow]:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    rewards = np.random.default_rng(0).random(len(groups))
    return [
        TrainRow(make_record(sample_id=i, group_id=group, num_sampled=3 + i % 5, reward=float(rewards[i])))
        for i, group in enumerate(groups)
    ]


def minibatches(rows: list[TrainRow], number: int, *, whole_groups: bool) -> list[list[TrainRow]]:
    plan = plan_step(
        rows, seed=0, step=1, minibatches=number, data_size=2, micro_batch_rows=3, whole_groups=whole_groups
    )

    def of(shares: tuple[MiniBatch, ...]) -> list[TrainRow]:
        return [row for share in shares for micro in share.micro_batches for row in micro.rows]

    return [of(shares) for shares in zip(*plan, strict=True)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 4))
def test_no_group_is_cut_and_no_row_is_lost(sizes: list[int], number: int) -> None:
    rows = rows_of(sizes)
    parts = minibatches(rows, number, whole_groups=True)
    assert sorted(row.record.sample_id for part in parts for row in part) == list(range(len(rows)))
    groups = [{row.record.group_id for row in part} for part in parts]
    assert sum(len(part) for part in groups) == len(sizes)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def value_error(parts: list[list[TrainRow]], rows: list[TrainRow]) -> float:
    """RMS over rows of oapl's V* in its minibatch against that of the whole group."""

    def values(part: list[TrainRow]) -> dict[int, float]:
        rewards = torch.tensor([row.record.reward for row in part], dtype=torch.float64)
        found = _log_mean_exp(rewards, torch.tensor([row.record.group_id for row in part]))
        return dict(zip((row.record.sample_id for row in part), found.tolist(), strict=True))

    truth, got = values(rows), {key: value for part in parts for key, value in values(part).items()}
    return float(np.sqrt(np.mean([(truth[key] - got[key]) ** 2 for key in truth])))


def test_the_value_of_a_prompt_is_that_of_all_its_samples() -> None:
    rows = rows_of([4] * 16)
    assert value_error(minibatches(rows, 4, whole_groups=False), rows) > 0.1
    assert value_error(minibatches(rows, 4, whole_groups=True), rows) < 1e-12


def test_losses_that_compare_a_prompts_samples_ask_for_it(tmp_path: Path) -> None:
    def of(loss: str) -> bool:
        return compares_groups(
            *sections_of(
                Config.model_validate({"model": {"checkpoint": "none"}, "loss": {"name": loss}}),
                "loss",
                "rollout",
                "agent",
            )
        )

    assert of("oapl")
    assert not of("ppo_clip")
    own = tmp_path / "mine.py"
    own.write_text(
        "from moe_trm.losses.loss import loss\n"
        "@loss(aggregation='token-mean', scope='batch', needs=['groups'])\n"
        "def mine(inputs, log_ratio): ...\n",
        encoding="utf-8",
    )
    assert of(f"{own}:mine")


def test_fewer_groups_than_minibatches_are_refused_at_launch(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(SETTINGS, encoding="utf-8")
    few = ["rollout.prompts_per_step=2", "learner.minibatches=4"]
    resolve(file, few)
    with pytest.raises(ConfigError, match="compares the samples of a prompt"):
        resolve(file, [*few, "loss.name=oapl"])
    resolve(file, ["rollout.prompts_per_step=4", "learner.minibatches=4", "loss.name=oapl"])


@pytest.mark.parametrize(("loss", "whole"), [("oapl", True), ("ppo_clip", False)])
def test_the_controller_plans_them(loss: str, whole: bool) -> None:
    settings = Config.model_validate({**CONFIG.model_dump(), "loss": {"name": loss}})
    shares = plan(FakeEngine(), settings)
    groups = [
        {row.record.group_id for mini in minis for micro in mini.micro_batches for row in micro.rows}
        for minis in zip(*(share.mini_batches for share in shares), strict=True)
    ]
    assert (sum(map(len, groups)) == len(set.union(*groups))) == whole
