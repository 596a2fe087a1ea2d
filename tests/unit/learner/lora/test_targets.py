"""Targets by kind and by name, in every family, and settings that adapters do not go with."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config import lora_rules, rules
from moe_trm.config.choices import layers_switch
from moe_trm.config.schema import Config, LearnerConfig, LoraConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.lora.targets import adapted_modules, check_lora, matrix_modules
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES
from moe_trm.models.tensors import tensor_names
from moe_trm.models.tiny.families import COMMON
from moe_trm.step.probe.rounding_shares import roundings
from tests.unit.sections import sections_of

LAYERS = 2


def hf_of(family: str, **overrides: object) -> dict[str, Any]:
    known = FAMILIES[family]
    return {
        **COMMON,
        **known.tiny,
        "architectures": [known.architecture],
        "num_hidden_layers": LAYERS,
        **overrides,
    }


def names_of(family: str, hf: dict[str, Any]) -> frozenset[str]:
    return tensor_names(FAMILIES[family], hf)


def modules(family: str, *targets: str) -> frozenset[str]:
    hf = hf_of(family)
    return adapted_modules(names_of(family, hf), LoraConfig(rank=2, targets=targets), hf)


def test_kinds_of_a_qwen3_mixture() -> None:
    attention = modules("qwen3_moe", "attention")
    assert attention == {f"model.layers.{layer}.self_attn.{x}_proj" for layer in range(LAYERS) for x in "qkvo"}
    assert modules("qwen3_moe", "router") == {f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)}
    experts = modules("qwen3_moe", "experts")
    assert len(experts) == LAYERS * 16 * 3
    assert "model.layers.1.mlp.experts.15.down_proj" in experts
    assert modules("qwen3_moe", "attention", "experts", "router") == attention | experts | modules(
        "qwen3_moe", "router"
    )


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_matrix_of_a_layer_is_of_one_kind_or_dense(family: str) -> None:
    hf = hf_of(family)
    names = names_of(family, hf)
    kinds = ["attention", "router", *(["experts"] if family != "gpt_oss" else [])]
    found = [modules(family, kind) for kind in kinds]
    assert sum(map(len, found)) == len(frozenset().union(*found))
    rest = matrix_modules(names, hf) - frozenset().union(*found)
    assert all(name.rpartition(".")[0].endswith(".mlp") for name in rest), sorted(rest)[:3]
    assert not any("norm" in name or "embed" in name or "lm_head" in name for each in found for name in each)


def test_names_of_modules() -> None:
    assert modules("qwen3_moe", "q_proj") == {f"model.layers.{layer}.self_attn.q_proj" for layer in range(LAYERS)}
    one = "model.layers.1.mlp.experts.3.up_proj"
    assert modules("qwen3_moe", one) == {one}
    assert all("shared_experts" in name for name in modules("glm4_moe", "shared_experts.up_proj"))


@pytest.mark.parametrize(
    ("family", "target", "said"),
    [
        ("qwen3_moe", "attn", "Embeddings"),
        ("qwen3_moe", "proj", "Embeddings"),
        ("qwen3_moe", "embed_tokens", "Embeddings"),
        ("qwen3_moe", "q_norm", "Embeddings"),
        ("gpt_oss", "experts", "one tensor"),
        ("qwen3", "experts", "dense"),
        ("qwen3", "router", "dense"),
    ],
)
def test_a_target_that_no_matrix_has_is_an_error(family: str, target: str, said: str) -> None:
    with pytest.raises(ConfigError, match="no matrix of the model has this name") as caught:
        modules(family, "attention", target)
    assert said in str(caught.value)
    assert caught.value.got == target


def config(lora: dict[str, Any], **learner: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": "x"}, "learner": {"lora": {"rank": 4, **lora}, **learner}})


def test_experts_that_ranks_share_are_refused_and_the_rest_is_not() -> None:
    parallel = {"tensor": 2, "expert_tensor": 2}
    with pytest.raises(ConfigError, match="would each keep a copy of one factor"):
        check_lora(config({"targets": ["mlp.experts.0.up_proj"]}, parallel=parallel).learner, hf_of("qwen3_moe"))
    check_lora(config({"targets": ["attention", "router"]}, parallel=parallel).learner, hf_of("qwen3_moe"))
    check_lora(config({"rank": 0}, parallel=parallel).learner, hf_of("qwen3_moe"))


@pytest.mark.parametrize(
    ("lora", "learner", "key"),
    [
        ({"targets": []}, {}, "learner.lora.targets"),
        ({}, {"transformer_engine": "on"}, "learner.transformer_engine"),
        ({}, {"fp8": "blockwise", "dtype": "bfloat16"}, "learner.fp8"),
        ({}, {"round_like_rollout": True}, "learner.round_like_rollout"),
        ({"targets": ["router"]}, {"freeze_router": True}, "learner.freeze_router"),
    ],
)
def test_what_adapters_do_not_go_with(lora: dict[str, Any], learner: dict[str, Any], key: str) -> None:
    assert key in [problem.key for problem in lora_rules.refusals(config(lora, **learner).learner)]
    assert key in [problem.key for problem in rules.refusals(config(lora, **learner))]
    assert not list(lora_rules.refusals(config({**lora, "rank": 0}, **learner).learner))


def test_idle_settings_and_what_is_not_measured() -> None:
    assert list(lora_rules.idle_settings(config({"rank": 0, "alpha": 8.0}).learner)) == [
        "learner.lora.alpha has no effect: learner.lora.rank=0"
    ]
    (told,) = lora_rules.idle_settings(config({}, freeze_router=True).learner)
    assert "no router has an adapter" in told
    assert roundings(*sections_of(config({"rank": 0}), "learner", "rollout"))
    assert not roundings(*sections_of(config({}), "learner", "rollout"))
    assert any("probe/cast_k3_kl" in line for line in rules.warnings(config({})))
    assert not list(lora_rules.surprises(*sections_of(config({}, dtype="bfloat16"), "learner", "rollout", "probe")))


def test_adapters_choose_megatrons_own_layers() -> None:
    for rank, expected in ((0, "on"), (4, "off")):
        switch, reason = layers_switch(LearnerConfig(lora=LoraConfig(rank=rank)), cuda=True, problem=lambda: "")
        assert switch == expected
        assert ("adapters" in reason) == bool(rank)
