"""Runs that this learner accepts, and DeepSpeed's own configuration for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from moe_trm.config.choices import replay_mode
from moe_trm.config.schema import Config, LearnerConfig, OptimizerConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.dense import check_routes
from moe_trm.learner.lora.targets import check_lora
from moe_trm.models.hf_config import num_experts
from moe_trm.models.registry import FAMILIES, keeps_packs_apart, refuse_unsupported

_PACKED = [
    family.architecture
    for family in FAMILIES.values()
    if keeps_packs_apart({"architectures": [family.architecture], "num_hidden_layers": 1, **family.tiny})
]
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Refuse models whose log-probs would be wrong, and combinations that cannot be trained.

    Args:
        config: the whole run.
        hf_config: config.json of the checkpoint.

    Raises:
        CheckpointError: logits that are more than `W h`, or a model that no learner trains rightly now.
        ConfigError: replay of a dense model, or packs of a model that is not known to keep them apart.
    """
    where = f"{config.model.checkpoint}/config.json"
    refuse_unsupported(hf_config, where)
    for key in _LOGIT_CHANGES:
        if hf_config.get(key) not in (None, 1, 1.0):
            raise CheckpointError(
                "the model changes its logits after the output layer",
                where=f"{where}, {key}",
                got=hf_config[key],
                expected="logits that are hidden states times output weight",
                fix="Use another model: log-probs would be wrong.",
            )
    if config.batch.layout == "packed" and not keeps_packs_apart(hf_config):
        raise ConfigError(
            "packed sequences are not known to be kept apart by every layer of this model",
            where="batch.layout",
            got=f"packed with {hf_config.get('architectures')}",
            expected=f"padded, or one of {', '.join(_PACKED)}",
            fix="Set batch.layout=padded.",
        )
    replay = replay_mode(config.learner, config.replay, config.pipeline, config.correction)
    architecture, is_moe = str(hf_config.get("architectures")), bool(num_experts(hf_config))
    check_routes(replay, config.loss, config.probe.every, architecture, is_moe=is_moe)
    check_lora(config.learner, hf_config)


def check_installed() -> None:
    """Refuse a machine without DeepSpeed. Raises `ConfigError`."""
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "DeepSpeed is not installed",
            where="learner.backend",
            got="deepspeed",
            expected="the package deepspeed",
            fix="pip install 'moe-trm[deepspeed]', or set learner.backend=megatron.",
        )


def zero_config(learner: LearnerConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: float32 gradients and norms, our own loss scale, manually counted micro-batches."""
    settings = learner.deepspeed
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if learner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    low: dict[str, Any] = {}
    if learner.dtype == "bfloat16":
        low = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    elif learner.dtype == "float16":
        low = {"fp16": {"enabled": True, "loss_scale": 1.0}}
    if low:
        low |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return {
        # Read by its own data loader and schedule only, neither of which is used.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31,
        "gradient_clipping": optimizer.max_grad_norm,
        "zero_optimization": zero,
        # torch's AdamW also where the state is offloaded: DeepSpeed's own compiles at run time.
        "zero_force_ds_cpu_optimizer": False,
        **low,
    }
