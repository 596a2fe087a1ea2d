"""Losses of routers that cannot act are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.learner.dense import check_routes

KEYS = ("router_aux_coef", "router_z_coef")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("learner", "where"),
    [
        ({"freeze_router": True}, "learner.freeze_router"),
        ({"lora": {"rank": 4, "targets": ["attention"]}}, "learner.lora.targets"),
    ],
)
def test_routers_that_do_not_train(key: str, learner: dict[str, Any], where: str) -> None:
    config = Config.model_validate({"model": {"checkpoint": "a"}, "learner": learner, "loss": {key: 0.01}})
    [problem] = [problem for problem in refusals(config) if f"loss.{key}" in problem.got]
    assert problem.key == where
    without = config.model_copy(update={"loss": config.loss.model_copy(update={key: 0.0})})
    assert not [problem for problem in refusals(without) if problem.key == where]


def test_adapters_on_routers_have_them() -> None:
    learner = {"lora": {"rank": 4, "targets": ["attention", "router"]}}
    config = Config.model_validate(
        {"model": {"checkpoint": "a"}, "learner": learner, "loss": {"router_aux_coef": 0.01}}
    )
    assert not [problem for problem in refusals(config) if "router_aux_coef" in problem.got]


@pytest.mark.parametrize("key", KEYS)
def test_dense_models_have_no_routers(key: str) -> None:
    settings = {"model": {"checkpoint": "a"}, "replay": {"mode": "none"}, "probe": {"every": 0}, "loss": {key: 0.01}}
    with pytest.raises(ConfigError, match="a loss of routers needs a mixture of experts") as error:
        check_routes(
            ("none", "as configured"), Config.model_validate(settings).loss, 0, "Qwen3ForCausalLM", is_moe=False
        )
    assert f"loss.{key}" in str(error.value)
