"""An update that trains nothing or is refused leaves nothing behind, and a checkpoint holds all that updates change.

On two real ranks; see `learner_support/steps.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.learner_support.ranks import run_ranks
from tests.integration.learner_support.tiny import make_checkpoint

MEGATRON, WHOLE = "backend=megatron:expert=2", "backend=megatron:expert=1:dtype=bfloat16"
ZERO_1, ZERO_2 = "backend=deepspeed:stage=1", "backend=deepspeed:stage=2:dtype=bfloat16"
FLOAT16 = "backend=deepspeed:stage=2:dtype=float16:scale=16"
ZERO_3, OFFLOAD = "backend=deepspeed:stage=3:dtype=bfloat16", "backend=deepspeed:stage=2:offload=1:dtype=bfloat16"
MORE = [pytest.param(run, marks=pytest.mark.slow) for run in (WHOLE, ZERO_1, FLOAT16, ZERO_3, OFFLOAD)]

NO_STATE = re.compile(
    "|".join(
        (
            # How many passes DeepSpeed has made, for reports and a schedule that are not used.
            r"_engine\.(global_samples|global_steps|micro_steps|tput_timer\..*)$",
            r"_graph_task_id$|\.applied_pre_backward_ref_cnt$|__n_available_params$",
            # Its views of the moments, for readers of another form of checkpoints: a first step makes those there are.
            r"\._hp_mapping\.optim_fragment\[",
            # Numbers that it gives to parameters of one engine after the other of a process.
            r"\.ds_id$|_flat_id\[",
        )
    )
)


class Finished:
    """Runs by name, each group done once, when one of it is first asked for."""

    GROUPS = ((MEGATRON, ZERO_2), (WHOLE, ZERO_1, FLOAT16, ZERO_3, OFFLOAD))

    def __init__(self, folder: Path) -> None:
        self._folder, self._checkpoint, self._begun = folder, make_checkpoint(folder / "main"), set[str]()

    def __getitem__(self, run: str) -> list[dict[str, Any]]:
        """What each rank found."""
        if run not in self._begun:
            group = next(group for group in self.GROUPS if run in group)
            self._begun.update(group)
            script = Path(__file__).parent / "learner_support" / "steps.py"
            run_ranks(self._folder, self._checkpoint, 2, *group, script=script)
        return [json.loads((self._folder / run / f"facts-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("run", [MEGATRON, ZERO_2, *MORE])
def test_an_empty_update_makes_no_step(finished: Finished, run: str) -> None:
    for facts in finished[run]:
        assert facts["empty"] == [True, False, 0.0]


@pytest.mark.parametrize("run", [MEGATRON, ZERO_2, *MORE])
def test_what_was_refused_is_in_no_later_gradient(finished: Finished, run: str) -> None:
    for facts in finished[run]:
        assert facts["stopped"]
        norm, undisturbed = facts["norms"]
        assert norm == undisturbed > 0


@pytest.mark.parametrize("run", [MEGATRON, ZERO_2, *MORE])
def test_all_that_updates_change_is_in_the_checkpoint(finished: Finished, run: str) -> None:
    """Of everything that can be reached from a learner, whether this test knows it or not."""
    for facts in finished[run]:
        assert not {path: both for path, both in facts["differences"].items() if not NO_STATE.search(path)}
        before, after = (counters["optimizer_steps"] for counters in facts["counters"])
        assert (before, after) == (2, 3)
        cosine, resumed = facts["cosines"]
        assert cosine == resumed
        assert (cosine is None) == ("stage=3" in run)
