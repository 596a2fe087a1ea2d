"""A float16 learner on two real ranks: loss scale, skipped steps, resumption, and gradients as those of float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import make_checkpoint

START = 2**20
"""A scale under which gradients overflow float16."""
FLOAT16 = f"dtype=float16:scale={START}:growth=2"
MEGATRON = f"backend=megatron:expert=2:{FLOAT16}"
ZERO_1, ZERO_2, ZERO_3 = (f"backend=deepspeed:stage={stage}:{FLOAT16}" for stage in (1, 2, 3))
EXACT, COARSE = (f"backend=megatron:expert=2:dtype={dtype}" for dtype in ("float32", "bfloat16"))
TENSOR = f"backend=megatron:tensor=2:expert_tensor=2:{FLOAT16}"
PIPELINE = f"backend=megatron:pipeline=2:model=four:{FLOAT16}"
EXACT_PIPELINE = "backend=megatron:pipeline=2:model=four:dtype=float32"
MORE = [pytest.param(run, marks=pytest.mark.slow) for run in (TENSOR, PIPELINE, ZERO_1, ZERO_3)]
EVERY = [MEGATRON, ZERO_2, *MORE]

SCRIPT = Path(__file__).parent / "learner_support" / "float16.py"


class Finished:
    """Runs by name, each group done once, when one of it is first asked for."""

    GROUPS = ((MEGATRON, EXACT, COARSE), (TENSOR, PIPELINE, EXACT_PIPELINE), (ZERO_2,), (ZERO_1, ZERO_3))

    def __init__(self, folder: Path) -> None:
        self._folder, self._checkpoint, self._begun = folder, make_checkpoint(folder / "main"), set[str]()
        make_checkpoint(folder / "four", num_hidden_layers=4)

    def __getitem__(self, run: str) -> Ranks:
        if run not in self._begun:
            group = next(group for group in self.GROUPS if run in group)
            self._begun.update(group)
            run_ranks(self._folder, self._checkpoint, 2, *group, script=SCRIPT)
        return Ranks(self._folder, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("float16"))


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("run", EVERY)
def test_overflow_skips_the_step_and_halves_the_scale(finished: Finished, run: str) -> None:
    """A skipped step changes no weight and does not advance the schedule, on no rank."""
    ranks = finished[run]
    assert same_bits(ranks.exported(run, "refused"), ranks.exported(run, "before"))
    assert not same_bits(ranks.exported(run, "applied"), ranks.exported(run, "before"))
    for rank in range(2):
        facts = {name: float(value) for name, value in ranks.saved(run, "facts", rank).items()}
        tries = int(facts["tries"])
        assert tries > 1
        assert [facts[f"tried.{i}.applied"] for i in range(tries)] == [0.0] * (tries - 1) + [1.0]
        assert [facts[f"tried.{i}.scale"] for i in range(tries)] == [START / 2**i for i in range(tries)]
        assert {facts[f"tried.{i}.lr"] for i in range(tries)} == {0.5}
        assert facts["more.0.lr"] == 0.375


@pytest.mark.parametrize("run", EVERY)
def test_the_scale_is_in_the_checkpoint(finished: Finished, run: str) -> None:
    """Also how long it has been in use: the second applied step doubles it, before and after the resumption."""
    ranks = finished[run]
    facts = {name: float(value) for name, value in ranks.saved(run, "facts").items()}
    assert facts["more.1.scale"] == 2 * facts["more.0.scale"]
    for name in ("0.scale", "1.scale", "0.lr", "1.lr"):
        assert facts[f"resumed.{name}"] == facts[f"more.{name}"]
    assert same_bits(ranks.exported(run, "resumed"), ranks.exported(run, "second"))


@pytest.mark.parametrize("run", EVERY)
def test_the_first_update_sees_what_was_scored(finished: Finished, run: str) -> None:
    for rank in range(2):
        assert same_bits(finished[run].saved(run, "seen", rank), finished[run].saved(run, "scores", rank))


@pytest.mark.parametrize("run", EVERY)
def test_gradients_are_those_of_float32_but_for_rounding(finished: Finished, run: str) -> None:
    """Adam's first step with eps = 1 shows the gradient's size, so a scale left in it would show."""
    assert relative_error(finished, run) < 0.01


def test_float16_rounds_finer_than_bfloat16(finished: Finished) -> None:
    assert relative_error(finished, MEGATRON) < relative_error(finished, COARSE) / 3


def relative_error(finished: Finished, run: str) -> float:
    """Of the first applied step, against float32's. What the model holds is rounded before and after it."""
    exact = EXACT_PIPELINE if "model=four" in run else EXACT
    requested, got = (
        torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)]).double()
        for before, after in (
            (finished[one].exported(one, "before"), finished[one].exported(one, "applied")) for one in (exact, run)
        )
    )
    return float((got - requested).norm() / requested.norm())
