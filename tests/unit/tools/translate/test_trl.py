"""TRL's GRPO configuration in ours. Fixtures are written by hand in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_trm.cli import main
from moe_trm.config.fields import lookup
from moe_trm.errors import ConfigError
from moe_trm.tools.translate import from_trl
from moe_trm.tools.translate.draft import Draft
from tests.unit.tools.translate.test_verl import accepted

WHOLE: dict[str, Any] = {
    "model_name_or_path": "a/model",
    "dataset_name": "a/set",
    "dataset_train_split": "part",
    "learning_rate": 2e-6,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 8,
    "num_processes": 8,
    "num_generations": 16,
    "num_iterations": 2,
    "max_steps": 800,
    "max_completion_length": 1024,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
    "bf16": True,
    "report_to": ["wandb"],
    "output_dir": "out",
}


def of(folder: Path, *words: str, **settings: Any) -> Draft:
    file = folder / "grpo.yaml"
    file.write_text(yaml.safe_dump(WHOLE | settings))
    return from_trl(file, words)


def test_a_whole_configuration(tmp_path: Path) -> None:
    draft = of(tmp_path)
    accepted(draft.values)
    assert not draft.to_do
    expected = {
        "model.checkpoint": "a/model",
        "task.prompts": "hf:a/set:part",
        "rollout.prompts_per_step": 16,  # 4 x 8 processes x 8 = 256 samples in groups of 16
        "rollout.group_size": 16,
        "learner.minibatches": 4,
        "learner.epochs": 2,
        "train.steps": 100,  # 800 optimizer steps, 8 of each batch
        "rollout.max_new_tokens": 1024,
        "rollout.colocate": True,
        "optimizer.lr": 2e-6,
        "optimizer.schedule": "linear",
        "loss.name": "ppo_clip",
        "loss.aggregation": "token-mean",
        "advantage.name": "grpo",
        "learner.dtype": "bfloat16",
        "observe.sinks": ["wandb"],
    }
    assert {key: draft.values[key] for key in expected} == expected
    assert draft.values["correction.rules"] == [
        {"name": "seq_mis", "thresholds": {"low": 0.0, "high": 3.0, "ratio": "merged"}}
    ]
    assert [key for key in draft.values if lookup(key) is None] == []
    assert all(draft.accounted(key) for key in draft.settings)


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"loss_type": "grpo"}, {"loss.aggregation": "seq-mean-token-mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"advantage.name": "dr_grpo"}),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}, {"loss.clip_high": 4e-4}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss.parameters": {"cap_is_absolute": True}}),
        ({"loss_type": "sapo"}, {"loss.parameters": {"tau_positive": 1.0, "tau_negative": 1.05}}),
        ({"delta": 4.0}, {"loss.dual_clip": 4.0}),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl.coef": 0.04, "kl.estimator": "k3"}),
        ({"beta": 0.04}, {"kl.estimator": "k3_is", "kl.ratio": "update"}),
        ({"beta": 0.04, "use_bias_correction_kl": True}, {"kl.estimator": "k3_is", "kl.ratio": "update"}),
        ({"mask_truncated_completions": True}, {"batch.overlong": "mask"}),
        ({"fp16": True, "bf16": False}, {"learner.dtype": "float16"}),
        ({"gradient_checkpointing": True}, {"learner.recompute": "full"}),
        ({"gradient_checkpointing": False}, {"learner.recompute": "none"}),
        (
            {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]},
            {"learner.lora.rank": 8, "learner.lora.alpha": 32, "learner.lora.targets": ["q_proj"]},
        ),
        ({"top_p": 0.9}, {"rollout.top_p": 0.9, "sampling_mask.mode": "off"}),
        # 256 samples of 4 x 8 processes: 8 optimizer steps' rows, 2 of each step
        ({"generation_batch_size": 256, "steps_per_generation": None}, {"learner.minibatches": 4}),
        ({"generation_batch_size": 256, "num_processes": None}, {"rollout.prompts_per_step": 16}),
        ({"vllm_importance_sampling_correction": False}, {"correction.rules": []}),
    ],
)
def test_choices(tmp_path: Path, settings: dict[str, Any], values: dict[str, Any]) -> None:
    draft = of(tmp_path, **settings)
    assert {key: draft.values[key] for key in values} == values
    assert not draft.to_do
    accepted(draft.values)
    assert all(draft.accounted(key) for key in draft.settings)


@pytest.mark.parametrize(("settings", "key"), [({"fp16": True, "bf16": False}, "fp16"), ({}, "bf16")])
def test_the_setting_that_decides_the_precision_is_named(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    assert of(tmp_path, **settings).origins["learner.dtype"].startswith(key)


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("token_truncate", {"name": "token_tis", "thresholds": {"cap": 2.0, "floor": 0.0, "ratio": "merged"}}),
        ("token_mask", {"name": "token_mis", "thresholds": {"low": 0.0, "high": 2.0, "ratio": "merged"}}),
        ("sequence_truncate", {"name": "seq_tis", "thresholds": {"cap": 2.0, "floor": 0.0, "ratio": "merged"}}),
    ],
)
def test_corrections_of_the_engine(tmp_path: Path, mode: str, rule: dict[str, Any]) -> None:
    draft = of(tmp_path, vllm_importance_sampling_mode=mode, vllm_importance_sampling_cap=2.0)
    assert draft.values["correction.rules"] == [rule]
    accepted(draft.values)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"reward_funcs": ["accuracy_reward"]}, "reward_funcs"),
        ({"loss_type": "bnpo"}, "loss_type"),
        ({"scale_rewards": "batch"}, "scale_rewards"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"optim": "adafactor"}, "optim"),
        ({"warmup_ratio": 0.1}, "warmup_ratio"),
        ({"max_steps": 801}, "max_steps"),
        ({"max_steps": -1}, "num_train_epochs"),
        ({"num_processes": None}, "per_device_train_batch_size"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"use_peft": True, "lora_dropout": 0.0}, "lora_target_modules"),
        ({"use_peft": True, "lora_target_modules": ["q_proj"]}, "lora_dropout"),
        ({"beta": 0.04, "importance_sampling_level": "sequence"}, "use_bias_correction_kl"),
    ],
)
def test_what_somebody_has_to_decide(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    assert set(of(tmp_path, **settings).to_do) == {key}


def test_a_correction_without_an_upper_bound_is_open(tmp_path: Path) -> None:
    draft = of(tmp_path, vllm_importance_sampling_clip_max=None)
    assert draft.values["correction.rules"] == "???"
    assert "no upper bound" in draft.to_do["vllm_importance_sampling_clip_max"]


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (
            {"generation_batch_size": 256, "steps_per_generation": None, "num_processes": None},
            "generation_batch_size",
            "depend on --num_processes",
        ),
        ({"generation_batch_size": 250}, "num_generations", "250 samples do not split into groups of 16"),
        ({"gradient_accumulation_steps": 3}, "steps_per_generation", "8 do not split into steps of 3"),
    ],
)
def test_batches_that_do_not_split_are_to_do(tmp_path: Path, settings: dict[str, Any], key: str, words: str) -> None:
    assert words in of(tmp_path, **settings).to_do[key]


def test_arguments_win_and_lists_are_read(tmp_path: Path) -> None:
    assert of(tmp_path, "--num_generations", "8", "--temperature=0.7").values["rollout.group_size"] == 8
    read = of(tmp_path, "--report_to", "wandb", "tensorboard", "--bf16").settings
    assert (read["report_to"].value, read["bf16"].value) == (["wandb", "tensorboard"], True)
    script = tmp_path / "run.sh"
    script.write_text("N=4\naccelerate launch grpo.py --num_generations $((N*2)) --model_name_or_path m --bf16\n")
    draft = from_trl(script)
    assert (draft.values["rollout.group_size"], draft.values["model.checkpoint"]) == (8, "m")


def test_another_configuration_of_trl_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: m\npacking: true\n")
    with pytest.raises(ConfigError, match="no GRPO configuration"):
        from_trl(file)


def test_the_command_prints_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump(WHOLE))
    assert main(["config", "from-trl", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "\nrollout:\n" in printed
    assert "  group_size: 16  # num_generations" in printed
