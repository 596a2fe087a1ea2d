"""verl's settings in ours. Fixtures are written by hand in its words."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config.fields import lookup
from moe_trm.config.schema import Config
from moe_trm.step.recipe import recipe
from tests.unit.tools.translate.reading import ACTOR, ROLLOUT, of_verl

CORRECTION = "algorithm.rollout_correction"
MODE = f"{ACTOR}.policy_loss.loss_mode"
BY_ROWS = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}


def accepted(values: dict[str, Any]) -> Config:
    """The configuration of these settings, as far as its mathematics goes; a launch takes it."""
    tree: dict[str, Any] = {"model": {"checkpoint": "m"}}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if section in ("loss", "correction", "kl"):
            tree.setdefault(section, {})[name] = value
    config = Config.model_validate(tree)
    recipe(config)
    return config


@pytest.mark.parametrize("place", [ACTOR, f"{ACTOR}.megatron", f"{ACTOR}.veomni"])
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replay_is_found_wherever_it_stands(place: str, mode: str) -> None:
    key = f"{place}.router_replay.mode"
    others = {f"{ACTOR}.router_replay.mode": "disabled"} if place != ACTOR else {}
    draft = of_verl({**others, key: mode, f"{ROLLOUT}.enable_rollout_routing_replay": mode == "R3"})
    assert draft.values["replay.mode"] == mode


def test_a_learner_and_an_advantage_that_are_named() -> None:
    draft = of_verl(
        {
            f"{ACTOR}.strategy": "megatron",
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": False,
        }
    )
    assert (draft.values["learner.backend"], draft.values["advantage.normalize_std"]) == ("megatron", False)


def test_two_replay_modes_need_a_decision() -> None:
    draft = of_verl({f"{ACTOR}.router_replay.mode": "R2", f"{ACTOR}.megatron.router_replay.mode": "R3"})
    assert draft.values["replay.mode"] == "???"


@pytest.mark.parametrize("value", ['False"', "False", 1, "no"])
def test_a_switch_that_is_no_boolean_needs_a_decision(value: object) -> None:
    draft = of_verl({f"{CORRECTION}.bypass_mode": value, f"{CORRECTION}.rollout_is": "token"})
    assert f"{CORRECTION}.bypass_mode" in draft.to_do
    assert draft.values["correction.rules"] == draft.values["loss.name"] == "???"


@pytest.mark.parametrize(
    ("mode", "extra", "name", "present"),
    [
        ("vanilla", {}, "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("gspo", {f"{ACTOR}.clip_ratio_low": 3e-4, **BY_ROWS}, "gspo_token", {"clip_low": 3e-4, "clip_high": 0.2}),
        ("sapo", {f"{ACTOR}.tau_neg": 1.1}, "sapo", {"parameters": {"tau_positive": 1.0, "tau_negative": 1.1}}),
        ("gpg", {}, "gpg", {}),
        (
            "clip_cov",
            {f"{ACTOR}.policy_loss.clip_cov_ub": 6},
            "clip_cov",
            {"clip_low": 0.2, "clip_high": 0.2, "parameters": {"share": 2e-4, "low": 1.0, "high": 6.0}},
        ),
        ("kl_cov", {}, "kl_cov", {"parameters": {"share": 2e-4, "beta": 0.1}}),
        ("geo_mean", {}, "gmpo", {"parameters": {"log_clip_low": 0.2, "log_clip_high": 0.2}}),
        ("cispo", {f"{ACTOR}.clip_ratio_low": 10}, "cispo", {"clip_high": 0.2}),
        (
            "dppo_tv",
            {f"{ACTOR}.clip_ratio_c": 20},
            "dppo_tv",
            {"parameters": {"bound_low": 0.2, "bound_high": 0.2, "cap": 20.0, "ratio": "update"}},
        ),
        (
            "dppo_kl",
            {},
            "dppo_kl",
            {"parameters": {"bound_low": 0.2, "bound_high": 0.2, "cap": 3.0, "ratio": "update"}},
        ),
        ("dro", {f"{ACTOR}.policy_loss.dro_beta": 0.05}, "dro", {"parameters": {"beta": 0.05}}),
    ],
)
def test_each_loss_takes_its_own_parameters_and_a_launch_takes_the_result(
    mode: str, extra: dict[str, Any], name: str, present: dict[str, Any]
) -> None:
    draft = of_verl({MODE: mode, "algorithm.adv_estimator": "grpo", **extra})
    found = {key.removeprefix("loss."): value for key, value in draft.values.items() if key.startswith("loss.")}
    assert found.pop("name") == name
    found.pop("aggregation")
    assert found == present
    accepted(draft.values)


@pytest.mark.parametrize("mode", ["sapo", "geo_mean"])
def test_the_aggregation_that_verl_ignores_is_not_taken(mode: str) -> None:
    key = f"{ACTOR}.loss_agg_mode"
    draft = of_verl({MODE: mode, key: "token-mean"})
    assert draft.values["loss.aggregation"] == "seq-mean-token-mean"
    assert "does not read it" in draft.missing[key]
    assert of_verl({MODE: "vanilla", key: "token-mean"}).values["loss.aggregation"] == "token-mean"


@pytest.mark.parametrize("given", [{}, {f"{ACTOR}.loss_agg_mode": "token-sum"}])
def test_an_aggregation_that_only_some_releases_ignore_needs_a_decision(given: dict[str, Any]) -> None:
    draft = of_verl({MODE: "gspo", **given})
    assert draft.values["loss.aggregation"] == "???"
    assert "verl 0.9.1 takes it for gspo" in draft.to_do[f"{ACTOR}.loss_agg_mode"]
    assert of_verl({MODE: "gspo", **BY_ROWS}).values["loss.aggregation"] == "seq-mean-token-mean"


def test_a_geometric_mean_keeps_both_bounds() -> None:
    draft = of_verl({MODE: "geo_mean", f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.4})
    assert draft.values["loss.parameters"] == {"log_clip_low": 0.3, "log_clip_high": 0.4}


def test_an_unknown_loss_leaves_it_open() -> None:
    draft = of_verl({MODE: "novel"})
    assert draft.values["loss.name"] == draft.values["loss.clip_low"] == "???"
    assert "novel" in draft.to_do[MODE]


def test_bypass_with_reinforce_has_no_clip() -> None:
    flat = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
    draft = of_verl({**{f"{CORRECTION}.{key}": value for key, value in flat.items()}, f"{ACTOR}.clip_ratio_c": 3.0})
    assert draft.values["correction.rules"] == [{"name": "seq_tis", "thresholds": {"cap": 2.0, "ratio": "total"}}]
    assert draft.values["loss.name"] == "reinforce"
    assert not {"loss.dual_clip", "loss.clip_low", "loss.clip_high", "loss.parameters"} & set(draft.values)
    assert f"{ACTOR}.clip_ratio_c" in draft.missing
    accepted(draft.values)


def test_bypass_with_ppo_clips_the_total_ratio_and_weighs_no_second_time() -> None:
    draft = of_verl({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"})
    assert draft.values["loss.parameters"] == {"ratio": "total"}
    assert "correction.rules" not in draft.values
    assert "no effect" in draft.missing[f"{CORRECTION}.rollout_is"]
    accepted(draft.values)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"rollout_is": "token"}, [("token_tis", {"cap": 2.0})]),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, [("icepop", {"low": 0.5, "high": 5.0})]),
        ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}, [("seq_mis", {"low": 0.5, "high": 5.0})]),
        (
            {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
            [("seq_tis", {"cap": 2.0}), ("seq_mean_k1", {"low": 0.999, "high": 1.001})],
        ),
        (
            {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "2.0,0.1"},
            [("token_k1", {"low": 0.5, "high": 2.0}), ("seq_max_k3", {"upper": 0.1})],
        ),
        (
            {"rollout_rs": "token_k2, seq_max_k3,token_k2", "rollout_rs_threshold": 0.5},
            [("token_k2", {"upper": 0.5}), ("seq_max_k3", {"upper": 0.5})],
        ),
    ],
)
def test_rollout_correction(settings: dict[str, object], rules: list[tuple[str, dict[str, Any]]]) -> None:
    draft = of_verl({f"{CORRECTION}.{key}": value for key, value in settings.items()})
    expected = [{"name": name, "thresholds": {**limits, "ratio": "merged"}} for name, limits in rules]
    assert draft.values["correction.rules"] == expected
    accepted(draft.values)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("rollout_rs", {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.5"}),
        ("rollout_rs", {"rollout_rs": "token_k1", "rollout_rs_threshold": "0_2"}),
        ("rollout_rs", {"rollout_rs": "token_k3", "rollout_rs_threshold": "x"}),
        ("rollout_rs", {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "2"}),
        ("rollout_rs", {"rollout_rs": "token_k2,token_k3,token_k1", "rollout_rs_threshold": "1,2"}),
        ("rollout_rs", {"rollout_rs": "token_k2"}),
        ("rollout_is", {"rollout_is": "None"}),
        ("rollout_is", {"rollout_is": True}),
        ("rollout_is_threshold", {"rollout_is": "token", "rollout_is_threshold": "high"}),
        ("rollout_is_threshold", {"rollout_is": "token", "rollout_is_threshold": "1_2_3"}),
    ],
)
def test_thresholds_that_do_not_fit_stay_open(key: str, settings: dict[str, object]) -> None:
    draft = of_verl({f"{CORRECTION}.{name}": value for name, value in settings.items()})
    assert f"{CORRECTION}.{key}" in draft.to_do
    assert draft.values["correction.rules"] == "???"


def test_the_mirrored_band_of_verl_is_kept_and_pointed_out() -> None:
    """verl's token_k1 0.5_5.0 keeps the ratio 0.3 and drops 4.0, and so does what it becomes."""
    draft = of_verl({f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "0.5_5.0"})
    thresholds = {"low": 0.5, "high": 5.0, "ratio": "merged"}
    assert draft.values["correction.rules"] == [{"name": "token_k1", "thresholds": thresholds}]
    assert any("inverse ratio" in remark for remark in draft.remarks)


@pytest.mark.parametrize("name", ["gdpo", "grpo", "rloo", "opo", "gpg", "remax"])
def test_estimators_have_the_same_name(name: str) -> None:
    assert of_verl({"algorithm.adv_estimator": name}).values["advantage.name"] == name


@pytest.mark.parametrize("name", ["gae", "optimal_token_baseline"])
def test_an_estimator_that_is_not_here_is_not_replaced(name: str) -> None:
    assert of_verl({"algorithm.adv_estimator": name}).values["advantage.name"] == "???"
    assert of_verl({}).values["advantage.name"] == "???"  # verl's default is gae


def test_kl_to_the_reference() -> None:
    in_loss = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl+"}
    draft = of_verl({f"{ACTOR}.{key}": value for key, value in in_loss.items()})
    assert (draft.values["kl.coef"], draft.values["kl.estimator"]) == (0.01, "k3+")
    in_reward = {"use_kl_in_reward": True, "kl_ctrl.type": "adaptive", "kl_ctrl.target_kl": 0.2, "kl_penalty": "mse"}
    draft = of_verl({f"algorithm.{key}": value for key, value in in_reward.items()})
    assert {key: value for key, value in draft.values.items() if key.startswith("kl.")} == {
        "kl.where": "reward",
        "kl.coef": 0.001,
        "kl.estimator": "k2",
        "kl.controller": "adaptive",
        "kl.target": 0.2,
    }
    both = of_verl({f"{ACTOR}.use_kl_loss": True, "algorithm.use_kl_in_reward": True})
    assert both.values["kl.coef"] == "???"


@pytest.mark.parametrize(
    "key",
    [
        "trainer.total_epochs",
        "trainer.default_local_dir",
        "trainer.val_before_train",
        "trainer.resume_mode",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.balance_batch",
        "critic.optim.lr",
        "no.such_key",
        f"{ROLLOUT}.multi_turn.enable",
        "actor_rollout_ref.model.lora_rank",
    ],
)
@pytest.mark.parametrize("value", [True, 8, "auto"])
def test_no_key_is_lost(key: str, value: object) -> None:
    draft = of_verl({key: value})
    assert draft.accounted(key)
    assert key in draft.yaml("x")


def test_the_length_of_a_run_is_counted_in_steps() -> None:
    assert of_verl({"trainer.total_training_steps": 30}).values["train.steps"] == 30
    draft = of_verl({"trainer.total_epochs": 15})
    assert draft.values["train.steps"] == "???"
    assert "15 * prompts" in draft.to_do["trainer.total_epochs"]


def test_what_verl_assumes_is_written_out_and_named() -> None:
    draft = of_verl({f"{ACTOR}.clip_ratio_low": 0.1})
    assert not {key for key in draft.missing if "clip_ratio_" in key}, "what is translated or absent is not missed"
    assert draft.values["optimizer.lr"] == 1e-6
    assert draft.origins["optimizer.lr"] == f"{ACTOR}.optim.lr (verl's default)"
    expected = {"optimizer.warmup_steps": 0, "optimizer.betas": [0.9, 0.999], "rollout.server.tensor_parallel": 2}
    assert {key: draft.values[key] for key in expected} == expected


def test_a_base_configuration_that_is_not_here_is_a_to_do() -> None:
    assert "--config-name" in of_verl({"--config-name": "own_trainer"}).to_do
    assert "--config-name" not in of_verl({"--config-name": "ppo_megatron_trainer.yaml"}).to_do


def test_experts_without_a_size_take_that_of_the_rest() -> None:
    """Megatron-Core's own default, which ours is not."""
    megatron = f"{ACTOR}.megatron"
    draft = of_verl({f"{megatron}.tensor_model_parallel_size": 4, f"{megatron}.expert_tensor_parallel_size": None})
    assert draft.values["learner.parallel.expert_tensor"] == 4


def test_verls_reward_is_nobodys_default() -> None:
    assert of_verl({}).values["task.reward"] == "???"
    path = "custom_reward_function.path"
    assert "my.py:compute_score" in of_verl({path: "my.py"}).to_do[path]


@pytest.mark.parametrize(
    ("top_p", "top_k", "mode"), [(1.0, -1, None), (1, 0, None), (0.9, -1, "off"), (1.0, 50, "off")]
)
def test_truncated_sampling_is_scored_over_the_vocabulary_as_in_verl(
    top_p: float, top_k: int, mode: str | None
) -> None:
    assert of_verl({f"{ROLLOUT}.top_p": top_p, f"{ROLLOUT}.top_k": top_k}).values.get("sampling_mask.mode") == mode


def test_every_setting_that_is_written_exists() -> None:
    settings = {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.optim.lr_decay_style": "WSD",
        f"{ACTOR}.optim.lr_wsd_decay_style": "linear",
        f"{ACTOR}.optim.lr_wsd_decay_steps": 5,
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ROLLOUT}.val_kwargs.temperature": 1.0,
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_batch_normalize": True,
        "algorithm.filter_groups.enable": True,
        "data.val_files": ["a.parquet", "b.parquet"],
        "trainer.project_name": "p",
        "trainer.logger": ["console", "wandb"],
    }
    values = of_verl(settings).values
    assert [key for key in values if lookup(key) is None and not key.startswith("task.eval_sets")] == []
    assert values["task.eval_sets"] == {"a": "a.parquet", "b": "b.parquet"}
    assert values["optimizer.final_steps"] == 5


def test_uneven_pipelines() -> None:
    place = f"{ACTOR}.megatron.override_transformer_config"
    draft = of_verl(
        {
            f"{place}.num_layers_in_first_pipeline_stage": 16,
            f"{place}.num_layers_in_last_pipeline_stage": 15,
            f"{place}.account_for_embedding_in_pipeline_split": False,
        }
    )
    assert draft.values["learner.parallel.first_stage_layers"] == 16
    assert draft.values["learner.parallel.last_stage_layers"] == 15
    assert draft.values["learner.parallel.account_for_embedding"] is False
    draft = of_verl({f"{place}.pipeline_model_parallel_layout": "Et*23|t*23L"})
    assert draft.values["learner.parallel.pipeline_layout"] == "Et*23|t*23L"


def test_adapters_with_named_modules_are_translated() -> None:
    model = "actor_rollout_ref.model"
    draft = of_verl({f"{model}.lora_rank": 32, f"{model}.target_modules": ["q_proj", "v_proj"]})
    assert draft.values["learner.lora.rank"] == 32
    assert draft.values["learner.lora.alpha"] == 16, "verl's default"
    assert draft.values["learner.lora.targets"] == ["q_proj", "v_proj"]
    accepted(draft.values)
    open_ones = of_verl({f"{model}.lora_rank": 8, f"{model}.lora_alpha": 24})
    assert (open_ones.values["learner.lora.rank"], open_ones.values["learner.lora.alpha"]) == (8, 24)
    assert open_ones.values["learner.lora.targets"] == "???"
    off = of_verl({f"{model}.lora_rank": 0, f"{model}.target_modules": "all-linear"})
    assert not any(key.startswith("learner.lora") for key in off.values)
    assert off.accounted(f"{model}.target_modules")
    other = of_verl({f"{model}.lora.rank": 8})
    assert "learner.lora" in other.to_do[f"{model}.lora.rank"]


@pytest.mark.parametrize(("value", "layout"), [(True, "packed"), (False, "padded"), (None, None), ("True", "???")])
def test_rows_without_padding_are_packs(value: object, layout: str | None) -> None:
    settings = {} if value is None else {"actor_rollout_ref.model.use_remove_padding": value}
    assert of_verl(settings).values.get("batch.layout") == layout


def test_state_on_the_host_is_one_setting() -> None:
    section = f"{ACTOR}.optim.override_optimizer_config"
    draft = of_verl({f"{section}.optimizer_cpu_offload": True, f"{section}.optimizer_offload_fraction": 0})
    assert draft.values["learner.offload_optimizer"] is True
    assert not [key for key in draft.to_do if key.startswith(section)]


@pytest.mark.parametrize("context", [1, 4])
def test_ranks_that_share_sequences_have_one_budget_together(context: int) -> None:
    budget = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 8192}
    draft = of_verl({**budget, f"{ACTOR}.megatron.context_parallel_size": context})
    assert draft.values["learner.micro_batch_tokens"] == 8192 * context
