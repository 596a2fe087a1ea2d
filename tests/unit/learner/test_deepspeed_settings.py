"""Settings that the DeepSpeed learner accepts, and those that it passes to DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from moe_trm.config import rules
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.deepspeed import settings
from moe_trm.learner.deepspeed.settings import check_installed, check_model, zero_config
from tests.unit.sections import sections_of

MOE = {"architectures": ["OlmoeForCausalLM"], "num_experts": 8}


def config(learner: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate(
        {"model": {"checkpoint": "m"}, "learner": {"backend": "deepspeed", **learner}, **sections}
    )


@pytest.mark.parametrize(
    ("learner", "sections", "key"),
    [
        *(({"parallel": {size: 2}}, {}, f"learner.parallel.{size}") for size in ("tensor", "context", "expert")),
        ({"parallel": {"pipeline": 2, "virtual_pipeline": 2}}, {}, "learner.parallel.virtual_pipeline"),
        *(
            ({"parallel": {"pipeline": 2, name: value}}, {}, f"learner.parallel.{name}")
            for name, value in (
                ("first_stage_layers", 1),
                ("last_stage_layers", 3),
                ("account_for_embedding", True),
                ("account_for_loss", True),
                ("pipeline_layout", "Et|tttL"),
            )
        ),
        ({"distributed_optimizer": False}, {}, "learner.distributed_optimizer"),
        ({"recompute": "selective"}, {}, "learner.recompute"),
        ({"dtype": "bfloat16", "deepspeed": {"zero_stage": 1}}, {}, "learner.deepspeed.zero_stage"),
        ({}, {"optimizer": {"extra": {"overlap_param_gather": True}}}, "optimizer.extra"),
    ],
)
def test_what_only_megatron_can_do_is_refused(learner: dict[str, Any], sections: dict[str, Any], key: str) -> None:
    refused = rules.refusals(config(learner, **sections))
    assert key in [problem.key for problem in refused]
    megatron = config({**learner, "backend": "megatron"}, **sections)
    assert not [problem for problem in rules.refusals(megatron) if "deepspeed" in str(problem)]


def test_settings_of_the_learner_that_is_not_used_are_told() -> None:
    told = rules.warnings(config({"distributed_optimizer": True}))
    assert any(text.startswith("learner.distributed_optimizer has no effect") for text in told)
    told = rules.warnings(config({"backend": "megatron", "deepspeed": {"zero_stage": 3}}))
    assert any(text.startswith("learner.deepspeed.zero_stage has no effect") for text in told)
    assert not rules.refusals(config({}))


def test_deepspeed_is_told_what_the_run_says() -> None:
    plain = zero_config(*sections_of(config({}, optimizer={"max_grad_norm": 0.5}), "learner", "optimizer"))
    assert plain["zero_optimization"] == {"stage": 2}
    assert plain["gradient_clipping"] == 0.5
    assert "bf16" not in plain
    half = zero_config(
        *sections_of(
            config({"dtype": "bfloat16", "deepspeed": {"zero_stage": 3}, "offload_optimizer": True}),
            "learner",
            "optimizer",
        )
    )
    assert half["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    # Gradients are summed in float32, and non-finite ones never applied.
    assert half["bf16"] == {"enabled": True, "check_grad_overflow": True}
    scaled = zero_config(*sections_of(config({"dtype": "float16"}), "learner", "optimizer"))
    # A fixed scale, which is ours to set before each step.
    assert scaled["fp16"] == {"enabled": True, "loss_scale": 1.0}
    for low in (half, scaled):
        assert low["data_types"] == {"grad_accum_dtype": "fp32"}
        assert low["communication_data_type"] == "fp32"


def test_models_whose_logits_are_changed_are_refused() -> None:
    check_model(config({}), MOE)
    check_model(config({}), {**MOE, "logits_scaling": 1.0, "final_logit_softcapping": None})
    with pytest.raises(CheckpointError, match="logits_scaling"):
        check_model(config({}), {**MOE, "logits_scaling": 8.0})


def test_replay_of_a_dense_model_is_refused() -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"]}
    check_model(config({}, replay={"mode": "none"}, probe={"every": 0}), dense)
    with pytest.raises(ConfigError, match="mixture of experts"):
        check_model(config({}), dense)


def test_a_machine_without_deepspeed_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"moe-trm\[deepspeed\]"):
        check_installed()
    check_model(config({}), MOE)


def test_checks_import_no_engine() -> None:
    program = (
        "import sys, moe_trm.learner.deepspeed.settings; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'deepspeed')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_packs_of_a_model_that_may_mix_them_are_refused() -> None:
    """A layer with a state, for instance, would carry one sequence into the next."""
    packed = config({}, batch={"layout": "packed"}, replay={"mode": "none"})
    other = {"architectures": ["JambaForCausalLM"], "num_experts": 8}
    with pytest.raises(ConfigError, match="kept apart"):
        check_model(packed, other)
    check_model(packed, MOE)
    check_model(config({}, replay={"mode": "none"}), other)
