"""8-bit products without a GPU: Megatron's settings, refusals, and the padding of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config import rules
from moe_trm.config.schema import Config, LearnerConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.fp8 import FORMATS, alignment, check_shapes, options

model = pytest.importorskip("moe_trm.learner.megatron.model")
megatron = pytest.importorskip("megatron.core.transformer.transformer_config")
fp8_utils = pytest.importorskip("megatron.core.fp8_utils")

HF: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
}
MODEL = {
    **HF,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
}
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def learner(fp8: str = "tensorwise", **more: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"fp8": fp8, "dtype": "bfloat16", **more})


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("delayed", ("hybrid", False)),
        ("tensorwise", ("hybrid", True)),
        ("blockwise", ("e4m3", True)),
        ("mxfp8", ("e4m3", True)),
    ],
)
def test_the_recipe_in_megatrons_words(recipe: str, expected: tuple[str, bool]) -> None:
    said = options(learner(recipe, fp8_bfloat16_layers=2))
    assert (said["fp8"], said["first_last_layers_bf16"]) == expected
    assert said["fp8_recipe"] == recipe
    assert said["num_layers_at_start_in_bf16"] == said["num_layers_at_end_in_bf16"] == 2
    assert options(learner(recipe, fp8_bfloat16_layers=0))["first_last_layers_bf16"] is False
    assert options(learner("none")) == {}


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize("recipe", RECIPES)
def test_megatron_takes_the_options_and_asks_for_the_same_alignment(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alignment(learner(recipe)) == fp8_utils.get_fp8_align_size(fp8_utils.Fp8Recipe(recipe))
    # It asks for the version of Transformer Engine, which is not there.
    monkeypatch.setattr(megatron, "is_te_min_version", lambda *_: True)
    made = model.transformer_config(MODEL, learner(recipe), "transformer_engine")
    assert (made.fp8, made.fp8_recipe, made.bf16, made.fp16) == (FORMATS[recipe], recipe, True, False)
    assert made.moe_grouped_gemm
    assert made.first_last_layers_bf16 is (recipe != "delayed")


@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_without_an_8_bit_product_are_refused(recipe: str) -> None:
    check_shapes(learner(recipe), HF)
    for key, width, what in (
        ("hidden_size", 72, "hidden_size"),
        ("head_dim", 6, "columns of queries"),
        ("moe_intermediate_size", 24, "columns of an expert"),
    ):
        with pytest.raises(ConfigError, match="no 8-bit product") as caught:
            check_shapes(learner(recipe), {**HF, key: width})
        assert what in str(caught.value.got)
    halved = learner(recipe, parallel={"tensor": 2, "expert_tensor": 2})
    if alignment(halved) == 32:
        with pytest.raises(ConfigError, match="no 8-bit product"):
            check_shapes(halved, HF)
    else:
        check_shapes(halved, HF)
    check_shapes(learner("none"), {**HF, "hidden_size": 72})


def test_dense_layers_count_where_there_are_some() -> None:
    narrow = {**HF, "intermediate_size": 100}
    check_shapes(learner(), narrow)
    with pytest.raises(ConfigError, match="no 8-bit product"):
        check_shapes(learner(), {**narrow, "mlp_only_layers": [0]})


def test_no_more_bfloat16_layers_than_a_stage_has() -> None:
    check_shapes(learner(fp8_bfloat16_layers=2, parallel={"pipeline": 2}), HF)
    with pytest.raises(ConfigError, match="stay in bfloat16"):
        check_shapes(learner(fp8_bfloat16_layers=3, parallel={"pipeline": 2}), HF)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"dtype": "float32"}, "learner.dtype"),
        ({"dtype": "float16"}, "learner.dtype"),
        ({"backend": "deepspeed"}, "learner.backend"),
        ({"transformer_engine": False}, "learner.transformer_engine"),
        ({"fp8": "delayed", "fp8_bfloat16_layers": 1}, "learner.fp8_bfloat16_layers"),
    ],
)
def test_what_8_bit_products_do_not_go_with(settings: dict[str, Any], key: str) -> None:
    whole = {"fp8": "tensorwise", "dtype": "bfloat16", **settings}
    assert key in [problem.key for problem in rules.refusals(run(whole))]
    assert key not in [problem.key for problem in rules.refusals(run({**settings, "fp8": "none"}))]


def run(learner: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": "m"}, "learner": learner, **sections})


def test_what_8_bit_products_change_is_told() -> None:
    def said(learner: dict[str, Any], **sections: Any) -> str:
        return "\n".join(rules.warnings(run(learner, **sections)))

    assert "the learner's own 8-bit rounding" in said({"fp8": "tensorwise"})
    assert "8-bit rounding" not in said({"fp8": "tensorwise"}, rollout={"quantization": "fp8"})
    assert "does not repeat the scoring pass" in said({"fp8": "delayed"})
    assert "learner.fp8_bfloat16_layers has no effect" in said({"fp8_bfloat16_layers": 2})
    assert "learner.transformer_engine has no effect" in said({"backend": "deepspeed", "transformer_engine": "off"})
