"""The shipped configurations of large models, judged from the published config.json alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from moe_trm.config import resolve
from moe_trm.config.schema import Config
from moe_trm.tools.doctor.examine import without_weights
from tests.published_models import published_config

ROOT = Path(__file__).parents[4]
LARGE = [
    ("qwen3_30b_a3b", "qwen3_30b_a3b", 8),
    ("qwen3_30b_a3b_4_nodes", "qwen3_30b_a3b", 24),
    ("glm_4_5_air", "glm_4_5_air", 32),
    ("minimax_m2_4_nodes", "minimax_m2", 24),
]

HYBRID = [
    ("qwen3_next_80b_a3b", "qwen3_next_80b_a3b", 8),
    ("qwen3_next_80b_a3b_4_nodes", "qwen3_next_80b_a3b", 24),
    ("qwen3_5_35b_a3b", "qwen3_5_35b_a3b", 8),
    ("qwen3_5_35b_a3b_4_nodes", "qwen3_5_35b_a3b", 24),
]
INDEXER = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
RELEASES = {
    "Qwen3-Next-80B-A3B": (
        {**published_config("qwen3_next_80b_a3b")},
        {"deepspeed": "Qwen3NextForCausalLM accepted", "megatron": r"gated delta rule.*learner\.backend=deepspeed"},
    ),
    "Qwen3.5-35B-A3B": (
        {**published_config("qwen3_5_35b_a3b")},
        {"deepspeed": "Qwen3_5MoeForCausalLM accepted", "megatron": r"gated delta rule.*learner\.backend=deepspeed"},
    ),
    "MiniMax-M2": (
        {**published_config("minimax_m2")},
        dict.fromkeys(("deepspeed", "megatron"), "MiniMaxM2ForCausalLM accepted"),
    ),
    "DeepSeek-V3.2": (
        {**published_config("deepseek_v3"), "architectures": ["DeepseekV32ForCausalLM"], **INDEXER},
        {"deepspeed": "DeepseekV32ForCausalLM accepted", "megatron": r"sparse attention.*learner\.backend=deepspeed"},
    ),
    "GLM-5": (
        {**published_config("glm_4_7_flash"), "architectures": ["GlmMoeDsaForCausalLM"], **INDEXER},
        {"deepspeed": "GlmMoeDsaForCausalLM accepted", "megatron": r"sparse attention.*learner\.backend=deepspeed"},
    ),
}
"""What config.json says of a release as far as it is read, and what the doctor says of each learner."""


def config_of(name: str, model: str, tmp_path: Path, *overrides: str) -> Config:
    """A shipped configuration, its checkpoint a folder that has config.json alone."""
    shutil.copy(ROOT / "moe_trm" / "models" / "published" / f"{model}.json", tmp_path / "config.json")
    return resolve(ROOT / "configs" / f"{name}.yaml", [f"model.checkpoint={tmp_path}", *overrides]).config


@pytest.mark.parametrize(("name", "model", "ranks"), [*LARGE, *HYBRID])
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


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
@pytest.mark.parametrize("release", RELEASES)
def test_the_doctor_says_of_a_release_which_learner_trains_it(release: str, backend: str, tmp_path: Path) -> None:
    hf, says = RELEASES[release]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    rollout = {"engine": "bundle", "bundle": "recorded"}
    settings = {"model": {"checkpoint": str(tmp_path)}, "learner": {"backend": backend}, "rollout": rollout}
    layout, _ = without_weights(Config.model_validate(settings), 1)
    assert re.search(says[backend], f"{layout.says} {layout.fix}", re.DOTALL), layout
    assert layout.status == ("ok" if "accepted" in says[backend] else "fail")
