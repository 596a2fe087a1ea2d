"""The suite of every learner on one rank of a GPU: the same work, bounds and refusals as on the CPU.

Bounds of float32 hold where products are not rounded to TF32, which neither learner asks for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration import test_learner_conformance as suite
from tests.integration.learner_support.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALONE = {"backend=megatron:expert=2": "backend=megatron:expert=1"}
"""Experts that two ranks split are those of one rank here."""


class OnOneGpu:
    """Runs by their names in the suite, each done by torchrun when it is first asked for."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder, self._checkpoint = folder, checkpoint

    def __getitem__(self, run: str) -> Ranks:
        if not (self._folder / run).exists():
            name = next((run.replace(start, alone) for start, alone in ALONE.items() if run.startswith(start)), run)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            program = ["-m", "tests.integration.learner_support.conformance"]
            done = subprocess.run(
                [*torchrun, *program, str(self._checkpoint), str(self._folder), name],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{name}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            if name != run:
                (self._folder / run).symlink_to(self._folder / name)
        return Ranks(self._folder, 1)


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> OnOneGpu:
    return OnOneGpu(tmp_path_factory.mktemp("learners"), checkpoint)


checkpoint, exact = suite.checkpoint, suite.exact
test_weights = suite.test_weights_come_in_and_go_out_bit_for_bit
test_scores = suite.test_scores_are_those_of_transformers_in_float64
test_same_bits = suite.test_passes_at_the_same_weights_and_routes_are_bit_identical
test_first_step = suite.test_the_first_step_is_that_of_the_float64_gradient_of_the_sum
test_scores_of_families = suite.test_scores_of_other_families_are_those_of_transformers_in_float64
test_first_step_of_families = suite.test_the_first_step_of_other_families_is_that_of_the_float64_gradient
test_learners_agree = suite.test_learners_agree
test_proof = suite.test_replay_is_counted_and_proved
test_refusals = suite.test_what_must_be_refused_leaves_the_weights_alone
test_liars = suite.test_one_wrong_sample_of_many_is_named_and_a_router_that_moved_is_not_accused
test_resumed = suite.test_a_resumed_learner_repeats_the_next_step_bit_for_bit
test_groups = suite.test_parameter_groups_and_a_frozen_router
