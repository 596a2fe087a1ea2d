"""Settings that do not go with pictures are refused, each with its key."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config.rules import refusals, warnings
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.learner.model_rules import check_trained

PLAIN: dict[str, Any] = {
    "model": {"checkpoint": "x"},
    "task": {"name": "jsonl", "prompts": "x.jsonl", "image_field": "images", "eval_size": 0},
    "learner": {"backend": "deepspeed"},
    "train": {"eval_every": 0},
}


def keys(**changes: dict[str, Any]) -> set[str]:
    sections = {name: {**PLAIN.get(name, {}), **values} for name, values in changes.items()}
    return {problem.key for problem in refusals(Config(**{**PLAIN, **sections}))}


def test_pictures_go_with_deepspeed_and_sglang() -> None:
    assert keys() == set()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("task.name", {"task": {"name": "gsm8k"}}),
        ("learner.backend", {"learner": {"backend": "megatron"}}),
        ("learner.deepspeed.zero_stage", {"learner": {"deepspeed": {"zero_stage": 3}}}),
        ("learner.lora.rank", {"learner": {"lora": {"rank": 4}}}),
        ("batch.layout", {"batch": {"layout": "packed"}}),
        ("rollout.engine", {"rollout": {"engine": "vllm"}}),
        ("rollout.function", {"rollout": {"function": "a:b"}}),
        ("rollout.agent", {"rollout": {"agent": "a:b"}}),
        ("rollout.fake_quantization", {"rollout": {"fake_quantization": "fp8_e4m3"}}),
        ("rollout.server.random_weights", {"rollout": {"server": {"random_weights": True}}}),
        ("sync.method", {"sync": {"method": "distributed"}}),
        ("sync.prove_every", {"sync": {"prove_every": 0}}),
        ("kl.teacher", {"kl": {"coef": 0.1, "teacher": ["http://127.0.0.1:9"]}}),
        ("probe.bank", {"probe": {"bank": 4}}),
    ],
)
def test_the_rest_is_refused(key: str, changes: dict[str, Any]) -> None:
    assert key in keys(**changes)


def test_a_vision_tower_trains_on_one_rank() -> None:
    """On two, gradients of one that has none would be added to other weights (seen with DeepSpeed 0.19.8)."""
    config = Config.model_validate({**PLAIN, "learner": {"backend": "deepspeed", "freeze_vision": False}})
    hf = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    check_trained(config, hf, "config.json", megatron="", world_size=1)
    with pytest.raises(ConfigError, match=r"(?s)freeze_vision.*false on 2 ranks"):
        check_trained(config, hf, "config.json", megatron="", world_size=2)


def test_a_frozen_vision_tower_without_pictures_is_told() -> None:
    config = Config(model={"checkpoint": "x"}, learner={"freeze_vision": False})  # type: ignore[arg-type]
    assert any("learner.freeze_vision has no effect" in line for line in warnings(config))
