"""Adapters in the plan: their parameters, who shares them, and the memory that they take and save."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from moe_trm.config.schema import LearnerConfig, LoraConfig, ParallelConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.lora.targets import adapted_modules
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.tiny.families import make_family
from moe_trm.tools.plan.kept import layer_kept
from moe_trm.tools.plan.lora import with_adapters
from moe_trm.tools.plan.memory import Load, deepspeed_memory, rank_factors, stage_memory
from moe_trm.tools.plan.parameters import NO_ADAPTERS, Model, model_of
from tests.unit.tools.plan.published import hf_config

QWEN = hf_config("qwen3_30b_a3b")
R = 16


def adapted(*targets: str, hf: dict[str, object] = QWEN) -> Model:
    lora = LoraConfig(rank=R, **({"targets": targets} if targets else {}))  # type: ignore[arg-type]
    return with_adapters(model_of(hf), hf, lora)


def learner(dtype: str = "bfloat16", recompute: str = "none", **parallel: int) -> LearnerConfig:
    settings = {"dtype": dtype, "recompute": recompute, "parallel": parallel, "lora": {"rank": R}}
    return LearnerConfig.model_validate(settings)


def load(world: int = 8, micro_batches: int | None = None) -> Load:
    return Load(4096, 4096, world, True, replays=True, other_gb=0.0, micro_batches=micro_batches)


def test_factors_are_counted_by_hand() -> None:
    attention = R * (2 * (2048 + 4096) + 2 * (2048 + 512))
    experts = 128 * 3 * R * (2048 + 768)
    assert adapted().adapter_total == 48 * (attention + experts)
    assert adapted("attention").adapter_total == 48 * attention
    assert adapted("router").adapter_total == 48 * R * (2048 + 128)
    assert model_of(QWEN).adapter_total == 0


def test_latent_attention_has_factors_of_its_latents() -> None:
    hf = hf_config("deepseek_v3")
    shapes = ((7168, 1536), (1536, 128 * 192), (7168, 576), (512, 128 * 256), (128 * 128, 7168))
    assert adapted("attention", hf=hf).adapter_total == 61 * R * sum(map(sum, shapes))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_factors_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """A and B of every matrix of `learner.lora.targets`, by the shapes in the file."""
    make_family(family, tmp_path / family)
    hf, shapes = read_hf_config(tmp_path / family), dict[str, list[int]]()
    for file in (tmp_path / family).glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    lora = LoraConfig(rank=4, targets=("attention", "experts", "router"))
    modules = adapted_modules(frozenset(shapes), lora, hf)
    assert modules
    model = with_adapters(model_of(hf), hf, lora)
    assert model.adapter_total == sum(4 * sum(shapes[f"{module}.weight"]) for module in modules)


def test_a_parameter_is_merged_with_all_of_its_matrices() -> None:
    """Queries, keys and values are one, and gate and up; the experts of a layer are as many as there are."""
    layer = adapted("q_proj", "up_proj").adapter(0)
    attention, experts = sorted(layer.merged, key=lambda each: each.part.kind)
    assert (attention.part.elements, attention.number) == (2048 * (4096 + 2 * 512), 1)
    assert (experts.part.elements, experts.number) == (128 * 2 * 2048 * 768, 128)
    whole = adapted().adapter(0).merged
    kinds = model_of(QWEN).by_kind
    assert sum(each.part.elements for each in whole) * 48 == kinds["attention"][0] + kinds["experts"][0]


def test_a_named_layer_alone_is_adapted() -> None:
    model = adapted("model.layers.3.self_attn.o_proj")
    assert [number for number in range(48) if model.adapter(number) != NO_ADAPTERS] == [3]
    assert model.adapter_total == R * (4096 + 2048)
    with pytest.raises(ConfigError, match="no matrix of the model has this name"):
        adapted("no_such_proj")


def test_tensor_ranks_share_one_factor_of_each_matrix_and_expert_ranks_the_experts() -> None:
    """Rows are cut of q, k and v, and so of their B; columns of o, and so of its A."""
    model, attention = adapted(), R * (2048 + 4096 / 4)
    qkv = 3 * 2048 + (4096 + 2 * 512) / 4
    dense, experts = rank_factors(model, ParallelConfig(tensor=4, expert=8), 0)
    assert dense == 48 * (R * qkv + attention)
    assert experts == 48 * 128 // 8 * 3 * R * (2048 + 768)


def test_only_factors_have_gradients_and_optimizer() -> None:
    model, parallel = adapted(), ParallelConfig(expert=8)
    memory = stage_memory(model, QWEN, learner(expert=8), load(), 0)
    dense, experts = rank_factors(model, parallel, 0)
    frozen = stage_memory(model_of(QWEN), QWEN, LearnerConfig(dtype="bfloat16", parallel=parallel), load(), 0)
    assert memory["weights"] == frozen["weights"] + 2 * (dense + experts)
    assert memory["gradients"] == 4 * (dense + experts)
    assert memory["optimizer"] == 12 * (dense / 8 + experts)


def test_merged_weights_stay_until_backward_unless_they_are_made_again() -> None:
    """Of each micro-batch on its way. Selective recomputation makes those of experts again."""
    model, kinds = adapted(), model_of(QWEN).by_kind
    attention, experts = kinds["attention"][0], kinds["experts"][0] / 8

    def merged(recompute: str, **parallel: int) -> float:
        settings = learner("float32", recompute, expert=8, **parallel)
        return stage_memory(model, QWEN, settings, load(16), 0)["merged"]

    assert merged("none") == 4 * (attention + experts)
    assert merged("selective") == 4 * attention
    assert merged("full") == 0
    assert merged("none", pipeline=2) == 2 * merged("none") / 2
    again = stage_memory(model, QWEN, learner("float32", "full", expert=8), load(), 0)
    assert again["backward"] > 4 * (attention + experts) / 48


def test_frozen_products_do_not_keep_what_they_multiply() -> None:
    """Adapters of attention alone: rows of experts are not kept, nor their scaled product. Scores of attention are."""
    settings = learner()
    both, alone = (
        layer_kept(QWEN, settings, "plain", is_moe=True, adapted=adapted(*targets).adapter(0))
        for targets in ((), ("attention",))
    )
    assert both.inside - alone.inside == 8 * 2 * (2048 + 768)
    assert both.outside == alone.outside
    full = layer_kept(QWEN, LearnerConfig(dtype="bfloat16"), "plain", is_moe=True)
    assert full.outside - both.outside == 4 * (2 * 2048 + (32 + 4) * 128)
    assert (full.inside, full.scores, both.scores) == (both.inside, 0, 0)
    assert layer_kept(QWEN, settings, "fused", is_moe=True, adapted=adapted().adapter(0)).scores == 32 * 7


def test_zero_shares_factors_but_not_merged_weights() -> None:
    model = adapted()

    def at(stage: int) -> dict[str, float]:
        settings = {"backend": "deepspeed", "dtype": "bfloat16", "lora": {"rank": R}}
        config = LearnerConfig.model_validate(settings | {"deepspeed": {"zero_stage": stage}})
        return deepspeed_memory(model, QWEN, config, load())[1]

    total, kinds = model.adapter_total, model_of(QWEN).by_kind
    assert (at(1)["gradients"], at(2)["gradients"]) == (4 * total, 4 * total / 8)
    assert at(2)["optimizer"] == 12 * total / 8
    assert at(3)["weights"] < at(2)["weights"] / 2
    assert at(3)["merged"] == at(1)["merged"] == 2 * (kinds["attention"][0] + kinds["experts"][0]) + 4 * total
