from __future__ import annotations

import pytest

from moe_trm.config.learning_rate import LearningRate, learning_rate
from moe_trm.config.schema import Config, LearnerConfig, OptimizerConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.deepspeed.optimizer import adamw
from moe_trm.learner.parameter_groups import GroupSettings, check_groups, is_frozen, settings_of
from moe_trm.models.tiny.checkpoint import TinyShape, tiny_model
from tests.unit.sections import sections_of

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.gate_proj.weight")


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 0}, [1.0] * 7),
        ({"schedule": "linear", "min_lr": 0.2}, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine"}, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ({"schedule": "wsd", "final_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_rates_of_the_steps(settings: dict[str, object], rates: list[float]) -> None:
    rate = LearningRate(OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": 2, **settings}), num_steps=6)
    assert [rate.at(step) for step in range(7)] == pytest.approx(rates, abs=1e-6)
    assert rate.at(1000) == pytest.approx(rates[-1])


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 14, 15, 16, 95])
def test_wsd_goes_down_however_short_the_run(num_steps: int) -> None:
    settings = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": 0, "schedule": "wsd", "min_lr": 0.2})
    rate = LearningRate(settings, num_steps)
    assert rate.final_steps == pytest.approx(max(1, num_steps / 10), abs=0.5)
    before = [rate.at(step) for step in range(num_steps - rate.final_steps + 1)]
    assert set(before) == {1.0}
    assert rate.at(num_steps) == pytest.approx(0.2)


def test_a_schedule_ends_with_the_run() -> None:
    config = {"model": {"checkpoint": "none"}, "train": {"steps": 10}, "learner": {"minibatches": 2, "epochs": 3}}
    assert learning_rate(*sections_of(Config.model_validate(config), "optimizer", "learner", "train")).num_steps == 60
    assert (
        learning_rate(
            *sections_of(
                Config.model_validate({**config, "optimizer": {"decay_steps": 7}}), "optimizer", "learner", "train"
            )
        ).num_steps
        == 7
    )


def optimizer(*groups: dict[str, object]) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"weight_decay": 0.1, "groups": groups})


def test_the_first_group_that_matches_counts() -> None:
    settings = optimizer({"match": r"mlp\.gate", "lr_multiplier": 0.1}, {"match": "mlp", "weight_decay": 0.3})
    found = [settings_of([name], is_matrix=True, optimizer=settings) for name in NAMES]
    assert found == [GroupSettings(1.0, 0.1), GroupSettings(0.1, 0.1), GroupSettings(1.0, 0.3)]
    assert settings_of(["model.norm.weight"], is_matrix=False, optimizer=settings) == GroupSettings(1.0, 0.0)
    fused_biases = ["model.layers.0.mlp.experts.down_proj_bias"]
    assert settings_of(fused_biases, is_matrix=True, optimizer=optimizer()).weight_decay == 0.0


def test_groups_that_cannot_be_are_refused() -> None:
    qkv = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    with pytest.raises(ConfigError, match="part of a fused parameter"):
        settings_of(qkv, is_matrix=True, optimizer=optimizer({"match": "q_proj", "lr_multiplier": 0.5}))
    check_groups(optimizer({"match": "embed"}, {"match": "gate"}), NAMES)
    with pytest.raises(ConfigError, match="takes no parameter") as error:
        check_groups(optimizer({"match": "gate"}, {"match": r"mlp\.gate"}), NAMES)
    assert "optimizer.groups.1.match" in str(error.value)


def test_only_routers_are_frozen() -> None:
    assert [is_frozen(name, LearnerConfig(freeze_router=True)) for name in NAMES] == [False, True, False]
    assert is_frozen("model.layers.0.mlp.router.bias", LearnerConfig(freeze_router=True))
    assert not any(is_frozen(name, LearnerConfig()) for name in NAMES)


def test_weight_decay_of_a_transformers_model_is_on_matrices_alone() -> None:
    model = tiny_model(0, TinyShape(layers=1, hidden=16, heads=1, kv_heads=1, head_dim=16, experts=2, expert_ffn=8))
    groups = adamw(model, optimizer({"match": r"mlp\.gate\.", "lr_multiplier": 0.5})).param_groups
    found = {id(parameter): group for group in groups for parameter in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        assert group["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0), name
        assert group["lr_multiplier"] == (0.5 if "mlp.gate." in name else 1.0), name
