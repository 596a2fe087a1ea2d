"""Replay on every parallel layout of two ranks: log-probs of each token and router gradients equal those of one process to 1e-5."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.matrix_support import SCENARIOS
from tests.integration.replay_support import run_world

LAYOUTS: dict[str, dict[str, int]] = {
    "EP2": {"expert_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "TP2xEP2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2+VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}
QUICK = ("TP2xEP2", "PP2+VPP2", "CP2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what one process computes."""
    path = tmp_path_factory.mktemp("matrix")
    found = run_world(SCENARIOS, path, 1)
    assert not any(any(reports) for reports in found.values()), found
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_layout_equals_one_process(name: str, folder: Path) -> None:
    found = run_world(SCENARIOS, folder, 2, **LAYOUTS[name])
    assert found.keys() == {scenario.__name__ for scenario in SCENARIOS}
    for scenario, reports in found.items():
        assert not any(reports), f"{name}, {scenario}:\n" + "\n".join(reports)
