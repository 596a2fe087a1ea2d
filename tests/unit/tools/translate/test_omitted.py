"""A setting that the input leaves out has the framework's own default, or is open; never ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.tools import translate
from moe_trm.tools.translate import Draft, slime, verl
from moe_trm.tools.translate.foreign_setting import ForeignSetting
from moe_trm.tools.translate.nested import _READERS
from moe_trm.tools.translate.tables import OBJECTIVE, Tables
from moe_trm.tools.translate.values import direct
from tests.unit.tools.translate.reading import of_slime, of_verl

LEAST = {
    "verl": ("run.yaml", "actor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo}\n"),
    "slime": ("run.sh", "python3 train.py --hf-checkpoint m --rollout-batch-size 8\n"),
    "miles": ("run.sh", "python3 train.py --hf-checkpoint m --rollout-batch-size 8\n"),
    "trl": ("run.yaml", "model_name_or_path: m\nbeta: 0.1\nuse_vllm: true\n"),
    "nemo-rl": ("run.yaml", "grpo: {max_num_steps: 4}\nloss_fn: {ratio_clip_min: 0.2}\npolicy: {model_name: m}\n"),
    "skyrl": ("run.sh", "python -m x trainer.policy.model.path=m generator.max_turns=1\n"),
    "prime-rl": ("run.toml", "[model]\nname = 'm'\n[orchestrator]\nbatch_size = 8\n"),
    "areal": ("run.yaml", "gconfig: {greedy: false}\nactor: {path: m}\n"),
}
"""What makes a file one of its framework, and little more."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "verl": {"rollout.max_new_tokens": 512, "learner.dtype": "bfloat16", "learner.minibatches": 4, "learner.epochs": 1},
    "slime": {"rollout.max_new_tokens": "???", "learner.minibatches": "???", "learner.epochs": 1},
    "miles": {"rollout.max_new_tokens": "???", "learner.minibatches": "???", "learner.epochs": 1},
    "trl": {
        "rollout.max_new_tokens": 512,
        "rollout.colocate": True,
        "kl.estimator": "k3_is",
        "kl.ratio": "update",
        "learner.dtype": "bfloat16",
        "replay.mode": "none",
    },
    "nemo-rl": {"optimizer.betas": "???", "optimizer.warmup_steps": "???", "learner.dtype": "???", "train.steps": 4},
    "skyrl": {"learner.dtype": "bfloat16", "learner.minibatches": 4, "optimizer.schedule": "constant"},
    "prime-rl": {
        "rollout.max_new_tokens": "???",
        "train.steps": "???",
        "learner.minibatches": 1,
        "learner.dtype": "bfloat16",
        "optimizer.warmup_steps": 0,
        "loss.aggregation": "token-mean",
    },
    "areal": {
        "learner.dtype": "bfloat16",
        "learner.minibatches": 4,
        "rollout.prompts_per_step": "???",
        "loss.name": "???",
        "loss.parameters": "???",
    },
}


def of(folder: Path, framework: str, more: str = "") -> Draft:
    """The least file of a framework with further lines, translated."""
    name, text = LEAST[framework]
    (folder / name).write_text(text + more)
    draft: Draft = getattr(translate, f"from_{framework.replace('-', '_')}")(folder / name)
    return draft


@pytest.mark.parametrize("framework", LEAST)
def test_no_default_of_ours_decides_what_is_learned(tmp_path: Path, framework: str) -> None:
    draft = of(tmp_path, framework)
    assert [ours for ours in OBJECTIVE if draft.values.get(ours) is None] == []
    expected = DEFAULTS[framework]
    assert {ours: draft.values.get(ours) for ours in expected} == expected
    nothing = [ours for ours in OBJECTIVE if f"`{ours}`" in draft.to_do]
    assert all(draft.values[ours] == "???" for ours in nothing)
    assert all(f"to do: `{ours}`: the input says nothing" in draft.summary() for ours in nothing)


def test_keys_of_public_launch_files_are_known() -> None:
    """Keys of files that changed from June to August 2026 and are in no list of definitions (`public_files`)."""
    lines = Path(__file__).with_name("cases").joinpath("public_keys.txt").read_text().split("\n")[:-1]
    assert len(lines) == 650
    tables = {"verl": verl.TABLES, "slime": slime.TABLES, "miles": slime.TABLES}
    tables |= {name: Tables.read(name, _READERS, direct) for name in ("nemo-rl", "skyrl", "prime-rl", "areal")}
    unknown = []
    for framework, key in map(str.split, lines):
        value: Any = ("0.37",) if framework in ("slime", "miles") else 0.37
        if tables[framework].fate(key, ForeignSetting(key, value, "", "0.37"), {}).kind == "unknown":
            unknown.append((framework, key))
    assert unknown == []


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        ('type = "constant"', {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}),
        (
            'type = "linear"',
            {"optimizer.schedule": "wsd", "optimizer.warmup_steps": 10, "optimizer.final_steps": 10},
        ),
        ('type = "linear"\ndecay_steps = 0', {"optimizer.schedule": "constant", "optimizer.warmup_steps": 10}),
        (
            'type = "cosine"\nwarmup_steps = 3\nmin_lr = 1e-7',
            {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 3, "optimizer.min_lr": 1e-7},
        ),
    ],
)
def test_schedules_of_prime_rl(tmp_path: Path, lines: str, values: dict[str, Any]) -> None:
    draft = of(tmp_path, "prime-rl", f"[trainer.scheduler]\n{lines}\n")
    assert {ours: draft.values.get(ours) for ours in values} == values
    assert not any(key.startswith("trainer.scheduler") for key in draft.to_do)


def test_an_empty_table_of_prime_rl_switches_its_feature_on(tmp_path: Path) -> None:
    for name in ("lora", "quantization"):
        assert f"trainer.model.{name}" in of(tmp_path, "prime-rl", f"[trainer.model.{name}]\n").to_do
    assert "trainer.model.ac" not in of(tmp_path, "prime-rl", "[trainer.model.ac]\n").to_do


@pytest.mark.parametrize(
    ("words", "tensor"),
    [("tensor_model_parallel_size=4", 4), ("expert_tensor_parallel_size=2", 2)],
)
def test_experts_of_skyrl_are_split_as_the_rest_unless_it_says_otherwise(
    tmp_path: Path, words: str, tensor: int
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{LEAST['skyrl'][1].strip()} trainer.policy.megatron_config.{words}\n")
    assert translate.from_skyrl(script).values["learner.parallel.expert_tensor"] == tensor


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"strategy": "fsdp", "fsdp_config.dtype": "float32"}, "float32"),
        ({"strategy": "megatron", "fsdp_config.dtype": "float32"}, "bfloat16"),
        ({"strategy": "megatron", "megatron.dtype": "float16", "fsdp_config.dtype": "bfloat16"}, "float16"),
        ({"strategy": "fsdp", "fsdp_config.dtype": "int8"}, "???"),
        ({"fsdp_config.mixed_precision.param_dtype": "fp32"}, "???"),
        ({"fsdp_config.model_dtype": "fp32"}, "bfloat16"),
    ],
)
def test_the_arithmetic_of_verl_is_the_one_of_its_learner(settings: dict[str, str], dtype: str) -> None:
    draft = of_verl({f"actor_rollout_ref.actor.{key}": value for key, value in settings.items()})
    assert draft.values["learner.dtype"] == dtype


@pytest.mark.parametrize(
    ("framework", "words", "mode"),
    [
        ("slime", "--rollout-top-p 0.9", None),
        ("slime", "--rollout-top-k 20", "off"),
        ("miles", "--rollout-top-p 0.9", "off"),
        ("skyrl", "generator.sampling_params.top_p=0.95", "off"),
        ("skyrl", "generator.sampling_params.top_p=1.0", None),
    ],
)
def test_masks_are_those_that_the_learner_scores_with(
    tmp_path: Path, framework: str, words: str, mode: str | None
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{LEAST[framework][1].strip()} {words}\n")
    draft = getattr(translate, f"from_{framework}")(script)
    assert draft.values.get("sampling_mask.mode") == mode


def test_masks_of_areal_and_the_bias_of_its_routers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("gconfig: {top_p: 0.9}\nactor: {path: m, megatron: {moe_router_bias_update_rate: 0.001}}\n")
    draft = translate.from_areal(file)
    assert draft.values["sampling_mask.mode"] == "off"
    assert "actor.megatron.moe_router_bias_update_rate" in draft.to_do


@pytest.mark.parametrize(
    "draft",
    [of_slime("--max-weight-staleness 2"), of_verl({"trainer.v1.trainer_mode": "separate_async"})],
)
def test_a_run_that_samples_ahead_is_not_left_synchronous(draft: Draft) -> None:
    assert draft.values["pipeline.mode"] == "???"
