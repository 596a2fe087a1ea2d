"""Files of NeMo-RL, SkyRL, prime-rl and AReaL in ours. Fixtures are written by hand in their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.fields import lookup
from moe_trm.errors import ConfigError
from moe_trm.tools.translate import Draft, from_areal, from_nemo_rl, from_prime_rl, from_skyrl
from moe_trm.tools.translate.foreign_setting import ForeignSetting
from moe_trm.tools.translate.nested import _READERS, _RULES
from moe_trm.tools.translate.tables import Tables, guarded, listed_keys
from moe_trm.tools.translate.values import direct

FRAMEWORKS = ("nemo-rl", "skyrl", "prime-rl", "areal")
_NEMO = """
defaults: base.yaml
grpo: {num_prompts_per_step: 64, use_leave_one_out_baseline: true}
policy:
  train_global_batch_size: 512
  megatron_cfg: {enabled: true, moe_router_dtype: fp64, optimizer: {lr: 3.0e-7}}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 3}
"""
_NEMO_BASE = """
grpo:
  {num_prompts_per_step: 8, num_generations_per_prompt: 32, async_grpo: {enabled: false, max_trajectory_age_steps: 1}}
loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true, positive_example_nll_weight: 0.1}
policy:
  model_name: a/model
  precision: bfloat16
  optimizer: {kwargs: {lr: 5.0e-6}}
  generation: {backend: vllm, max_new_tokens: '${policy.max_total_sequence_length}'}
  max_total_sequence_length: 4096
  tokenizer: {chat_template_kwargs: {enable_thinking: false}}
"""
_SKYRL = """
N=${N:-8}
python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m trainer.train_batch_size=64 \\
  trainer.policy_mini_batch_size=16 generator.n_samples_per_prompt=$N trainer.algorithm.use_kl_loss=false \\
  trainer.algorithm.eps_clip_high=0.28 trainer.brand_new=1 generator.inference_engine.backend=vllm
"""
_PRIME = """
max_steps = 20
[model]
name = "m"
[orchestrator]
group_size = 8
batch_size = 128
[[orchestrator.train.source]]
name = "a"
[[orchestrator.train.source]]
name = "b"
[trainer.optim]
lr = 3e-6
"""
_AREAL = """
gconfig: {n_samples: 4, max_new_tokens: 1024, greedy: false}
actor:
  path: m
  eps_clip: 0.4
  kl_ctl: 0.0
  temperature: '${gconfig.temperature}'
  optimizer: {lr: 1.0e-5, beta1: 0.9, beta2: 0.95}
rollout: {max_head_offpolicyness: 2, tokenizer_path: '${actor.path}'}
"""


def translated(tmp_path: Path, framework: str) -> Draft:
    name, text, translate = {
        "nemo-rl": ("run.yaml", _NEMO, from_nemo_rl),
        "skyrl": ("run.sh", _SKYRL, from_skyrl),
        "prime-rl": ("rl.toml", _PRIME, from_prime_rl),
        "areal": ("run.yaml", _AREAL, from_areal),
    }[framework]
    (tmp_path / "base.yaml").write_text(_NEMO_BASE)
    file = tmp_path / name
    file.write_text(text)
    return translate(file)


@pytest.mark.parametrize(
    ("framework", "values"),
    [
        (
            "nemo-rl",
            {
                "model.checkpoint": "a/model",
                "rollout.prompts_per_step": 64,
                "rollout.group_size": 32,
                "rollout.max_new_tokens": 4096,
                "rollout.engine": "vllm",
                "learner.minibatches": 4,
                "optimizer.lr": 3e-7,
                "loss.clip_high": 0.28,
                "loss.aggregation": "token-mean",
                "advantage.name": "???",
                "learner.backend": "megatron",
                "task.chat_template_kwargs": {"enable_thinking": False},
            },
        ),
        (
            "skyrl",
            {
                "learner.minibatches": 4,
                "rollout.group_size": 8,
                "loss.clip_high": 0.28,
                "optimizer.lr": 1e-6,
                "train.steps": "???",
                "kl.coef": None,
            },
        ),
        (
            "prime-rl",
            {
                "train.steps": 20,
                "optimizer.lr": 3e-6,
                "optimizer.betas": [0.9, 0.999],
                "loss.name": "???",
                "rollout.prompts_per_step": "???",
                "pipeline.mode": "???",
            },
        ),
        (
            "areal",
            {
                "rollout.group_size": 4,
                "loss.clip_low": 0.4,
                "loss.clip_high": 0.4,
                "optimizer.betas": [0.9, 0.95],
                "pipeline.mode": "???",
                "kl.coef": None,
            },
        ),
    ],
)
def test_values(tmp_path: Path, framework: str, values: dict[str, Any]) -> None:
    draft = translated(tmp_path, framework)
    assert {key: draft.values.get(key) for key in values} == values
    unknown_here = [key for key in draft.values if lookup(key) is None and not key.startswith("task.chat_template")]
    assert unknown_here == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_setting_is_unaccounted_for(tmp_path: Path, framework: str) -> None:
    draft = translated(tmp_path, framework)
    assert [key for key in draft.settings if not draft.accounted(key)] == []
    assert draft.unknown == ({"trainer.brand_new"} if framework == "skyrl" else set())


def test_what_changes_the_objective_is_to_do(tmp_path: Path) -> None:
    nemo = translated(tmp_path, "nemo-rl")
    assert {"loss_fn.positive_example_nll_weight", "grpo.use_leave_one_out_baseline"} <= set(nemo.to_do)
    assert "policy.megatron_cfg.enabled" not in nemo.to_do
    assert nemo.missing["policy.optimizer.kwargs.lr"] == "not read where policy.dtensor_cfg.enabled is off"
    prime = translated(tmp_path, "prime-rl")
    assert {"trainer.loss.type", "orchestrator.max_off_policy_steps"} <= set(prime.to_do), "their defaults"
    assert {"orchestrator.train.source.0.name", "orchestrator.train.source.1.name"} <= set(prime.to_do)


def test_a_base_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "alone.yaml"
    file.write_text(_NEMO)
    with pytest.raises(ConfigError, match="rest of the settings is not there"):
        from_nemo_rl(file)


@pytest.mark.parametrize("translate", [from_nemo_rl, from_areal])
def test_a_file_of_another_framework_is_refused(tmp_path: Path, translate: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\n")
    with pytest.raises(ConfigError, match="no configuration of"):
        translate(file)


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text("a = \n")
    with pytest.raises(ConfigError, match="cannot be read"):
        from_prime_rl(file)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_terms_of_the_objective_are_never_harmless(framework: str) -> None:
    tables = Tables.read(framework, _READERS, direct)
    read = {key for rule in (*tables.rules, *_RULES[framework]) for key in rule.reads}
    fates = {
        key: tables.fate(key, ForeignSetting(key, 0.37, "", "0.37"), {})
        for key in (listed.removesuffix(".*") for listed in listed_keys(framework))
        if key not in read
    }
    assert [key for key, fate in fates.items() if fate.kind == "unknown"] == []
    harmless = [
        key
        for key, fate in fates.items()
        if fate.kind == "harmless" and guarded(key) and not fate.reason.endswith(("is off", "critic here"))
    ]
    assert harmless == []
