"""The vision tower in the plan: its parameters, and the memory that it takes where it is frozen and where it trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from moe_trm.cli import main
from moe_trm.config.schema import LearnerConfig, RolloutConfig
from moe_trm.errors import CheckpointError
from moe_trm.tools.plan.cluster import Cluster, serving
from moe_trm.tools.plan.gpus import gpu_of
from moe_trm.tools.plan.memory import Load, deepspeed_memory
from moe_trm.tools.plan.parameters import model_of, vision_parameters
from tests.published_models import published_config
from tests.unit.tools.plan.published import hf_config

QWEN = hf_config("qwen3_30b_a3b")
SMALL = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 40,
         "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip


@pytest.mark.parametrize("sizes", [{"out_hidden_size": 2048}, SMALL])
def test_the_tower_has_the_parameters_of_transformers(sizes: dict[str, Any]) -> None:
    """The first is a release's: 27 layers, three levels."""
    config = Qwen3VLMoeVisionConfig(**sizes)
    with torch.device("meta"):
        tower = Qwen3VLMoeVisionModel(config)
    assert vision_parameters({"vision_config": config.to_dict()}) == sum(one.numel() for one in tower.parameters())


def test_a_tower_without_a_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)vision_config.*expected: depth") as caught:
        vision_parameters({"vision_config": {**Qwen3VLMoeVisionConfig().to_dict(), "depth": None}})
    assert caught.value.got == "no such key"


@pytest.mark.parametrize(("frozen", "each"), [(True, 2), (False, 2 + 4 + 12)])
def test_a_frozen_tower_is_weights_and_a_trained_one_all_of_its_state(frozen: bool, each: int) -> None:
    text = model_of(QWEN)
    learner = LearnerConfig(backend="deepspeed", dtype="bfloat16", freeze_vision=frozen)
    load = Load(4096, 4096, 1, True, replays=True, other_gb=0.0)
    _, alone = deepspeed_memory(text, QWEN, learner, load)
    _, pictured = deepspeed_memory(replace(text, vision=1000), QWEN, learner, load)
    assert pictured == {**alone, "vision tower": 1000 * each}


def test_every_gpu_of_a_server_has_the_tower_whole() -> None:
    text, machine = model_of(QWEN), Cluster(1, 8, gpu_of("h100"), 1)
    rollout = RolloutConfig.model_validate({"server": {"tensor_parallel": 2}})
    sizes = [serving(rollout, replace(text, vision=n), QWEN, machine, 8).bytes_per_gpu for n in (0, 1000)]
    assert sizes[1] - sizes[0] == 2000


def test_a_plan_prints_the_tower_and_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {key: value for key, value in published_config("qwen3_30b_a3b").items() if key != "architectures"}
    vision = Qwen3VLMoeVisionConfig(out_hidden_size=2048).to_dict()
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text, "vision_config": vision}
    names = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": number for number, name in enumerate(names)}
    (tmp_path / "config.json").write_text(json.dumps({**whole, **ids, "model_type": "qwen3_vl_moe"}))
    (tmp_path / "run.yaml").write_text(
        "model: {checkpoint: x}\ntask: {name: jsonl, prompts: x.jsonl, image_field: images, eval_size: 0}\n"
        "learner: {backend: deepspeed}\ntrain: {eval_every: 0}\n"
    )
    out = tmp_path / "plan.json"
    words = ["--hf-config", str(tmp_path / "config.json"), "--nodes", "2", "--gpu", "b200", "--json", str(out)]
    main(["plan", str(tmp_path / "run.yaml"), *words])
    printed = capsys.readouterr().out
    assert printed.startswith("The vision tower is in the memory of ranks and servers.")
    assert "vision tower" in printed.partition("memory of a learner rank")[2]
    assert json.loads(out.read_text())["parameters"]["vision"] == vision_parameters(whole)
