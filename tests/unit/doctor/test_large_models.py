"""The shipped configurations of large models, judged from the published config.json alone."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from moe_trm.config import resolve
from moe_trm.config.schema import Config
from moe_trm.doctor.examine import without_weights
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.models.hf_config import read_hf_config

ROOT = Path(__file__).parents[3]
LARGE = [
    ("qwen3_30b_a3b", "qwen3_30b_a3b", 8),
    ("qwen3_30b_a3b_4_nodes", "qwen3_30b_a3b", 24),
    ("glm_4_5_air", "glm_4_5_air", 32),
]


def config_of(name: str, model: str, tmp_path: Path, *overrides: str) -> Config:
    """A shipped configuration, its checkpoint a folder that has config.json alone."""
    shutil.copy(ROOT / "moe_trm" / "models" / "published" / f"{model}.json", tmp_path / "config.json")
    return resolve(ROOT / "configs" / f"{name}.yaml", [f"model.checkpoint={tmp_path}", *overrides]).config


@pytest.mark.parametrize(("name", "model", "ranks"), LARGE)
def test_the_layout_fits_the_model(name: str, model: str, ranks: int, tmp_path: Path) -> None:
    config = config_of(name, model, tmp_path)
    check_layout(config, version("megatron-core"), read_hf_config(tmp_path), world_size=ranks)


@pytest.mark.parametrize(("name", "model", "ranks"), LARGE)
def test_the_doctor_judges_it_without_weights(name: str, model: str, ranks: int, tmp_path: Path) -> None:
    layout, weights = without_weights(config_of(name, model, tmp_path), ranks)
    assert (layout.name, layout.status) == ("layout", "ok")
    assert f"{ranks} learner ranks" in layout.says
    assert (weights.name, weights.status) == ("weights", "fail")


def test_the_doctor_refuses_a_layout_without_weights(tmp_path: Path) -> None:
    config = config_of("qwen3_30b_a3b", "qwen3_30b_a3b", tmp_path, "learner.parallel.expert=7")
    layout, _ = without_weights(config, 7)
    assert layout.status == "fail"
    assert "128 experts" in layout.says
