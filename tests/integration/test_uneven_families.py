"""Published depths that no pipeline divides, at tiny widths: log-probs, gradients and replay of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.learner_support.comparing import assert_same_replay, assert_same_step
from tests.integration.learner_support.families import make_family
from tests.integration.learner_support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.slow

DEPTHS = {
    "deepseek_v3": {"num_hidden_layers": 61, "first_k_dense_replace": 3},
    "glm4_moe": {"num_hidden_layers": 46, "first_k_dense_replace": 1},
}
"""Of DeepSeek-V3 and of GLM-4.5-Air: all layers, and those at the beginning that are dense."""
LAYOUTS = {
    ("deepseek_v3", "PP2"): (2, "pipeline=2:account_for_loss=true"),
    ("deepseek_v3", "PP2+VPP3"): (2, "pipeline=2:pipeline_layout=Et*10|(t*11|)*4t*7L"),
    ("deepseek_v3", "PP4"): (4, "pipeline=4:first_stage_layers=16"),
    ("deepseek_v3", "PP4, dense layers alone"): (4, "pipeline=4:pipeline_layout=Et*3|t*20|t*20|t*18L"),
    ("glm4_moe", "PP4"): (4, "pipeline=4:account_for_embedding=true:account_for_loss=true"),
    ("glm4_moe", "PP4, loss alone"): (4, "pipeline=4:pipeline_layout=Et*15|t*16|t*15|L"),
}
"""Ranks and settings. Columns of the experts are not shared here: `test_learner_layouts.py` has products."""


def runs(layout: str, family: str) -> tuple[str, str]:
    return f"train:model={family}:{layout}", f"matrix:model={family}:{layout}"


class Finished:
    """The results of one process and of each layout, run when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def checkpoint(self, family: str) -> Path:
        folder = self._folder / family
        return folder if folder.exists() else make_family(family, folder, **DEPTHS[family])

    def ranks(self, family: str, number: int, layout: str) -> Ranks:
        folder = self._folder / f"{family}-{layout}"
        if folder.exists():
            return Ranks(folder, number)
        return run_ranks(folder, self.checkpoint(family), number, *runs(layout, family))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("depths"))


@pytest.mark.parametrize(("family", "name"), LAYOUTS)
def test_weights_are_loaded_and_exported_bit_for_bit_and_step_like_one_process(
    finished: Finished, family: str, name: str
) -> None:
    number, layout = LAYOUTS[family, name]
    one, several = finished.ranks(family, 1, "expert=1"), finished.ranks(family, number, layout)
    (run, _), (reference, _) = runs(layout, family), runs("expert=1", family)
    assert_same_step(one, several, run, reference, finished.checkpoint(family))


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize(("family", "name"), LAYOUTS)
def test_replayed_log_probs_and_router_gradients_are_those_of_one_process(
    finished: Finished, family: str, name: str, mode: str
) -> None:
    number, layout = LAYOUTS[family, name]
    one, several = finished.ranks(family, 1, "expert=1"), finished.ranks(family, number, layout)
    (_, run), (_, reference) = runs(layout, family), runs("expert=1", family)
    assert_same_replay(one, several, run, reference, mode)
