"""slime's and miles's flags in ours. Fixtures are written by hand in their words."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config.fields import lookup
from tests.unit.tools.translate.reading import of_slime
from tests.unit.tools.translate.test_verl import accepted


def rules(line: str) -> list[dict[str, Any]]:
    draft = of_slime(line)
    accepted(draft.values)
    found: list[dict[str, Any]] = draft.values["correction.rules"]
    return found


def test_the_lower_bound_of_tis_is_our_floor() -> None:
    thresholds = {"cap": 1.5, "floor": 0.5, "ratio": "merged"}
    assert rules("--use-tis --tis-clip 1.5 --tis-clip-low 0.5") == [{"name": "token_tis", "thresholds": thresholds}]
    assert rules("--use-tis") == [{"name": "token_tis", "thresholds": {"cap": 2.0, "ratio": "merged"}}]


def test_opsm_reads_the_update() -> None:
    assert rules("--use-opsm") == [{"name": "opsm", "thresholds": {"delta": 1e-4, "ratio": "update"}}]
    assert rules("--use-opsm --opsm-delta 0.1 --use-rollout-logprobs")[0]["thresholds"]["ratio"] == "total"


@pytest.mark.parametrize("package", ["slime.backends.megatron_utils.loss", "miles.backends.training_utils.loss_hub"])
def test_icepop_stays_icepop(package: str) -> None:
    found = rules(f"--use-tis --tis-clip 5 --tis-clip-low 0.5 --custom-tis-function-path {package}.icepop_function")
    assert found == [{"name": "icepop", "thresholds": {"low": 0.5, "high": 5.0, "ratio": "merged"}}]


@pytest.mark.parametrize("switch", ["--use-tis", "--get-mismatch-metrics"])
def test_a_custom_correction_is_not_replaced(switch: str) -> None:
    draft = of_slime(f"{switch} --custom-tis-function-path helper.mis.compute_weights --custom-config-path mis.yaml")
    assert draft.values["correction.rules"] == "???"
    assert "helper.mis.compute_weights" in draft.to_do["custom-tis-function-path"]
    assert "custom-config-path" in draft.to_do


def test_the_unbiased_kl_weighs_by_the_update() -> None:
    line = "--use-kl-loss --kl-loss-coef 0.02 --kl-loss-type low_var_kl"
    assert of_slime(line).values["kl.estimator"] == "k3"
    values = of_slime(f"{line} --use-unbiased-kl").values
    assert (values["kl.coef"], values["kl.estimator"], values["kl.ratio"]) == (0.02, "k3_is", "update")
    accepted(values)
    assert of_slime(f"{line} --use-unbiased-kl --use-rollout-logprobs").values["kl.ratio"] == "total"
    other = of_slime("--use-kl-loss --use-unbiased-kl --kl-loss-type k1")
    assert other.values["kl.estimator"] == "???"


@pytest.mark.parametrize(
    ("line", "name", "low"),
    [
        ("--advantage-estimator grpo", "ppo_clip", 0.2),
        ("--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4", "gspo", 3e-4),
        ("--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0", "cispo", None),
        ("--eps-clip 0.1 --eps-clip-c 3", "ppo_clip", 0.1),
    ],
)
def test_losses(line: str, name: str, low: float | None) -> None:
    values = of_slime(line).values
    assert (values["loss.name"], values.get("loss.clip_low")) == (name, low)
    assert values["loss.aggregation"] == "seq-mean-token-mean"
    assert of_slime(f"{line} --calculate-per-token-loss").values["loss.aggregation"] == "token-mean"
    accepted(values)


def test_a_lone_evaluation_set_keeps_its_name() -> None:
    values = of_slime("--prompt-data x.jsonl --eval-prompt-data aime aime.jsonl").values
    assert values["task.eval_sets"] == {"aime": "aime.jsonl"}
    assert "task.eval_prompts" not in values


def test_a_bound_that_a_loss_lacks_needs_a_decision() -> None:
    draft = of_slime("--advantage-estimator gspo --eps-clip-c 3")
    assert "eps-clip-c" in draft.to_do
    accepted(draft.values)


def test_without_a_critic_no_estimator_is_put_in_its_place() -> None:
    draft = of_slime("--advantage-estimator ppo")
    assert draft.values["advantage.name"] == draft.values["loss.name"] == "???"


@pytest.mark.parametrize(
    ("line", "mode"),
    [("", "none"), ("--use-routing-replay", "R2"), ("--use-rollout-routing-replay --use-routing-replay", "R3")],
)
def test_replay(line: str, mode: str) -> None:
    assert of_slime(line).values["replay.mode"] == mode


def test_defaults_of_slime_and_megatron_are_written_out() -> None:
    values = of_slime("").values
    expected = {
        "optimizer.lr": 1e-6,
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.schedule": "linear",
        "optimizer.warmup_steps": 0,
        "learner.dtype": "bfloat16",
        "checkpoint.every": 0,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["train.steps"] == "???"


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--custom-rm-path my.reward", "task.reward"),
        ("--rm-type dapo", "task.reward"),
        ("--custom-generate-function-path my.generate", "rollout.function"),
        ("--partial-rollout", "pipeline.mode"),
        ("--dynamic-sampling-filter-path my.filter", "batch.zero_variance"),
        ("--lr-warmup-fraction 0.1", "optimizer.warmup_steps"),
        ("--lr-decay-style inverse-square-root", "optimizer.schedule"),
        ("--rollout-batch-size 3 --n-samples-per-prompt 3 --global-batch-size 4", "learner.minibatches"),
        ("--rollout-temperature hot", "rollout.temperature"),
    ],
)
def test_what_slime_does_otherwise_stays_open(flag: str, ours: str) -> None:
    draft = of_slime(flag)
    assert draft.values[ours] == "???"
    assert draft.to_do


def test_evaluation_batches_and_sampling() -> None:
    values = of_slime(
        "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64 --num-rollout 100 --colocate "
        "--eval-prompt-data aime aime.jsonl math math.jsonl --n-samples-per-eval-prompt 16 --eval-top-p 0.7 "
        "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    ).values
    assert values["task.eval_sets"] == {"aime": "aime.jsonl", "math": "math.jsonl"}
    assert (values["eval.samples"], values["eval.top_p"], values["batch.zero_variance"]) == (16, 0.7, "drop")
    assert (values["learner.minibatches"], values["train.steps"], values["rollout.colocate"]) == (4, 100, True)
    assert [key for key in values if lookup(key) is None and not key.startswith("task.eval_sets")] == []


def test_precision() -> None:
    half = of_slime("--fp16 --initial-loss-scale 4096 --sglang-dtype float16 --transformer-impl local").values
    assert half["learner.dtype"] == half["rollout.server.dtype"] == "float16"
    assert (half["learner.loss_scale.initial"], half["learner.transformer_engine"]) == (4096, "off")
    assert of_slime("--bf16 --fp8-format e4m3 --fp8-recipe blockwise").values["learner.fp8"] == "blockwise"


@pytest.mark.parametrize("framework", ["slime", "miles"])
@pytest.mark.parametrize("flag", ["--mystery 1", "--actor-num-nodes 2", "--sglang-x 0.7", "--use-opd"])
def test_no_flag_is_lost(framework: str, flag: str) -> None:
    draft = of_slime(flag, framework)
    name = flag.split()[0]
    assert draft.accounted(name[2:])
    assert name in draft.yaml("x")


def test_uneven_pipelines() -> None:
    draft = of_slime(
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1 --decoder-first-pipeline-num-layers "
        "16 --decoder-last-pipeline-num-layers 15"
    )
    sizes = {"pipeline": 4, "virtual_pipeline": 1, "first_stage_layers": 16, "last_stage_layers": 15}
    assert {name: draft.values[f"learner.parallel.{name}"] for name in sizes} == sizes
    assert "learner.parallel.account_for_loss" not in draft.values
    assert of_slime("--account-for-loss-in-pipeline-split").values["learner.parallel.account_for_loss"] is True
    layout = of_slime("--pipeline-model-parallel-layout Et*23|t*23L").values["learner.parallel.pipeline_layout"]
    assert layout == "Et*23|t*23L"


def test_adapters() -> None:
    draft = of_slime("--lora-rank 16 --lora-alpha 32 --target-modules all-linear")
    assert (draft.values["learner.lora.rank"], draft.values["learner.lora.alpha"]) == (16, 32)
    assert "learner.lora.targets" in draft.to_do["target-modules"]


@pytest.mark.parametrize(
    ("flag", "layout"), [("", "packed"), ("--qkv-format thd", "packed"), ("--qkv-format bshd", "padded")]
)
def test_packs_are_packs(flag: str, layout: str) -> None:
    draft = of_slime(f"--use-dynamic-batch-size --max-tokens-per-gpu 4096 {flag}")
    assert (draft.values["batch.layout"], draft.values["learner.micro_batch_tokens"]) == (layout, 4096)


def test_an_unknown_layout_needs_a_decision() -> None:
    draft = of_slime("--qkv-format sbhd")
    assert draft.values["batch.layout"] == "???"
    assert "qkv-format" in draft.to_do


def test_state_on_the_host_is_one_setting() -> None:
    """What belongs to it needs no decision; alone, it has no counterpart."""
    draft = of_slime(
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
        "--optimizer-offload-fraction 1.0"
    )
    accepted(draft.values)
    assert draft.values["learner.offload_optimizer"] is True
    named = ("optimizer", "precision", "offload")
    assert not [key for key in draft.to_do if any(word in key for word in named)]
    assert "use-precision-aware-optimizer" in of_slime("--use-precision-aware-optimizer").to_do


@pytest.mark.parametrize(("flag", "tokens"), [("", 16384), ("--context-parallel-size 2", 32768)])
def test_ranks_that_share_sequences_have_one_budget_together(flag: str, tokens: int) -> None:
    draft = of_slime(f"--use-dynamic-batch-size --max-tokens-per-gpu 16384 {flag}")
    assert draft.values["learner.micro_batch_tokens"] == tokens


@pytest.mark.parametrize(
    ("line", "coefs", "remarks"),
    [
        ("--moe-aux-loss-coeff 0.01", (0.01, None), 1),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss", (0.01, None), 0),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none --moe-z-loss-coeff 1e-3", (None, 1e-3), 0),
        ("--moe-aux-loss-coeff 0 --moe-router-load-balancing-type aux_loss", (None, None), 0),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type global_aux_loss", ("???", "???"), 0),
    ],
)
def test_losses_of_routers_are_ours(line: str, coefs: tuple[Any, Any], remarks: int) -> None:
    draft = of_slime(line)
    assert tuple(draft.values.get(f"loss.router_{name}_coef") for name in ("aux", "z")) == coefs
    assert sum("micro-batch" in remark and "aux_loss" in remark for remark in draft.remarks) == remarks
    assert [key for key in draft.settings if not draft.accounted(key)] == []
