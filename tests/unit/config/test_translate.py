"""Settings of verl and slime in ours: translated, listed and warned of.

Fixtures are written by hand in their formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.cli import main
from moe_trm.config import resolve
from moe_trm.config.fields import lookup
from moe_trm.config.translate import Draft, from_slime, from_verl, slime, verl
from moe_trm.errors import ConfigError

_VERL_SCRIPT = """#!/usr/bin/env bash
set -x
MODEL=models/qwen3-moe   # a comment
PROMPTS=64
budget=$((2048 * 2))
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \\
    data.train_files=$MODEL/train.jsonl \\
    data.train_batch_size=${PROMPTS} \\
    data.max_response_length=256 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.top_k=-1 \\
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True \\
    actor_rollout_ref.actor.router_replay.mode=R3 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget \\
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True \\
    algorithm.adv_estimator=rloo \\
    trainer.total_training_steps=30 $@
"""

_SLIME_SCRIPT = """pkill -9 ray
ray start --head --num-gpus 8
CKPT_ARGS=(
   --hf-checkpoint models/qwen3-moe
   # --load elsewhere
)
ROLLOUT_ARGS=(
   --prompt-data data/math.jsonl
   --apply-chat-template
   --rm-type deepscaler
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 512
   --global-batch-size 64
)
GRPO_ARGS=(
   --advantage-estimator gspo
   --eps-clip 3e-4
   --eps-clip-high=4e-4
   --use-tis --tis-clip 1.5
   --use-opsm
   --use-rollout-routing-replay
   --calculate-per-token-loss
   --adam-beta2 0.98
)
ray job submit -- python3 train.py --actor-num-nodes 2 ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]}
"""


def _verl(tmp_path: Path, *words: str) -> Draft:
    script = tmp_path / "run.sh"
    script.write_text(_VERL_SCRIPT)
    return from_verl(script, words)


def _slime(tmp_path: Path, *words: str) -> Draft:
    script = tmp_path / "run.sh"
    script.write_text(_SLIME_SCRIPT)
    return from_slime(script, words)


def test_a_verl_script_becomes_a_configuration_that_is_accepted(tmp_path: Path) -> None:
    draft = _verl(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(draft.yaml("from verl"))
    config = resolve(file).config
    assert draft.problems() == []
    assert (config.model.checkpoint, config.task.prompts) == ("models/qwen3-moe", "models/qwen3-moe/train.jsonl")
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.learner.minibatches) == (64, 8, 4)
    assert (config.replay.mode, config.loss.name, config.advantage.name) == ("R3", "gmpo", "rloo")
    assert config.rollout.top_k is None
    assert config.train.steps == 30


def test_what_verl_assumes_is_written_out_and_named(tmp_path: Path) -> None:
    draft = _verl(tmp_path)
    assert draft.values["optimizer.lr"] == 1e-6
    assert draft.origins["optimizer.lr"] == "actor_rollout_ref.actor.optim.lr (verl's default)"
    assert draft.values["optimizer.weight_decay"] == 0.01


def test_what_a_script_computes_or_we_lack_is_listed_never_guessed(tmp_path: Path) -> None:
    missing = _verl(tmp_path).missing
    assert missing["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"].startswith("the script computes it")
    assert "actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion" in missing
    assert not any("micro_batch_tokens" in key for key in _verl(tmp_path).values)


def test_later_words_win(tmp_path: Path) -> None:
    assert _verl(tmp_path, "actor_rollout_ref.rollout.n=4").values["rollout.group_size"] == 4


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"rollout_is": "token"}, [{"name": "token_tis", "thresholds": {"cap": 2.0}}]),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
            [{"name": "icepop", "thresholds": {"low": 0.5, "high": 5.0}}],
        ),
        (
            {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
            [
                {"name": "seq_tis", "thresholds": {"cap": 2.0}},
                {"name": "seq_mean_k1", "thresholds": {"low": 0.999, "high": 1.001}},
            ],
        ),
        (
            {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "2.0,0.1"},
            [
                {"name": "token_k1", "thresholds": {"low": 0.5, "high": 2.0}},
                {"name": "seq_max_k3", "thresholds": {"upper": 0.1}},
            ],
        ),
    ],
)
def test_verl_rollout_correction(settings: dict[str, object], rules: list[dict[str, Any]]) -> None:
    flat = {f"algorithm.rollout_correction.{key}": value for key, value in settings.items()}
    on_merged = [{**rule, "thresholds": {**rule["thresholds"], "ratio": "merged"}} for rule in rules]
    assert verl.translate(flat, Draft()).values["correction.rules"] == on_merged


def test_verl_bypass_reads_the_total_ratio() -> None:
    flat = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
    draft = verl.translate({f"algorithm.rollout_correction.{key}": value for key, value in flat.items()}, Draft())
    assert draft.values["correction.rules"] == [{"name": "seq_tis", "thresholds": {"cap": 2.0, "ratio": "total"}}]
    assert draft.values["loss.name"] == "reinforce"


def rejections(modes: str, thresholds: object) -> Draft:
    keys = ("rollout_rs", "rollout_rs_threshold")
    flat = {f"algorithm.rollout_correction.{key}": value for key, value in zip(keys, (modes, thresholds), strict=True)}
    return verl.translate(flat, Draft())


def test_one_threshold_may_serve_several_modes_and_a_mode_counts_once() -> None:
    rules = rejections("token_k2, seq_max_k3,token_k2", 0.5).values["correction.rules"]
    assert [(rule["name"], rule["thresholds"]) for rule in rules] == [
        ("token_k2", {"upper": 0.5, "ratio": "merged"}),
        ("seq_max_k3", {"upper": 0.5, "ratio": "merged"}),
    ]


@pytest.mark.parametrize(
    ("modes", "thresholds"),
    [
        ("token_k2", "0.1_0.5"),
        ("token_k1", "0_2"),
        ("token_k3", "-1"),
        ("token_k3", "x"),
        ("seq_max_k1", "2"),
        ("token_k2,token_k3,token_k1", "1,2"),
        ("token_k2", None),
    ],
)
def test_thresholds_that_do_not_fit_are_listed_never_guessed(modes: str, thresholds: object) -> None:
    draft = rejections(modes, thresholds)
    assert "algorithm.rollout_correction.rollout_rs" in draft.missing
    assert "correction.rules" not in draft.values


def test_the_mirrored_band_of_verl_is_kept_and_pointed_out() -> None:
    """verl's token_k1 0.5_5.0 keeps the ratio 0.3 and drops 4.0, and so does what it becomes."""
    draft = rejections("token_k1", "0.5_5.0")
    thresholds = {"low": 0.5, "high": 5.0, "ratio": "merged"}
    assert draft.values["correction.rules"] == [{"name": "token_k1", "thresholds": thresholds}]
    assert any("inverse ratio" in remark for remark in draft.remarks)
    assert not rejections("token_k1", 2).remarks


def test_a_slime_script_becomes_a_configuration_that_is_accepted(tmp_path: Path) -> None:
    draft = _slime(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(draft.yaml("from slime"))
    config = resolve(file).config
    assert draft.problems() == []
    assert (config.loss.name, config.loss.clip_low, config.loss.clip_high) == ("gspo", 3e-4, 4e-4)
    assert config.learner.minibatches == 4
    assert [rule.name for rule in config.correction.rules] == ["token_tis", "opsm"]
    assert (config.task.chat, config.task.reward, config.replay.mode) == (True, "math_verify", "R3")
    assert config.optimizer.betas == (0.9, 0.98)
    assert config.loss.aggregation == "token-mean"
    assert any("opsm rejects whole sequences" in remark for remark in draft.remarks)


def test_kl_to_the_reference() -> None:
    in_loss = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl+"}
    draft = verl.translate({f"actor_rollout_ref.actor.{key}": value for key, value in in_loss.items()}, Draft())
    assert (draft.values["kl.coef"], draft.values["kl.estimator"]) == (0.01, "k3+")
    in_reward = {"use_kl_in_reward": True, "kl_ctrl.type": "adaptive", "kl_ctrl.target_kl": 0.2, "kl_penalty": "mse"}
    draft = verl.translate({f"algorithm.{key}": value for key, value in in_reward.items()}, Draft())
    assert {key: value for key, value in draft.values.items() if key.startswith("kl.")} == {
        "kl.where": "reward",
        "kl.coef": 0.001,
        "kl.estimator": "k2",
        "kl.controller": "adaptive",
        "kl.target": 0.2,
    }
    draft = slime.translate({"use-kl-loss": [], "kl-loss-coef": ["0.02"], "use-unbiased-kl": []}, Draft())
    assert (draft.values["kl.coef"], draft.values["kl.estimator"]) == (0.02, "k3_is")


def test_evaluation_and_dynamic_sampling() -> None:
    flags = {
        "rollout-batch-size": ["32"],
        "over-sampling-batch-size": ["64"],
        "dynamic-sampling-filter-path": ["slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"],
        "eval-prompt-data": ["aime", "aime.jsonl", "math", "math.jsonl"],
        "n-samples-per-eval-prompt": ["16"],
        "partial-rollout": [],
    }
    values = slime.translate(flags, Draft()).values
    assert values["task.eval_sets"] == {"aime": "aime.jsonl", "math": "math.jsonl"}
    assert (values["eval.samples"], values["batch.zero_variance"], values["batch.refill_limit"]) == (16, "drop", 2.0)
    assert (values["pipeline.mode"], values["pipeline.partial"]) == ("async", "interrupt")


def test_words_of_other_programs_are_not_settings(tmp_path: Path) -> None:
    draft = _slime(tmp_path)
    assert "--head" not in draft.missing
    assert "--num-gpus" not in draft.missing
    assert "--actor-num-nodes" in draft.missing


def test_a_command_line_wins_over_the_script(tmp_path: Path) -> None:
    assert _slime(tmp_path, "--lr", "3e-6").values["optimizer.lr"] == 3e-6


@pytest.mark.parametrize("framework", ["verl", "slime"])
def test_every_setting_that_can_be_written_exists(framework: str, tmp_path: Path) -> None:
    draft = {"verl": _verl, "slime": _slime}[framework](tmp_path)
    targets = set(draft.values)
    targets |= {key for key, _ in slime._NUMBERS.values()} | set(slime._TEXTS.values())
    for put in verl._DIRECT.values():
        draft = Draft()
        put(draft, 1, "any")
        targets |= set(draft.values)
    assert [key for key in sorted(targets) if lookup(key) is None] == []


def test_the_command_prints_the_file_and_tells_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(_SLIME_SCRIPT)
    assert main(["config", "from-slime", str(script), "--mystery", "1"]) == 0
    printed = capsys.readouterr()
    assert 'checkpoint: "models/qwen3-moe"  # --hf-checkpoint' in printed.out
    assert "no equivalent: --mystery" in printed.err


def test_an_unreadable_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launch script cannot be read"):
        from_slime(tmp_path / "none.sh")


def test_slimes_precision_is_ours() -> None:
    words = "--fp16 --initial-loss-scale 4096 --sglang-dtype float16 --sglang-quantization fp8 --transformer-impl local"
    values = from_slime(None, words.split()).values
    assert values["learner.dtype"] == values["rollout.server.dtype"] == "float16"
    assert values["learner.loss_scale.initial"] == 4096
    assert (values["rollout.quantization"], values["learner.transformer_engine"]) == ("fp8", "off")
    eight = from_slime(None, ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"])
    assert (eight.values["learner.dtype"], eight.values["learner.fp8"]) == ("bfloat16", "blockwise")
    assert not [miss for miss in eight.problems() if "fp8" in str(miss)]
