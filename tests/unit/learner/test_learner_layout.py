"""Refusals before anything is loaded: models, layouts, vocabularies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.deepspeed.settings import check_model
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.models.hf_config import check_vocabulary, moe_layers, read_hf_config

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "vocab_size": 100,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DENSE: dict[str, Any] = {**MOE, "architectures": ["Qwen3ForCausalLM"], "num_experts": 0}


def config(mode: str = "R3", /, **parallel: int | str) -> Config:
    probe = {"every": 0 if mode == "none" else 10}
    return config_of(replay={"mode": mode}, learner={"parallel": parallel}, probe=probe)


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": "model"}, **sections})


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        ({}, None),
        ({}, 3),
        ({"expert": 2}, 2),
        ({"expert": 2}, 4),
        ({"expert": 8}, 8),
        ({"tensor": 2, "expert_tensor": 2}, 2),
        ({"tensor": 2, "expert": 2}, 2),
        ({"pipeline": 2}, 2),
        ({"pipeline": 2, "virtual_pipeline": 2}, 2),
        ({"pipeline": 3, "first_stage_layers": 2}, 3),
        ({"pipeline": 3, "pipeline_layout": "Ett|t|tL"}, 3),
        ({"context": 2, "expert": 2}, 2),
        ({"tensor": 2, "expert": 4, "pipeline": 2, "context": 2}, 8),
    ],
)
def test_layouts_are_accepted(parallel: dict[str, Any], world_size: int | None) -> None:
    check_layout(config(**parallel), "0.16.1", MOE, world_size=world_size)


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"expert": 3}, "8 experts, 3 ranks"),
        ({"tensor": 3, "expert": 2}, "4 attention heads, 3 ranks"),
        ({"tensor": 4, "expert_tensor": 4}, "2 key/value heads, 4 ranks"),
        ({"pipeline": 3}, "4 layers, 3 ranks and stages"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(parallel: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_layout(config(**parallel), "0.19.2", MOE)
    assert caught.value.where.startswith("learner.parallel")
    assert caught.value.fix


def test_tensor_parallel_without_expert_parallel_is_wrong_on_old_megatron() -> None:
    wide = {**MOE, "num_key_value_heads": 4}
    for parallel in ({"tensor": 2}, {"tensor": 4, "expert_tensor": 2}):
        with pytest.raises(ConfigError, match="does not reduce expert gradients"):
            check_layout(config(**parallel), "0.16.1", wide)
    for version in ("0.17.0", "0.19.2rc1"):
        check_layout(config(tensor=2), version, MOE)


def test_the_version_gate_is_reached_through_the_settings(tmp_path: Path) -> None:
    """No rule between settings stands in the way of a Megatron-Core that sums the gradients of whole experts."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {checkpoint: model}\nlearner: {parallel: {tensor: 2, expert_tensor: 1}}\n")
    run = load(path)
    check_layout(run, "0.17.0", MOE, world_size=2)
    with pytest.raises(ConfigError, match="does not reduce expert gradients"):
        check_layout(run, "0.16.1", MOE, world_size=2)


def test_tensor_parallelism_of_a_dense_model_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {checkpoint: model}\nreplay: {mode: none}\nprobe: {every: 0}\n")
    check_layout(load(path, ["learner.parallel.tensor=2"]), "0.16.1", DENSE, world_size=2)


@pytest.mark.parametrize(
    ("parallel", "ranks", "product"),
    [
        ({"expert": 2}, 3, r"expert_tensor \* expert \* pipeline"),
        ({"tensor": 2, "context": 2, "expert": 2}, 6, r"tensor \* pipeline \* context"),
    ],
)
def test_ranks_must_divide_into_groups(parallel: dict[str, int], ranks: int, product: str) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} learner ranks") as caught:
        check_layout(config(**parallel), "0.16.1", MOE, world_size=ranks)
    assert re.search(product, caught.value.where)


@pytest.mark.parametrize(("mode", "said"), [("R2", "R2"), ("R3", "R3"), ("auto", "R2 (2 optimizer steps")])
def test_replay_of_a_dense_model_is_refused_in_every_learner(mode: str, said: str) -> None:
    with pytest.raises(ConfigError, match="needs a mixture of experts") as caught:
        check_layout(config(mode), "0.16.1", DENSE)
    assert said in str(caught.value.got)
    with pytest.raises(ConfigError, match="needs a mixture of experts"):
        check_model(config(mode), DENSE)


def test_a_dense_model_needs_neither_a_replay_that_auto_left_out_nor_a_probe() -> None:
    settings = {"replay": {"mode": "auto"}, "learner": {"minibatches": 1}}
    for check in (lambda run: check_layout(run, "0.16.1", DENSE), lambda run: check_model(run, DENSE)):
        check(config_of(probe={"every": 0}, **settings))
        with pytest.raises(ConfigError, match="mixture of experts") as caught:
            check(config_of(probe={"every": 3}, **settings))
        assert caught.value.where == "probe.every"


def test_a_mixture_whose_layers_are_all_dense_is_dense() -> None:
    with pytest.raises(ConfigError, match="no MoE layer"):
        check_layout(config(), "0.16.1", {**MOE, "mlp_only_layers": [0, 1, 2, 3]})


def test_dense_model_without_replay_is_accepted_but_not_with_expert_parallel() -> None:
    check_layout(config("none"), "0.16.1", DENSE)
    with pytest.raises(ConfigError, match="needs a mixture of experts"):
        check_layout(config("none", expert=2), "0.16.1", DENSE)


def test_layers_that_predict_several_tokens_are_no_reason_to_refuse() -> None:
    """They are kept aside (`HfCheckpoint.prediction`)."""
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        check_layout(config(), "0.16.1", {**MOE, key: 1})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is not supported"),
        ({"architectures": None}, "architecture is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type=linear"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "one expert per token"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        check_layout(config(), "0.16.1", {**MOE, **change})


def test_one_expert_per_token_is_accepted_where_its_weight_has_a_gradient() -> None:
    check_layout(config(), "0.16.1", {**MOE, "num_experts_per_tok": 1, "norm_topk_prob": False})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (0, 1, 2, 3)),
        ({"num_experts": None, "num_local_experts": 8}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [1]}, (0, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"num_experts": 0}, ()),
    ],
)
def test_moe_layers(change: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert moe_layers({**MOE, **change}) == expected


def test_checkpoint_folder_and_config_must_exist_and_parse(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder not found"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert read_hf_config(tmp_path) == MOE


@pytest.mark.parametrize(
    ("tokenizer", "largest"),
    [
        ({"model": {"vocab": {"a": 0, "b": 99}}, "added_tokens": []}, 99),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 100, "content": "<end>"}]}, 100),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 1),
    ],
)
def test_tokenizer_must_fit_the_vocabulary(tmp_path: Path, tokenizer: dict[str, Any], largest: int) -> None:
    check_vocabulary(tmp_path, 1)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_vocabulary(tmp_path, largest + 1)
    with pytest.raises(CheckpointError, match=f"token id {largest}"):
        check_vocabulary(tmp_path, largest)


def test_checks_import_neither_torch_nor_megatron() -> None:
    code = "import sys, moe_trm.learner.megatron.layout; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
