"""Megatron's learner on a device that refuses operands of another, on real ranks: the figures of a CPU.

Its passes, router, dispatcher, gradient buffers, optimizer and collectives are Megatron's own. See
`learner_support/device.py`.

Not here: pipeline stages, whose sends ask torch for a backend of the device.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_trm.models.tiny.families import make_family
from tests.integration.learner_support.ranks import run_ranks

SCRIPT = Path(__file__).parent / "learner_support" / "device.py"
RUNS = ("expert=2:distributed=1", "tensor=2:expert=2:layout=packed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The figures of all runs on both devices."""
    folder = tmp_path_factory.mktemp("devices")
    checkpoint = make_family("qwen3_moe", folder / "model", num_hidden_layers=3, num_experts=8)
    run_ranks(
        folder, checkpoint, 2, *(f"device={device}:{run}" for run in RUNS for device in ("cpu", "other")), script=SCRIPT
    )
    return folder


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_has_the_values_of_a_cpu(folder: Path, run: str, rank: int) -> None:
    expected, found = (
        json.loads((folder / f"device={device}:{run}" / f"figures-{rank}.json").read_text())
        for device in ("cpu", "other")
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
