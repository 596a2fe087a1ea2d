"""The families of transformers shared by two ranks: weights, log-probs, gradients and replay of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.learner_support.comparing import assert_same_replay, assert_same_step
from tests.integration.learner_support.families import FAMILIES, make_family
from tests.integration.learner_support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.slow

LAYOUTS = {"TP2xEP2": "tensor=2:expert=2", "CP2": "context=2", "PP2": "pipeline=2"}
SHARED_EXPERTS = {"TP2xETP2": "tensor=2:expert_tensor=2"}
WHOLE_HEADS, WHOLE_EXPERTS = ("olmoe", "minimax_m2"), ("gpt_oss",)
"""Families whose attention, or whose experts, cannot be shared by tensor-parallel ranks."""


def runs(layout: str, family: str) -> tuple[str, str]:
    return f"train:model={family}:{layout}", f"matrix:model={family}:{layout}"


def layouts(family: str) -> list[str]:
    offered = LAYOUTS if family in WHOLE_EXPERTS else LAYOUTS | SHARED_EXPERTS
    return [layout for layout in offered.values() if not (family in WHOLE_HEADS and "tensor" in layout)]


CASES = [(family, layout) for family in FAMILIES for layout in layouts(family)]


class Finished:
    """The results of one and two ranks for each family of four layers, run when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, family: str) -> tuple[Ranks, Ranks, Path]:
        checkpoint, one, two = (self._folder / family / name for name in (family, "one", "two"))
        if not checkpoint.exists():
            make_family(family, checkpoint, num_hidden_layers=4)
            run_ranks(one, checkpoint, 1, *runs("expert=1", family))
            run_ranks(two, checkpoint, 2, *(run for x in layouts(family) for run in runs(x, family)))
        return Ranks(one, 1), Ranks(two, 2), checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_weights_are_loaded_and_exported_bit_for_bit_and_step_like_one_process(
    finished: Finished, family: str, layout: str
) -> None:
    one, two, checkpoint = finished[family]
    (run, _), (reference, _) = runs(layout, family), runs("expert=1", family)
    assert_same_step(one, two, run, reference, checkpoint)


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_replayed_log_probs_and_router_gradients_are_those_of_one_process(
    finished: Finished, family: str, layout: str, mode: str
) -> None:
    one, two, _ = finished[family]
    (_, run), (_, reference) = runs(layout, family), runs("expert=1", family)
    assert_same_replay(one, two, run, reference, mode)
