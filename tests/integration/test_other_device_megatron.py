"""Megatron's learner on a device that refuses operands of another, on real ranks: the figures of a CPU.

Its passes, router, dispatcher, gradient buffers, optimizer, collectives and sends between pipeline stages are
Megatron's own. See `learner_support/device.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_trm.models.tiny.families import make_family
from tests.integration.learner_support.ranks import run_ranks

SCRIPT = Path(__file__).parent / "learner_support" / "device.py"
RUNS = ("expert=2:distributed=1", "tensor=2:expert=2:layout=packed")
PIPELINES = ("pipeline=2:pipeline_layout=Et*2|tL", "pipeline=2:pipeline_layout=Et|t|t|L")
"""Stages that send in batches, and virtual ones, which overlap."""


@pytest.fixture(scope="module", params=[RUNS, pytest.param(PIPELINES, marks=pytest.mark.slow)], ids=["ranks", "stages"])
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Path]:
    """Folders with the figures of runs on both devices, a CPU's first."""
    folder = tmp_path_factory.mktemp("devices")
    checkpoint = make_family("qwen3_moe", folder / "model", num_hidden_layers=3, num_experts=8)
    names = [f"device={device}:{run}" for run in request.param for device in ("cpu", "other")]
    run_ranks(folder, checkpoint, 2, *names, script=SCRIPT)
    return [folder / name for name in names]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_has_the_values_of_a_cpu(runs: list[Path], number: int, rank: int) -> None:
    expected, found = (
        json.loads((folder / f"figures-{rank}.json").read_text()) for folder in runs[2 * number : 2 * number + 2]
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
