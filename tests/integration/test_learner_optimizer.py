"""Micro-batches under a token budget, parameter groups, frozen routers and schedules on the real learner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import make_checkpoint

WHOLE, SMALL, TINY = (
    "budget:distributed=0:tokens=4096",
    "budget:distributed=0:tokens=128",
    "budget:distributed=0:tokens=64",
)
TRAIN = "train:distributed=0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("optimizer") / "main")


@pytest.fixture(scope="module")
def one(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(tmp_path_factory.mktemp("one"), checkpoint, 1, WHOLE, SMALL, TINY, TRAIN)


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(
        tmp_path_factory.mktemp("two"), checkpoint, 2, SMALL, SMALL.replace("budget", "budget:expert=2"), "groups"
    )


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    error = torch.cat([(got[k] - expected[k]).flatten() for k in expected]).double()
    return float(error.norm() / torch.cat([value.flatten() for value in expected.values()]).double().norm())


@pytest.mark.parametrize(
    ("ranks", "run", "tokens"),
    [
        ("one", SMALL, 128),
        ("one", TINY, 64),
        ("two", SMALL, 128),
        ("two", SMALL.replace("budget", "budget:expert=2"), 128),
    ],
)
def test_gradients_under_a_token_budget_equal_those_of_one_batch(
    request: pytest.FixtureRequest, one: Ranks, ranks: str, run: str, tokens: int
) -> None:
    """Gradient accumulation and sharing between data- and expert-parallel ranks change nothing but rounding."""
    finished: Ranks = request.getfixturevalue(ranks)
    assert len(one.saved(WHOLE, "shapes")["shapes"]) == 1
    shapes = [finished.saved(run, "shapes", rank)["shapes"] for rank in range(finished.num_ranks)]
    assert len({len(own) for own in shapes}) == 1
    assert len(shapes[0]) > 1
    assert all(int(rows * columns) <= tokens for own in shapes for rows, columns in own)
    assert relative_error(finished.union(run, "gradients"), one.union(WHOLE, "gradients")) < 1e-6


def test_parameter_groups_and_a_frozen_router(one: Ranks, two: Ranks) -> None:
    before, plain, grouped = (
        one.exported(TRAIN, "before"),
        one.exported(TRAIN, "after"),
        two.exported("groups", "grouped"),
    )
    for name, start in before.items():
        moved, usual = grouped[name] - start, plain[name] - start
        if name.endswith("mlp.gate.weight") or "embed_tokens" in name:
            assert not moved.any(), name
            assert usual.any(), name
        else:
            expected = 0.5 * usual if "lm_head" in name else usual
            assert float((moved - expected).norm() / expected.norm()) < 1e-4, name


def test_weight_decay_by_group_and_never_on_norms_unless_asked(two: Ranks) -> None:
    before, after = two.exported("groups", "before"), two.exported("groups", "decayed")
    for name, start in before.items():
        decay = 0.3 if "q_norm" in name else 0.0 if "o_proj" in name or start.dim() == 1 else 0.1
        torch.testing.assert_close(after[name], start * (1 - decay), msg=name)


def test_the_schedule_goes_down_with_each_applied_step(two: Ranks) -> None:
    facts = two.saved("groups", "facts")
    assert [float(facts[f"lr.{i}"]) for i in range(4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
