"""What an exact run refuses, and what it asks of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.sglang.environment import child_environment
from moe_trm.rollout.sglang.launch import launch_command
from tests.unit.rollout.test_server_precision import config as served

ON_A_CPU: dict[str, Any] = {"server": {"device": "cpu", "dtype": "float32"}, "top_p": 1}


def problems(**sections: Any) -> dict[str, str]:
    settings = {"model": {"checkpoint": "/none"}, "exact": True, "replay": {"mode": "R3"}, "rollout": ON_A_CPU}
    return {problem.key: str(problem) for problem in refusals(Config.model_validate(settings | sections))}


def test_one_rank_in_float32_can_be_exact_on_a_cpu() -> None:
    assert not problems()


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        (
            "rollout.server.dtype",
            {"rollout": ON_A_CPU | {"server": {"device": "cpu"}}, "learner": {"dtype": "bfloat16"}},
        ),
        ("learner.dtype", {"rollout": {"top_p": 1, "server": {"device": "cuda"}}}),
        ("learner.backend", {"learner": {"backend": "deepspeed"}}),
        ("learner.parallel.expert", {"learner": {"parallel": {"expert": 2}}}),
        ("learner.lora.rank", {"learner": {"lora": {"rank": 4}}}),
        ("rollout.engine", {"rollout": ON_A_CPU | {"engine": "bundle"}}),
        ("rollout.fake_quantization", {"rollout": ON_A_CPU | {"fake_quantization": "fp8_e4m3"}}),
        ("replay.mode", {"replay": {"mode": "none"}}),
        ("pipeline.mode", {"pipeline": {"mode": "one_step"}}),
        ("sampling_mask.mode", {"rollout": ON_A_CPU | {"top_p": 0.9}}),
    ],
)
def test_what_cannot_be_exact_is_refused(key: str, sections: dict[str, Any]) -> None:
    assert key in problems(**sections)
    assert key not in problems(exact=False, **sections)


def test_a_server_on_a_cpu_is_told_by_its_environment_and_one_on_cuda_by_a_flag(tmp_path: Path) -> None:
    assert child_environment({}, True, tmp_path, alone=True, dtype="float32", exact=True)["MOE_TRM_EXACT"] == "1"
    assert "MOE_TRM_EXACT" not in child_environment({}, True, tmp_path, alone=True, dtype="float32")
    on_cuda = served(tmp_path, device="cuda").model_copy(update={"exact": True})
    assert "--enable-deterministic-inference" in launch_command(Served.of(on_cuda), tmp_path, 7, "k.yaml")


def test_models_that_have_not_been_compared_are_refused(tmp_path: Path) -> None:
    exact = served(tmp_path).model_copy(update={"exact": True})
    with pytest.raises(ConfigError, match="Glm4MoeForCausalLM or Qwen3MoeForCausalLM"):
        check_layout(exact, "0.16.1", {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2})
