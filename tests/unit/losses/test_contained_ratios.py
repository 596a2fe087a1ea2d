"""Ratios that a loss contains: as declared, as differentiated, and refused to rules that would count them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_trm import losses
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs
from moe_trm.methods.losses import LOSSES
from moe_trm.methods.ratios import RATIO_NAMES
from moe_trm.ratios import LogRatios
from moe_trm.step.recipe import recipe
from tests.unit.losses.every_field import with_every_field

PARTS = ("engine", "lag", "update")
PARAMETERS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.9, "clip_high": 9.0},
    "gspo_token": {"clip_low": 0.9, "clip_high": 9.0},
    "tbpo": {"clip_low": 0.9, "clip_high": 9.0, "dual_high": 9.0},
    "ctpo": {"low": 9.0, "high": 9.0, "dual": 9.0},
    "dispo": {"incorrect_high": 4.0},
    "topr": {"high": 9.0},
    "dppo_tv": {"bound_low": 9.0, "bound_high": 9.0},
    "dppo_kl": {"bound_low": 9.0, "bound_high": 9.0},
}
"""Wide clips: what a loss cuts off hides what it contains."""


def config(loss: str, rules: list[dict[str, Any]], **parameters: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "none"},
            "pipeline": {"mode": "async"},
            "loss": {"name": loss, "parameters": parameters},
            "correction": {"rules": rules},
        }
    )


def slope(loss: str, moved: str | None, ratio: str) -> torch.Tensor:
    """Derivative by each log-prob, where one part of the log-ratio is 0.1 and the others are 0."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    current = torch.full((2, 3), -1.0).requires_grad_()
    steps = {name: 0.1 * (name == moved) for name in PARTS}
    proximal = current.detach() - steps["update"]
    behavior = proximal - steps["lag"]
    ratios = LogRatios(behavior - steps["engine"], behavior, current, mask, proximal)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    inputs = LossInputs(ratios, current, advantages, weights=mask.float(), keep=mask)
    inputs = with_every_field(inputs, torch.full((2, 3), -1.2))
    values = losses.get(loss)(inputs, ratio=ratio, **PARAMETERS.get(loss, {})).values
    return torch.autograd.grad(values[mask].sum(), current)[0]


@pytest.mark.parametrize("ratio", ["update", "total"])
@pytest.mark.parametrize("loss", losses.names())
def test_what_a_loss_declares_is_what_its_gradient_depends_on(loss: str, ratio: str) -> None:
    parameters = PARAMETERS.get(loss, {})
    still = slope(loss, None, ratio)
    found = {part for part in PARTS if not torch.allclose(slope(loss, part, ratio), still, rtol=1e-3)}
    assert losses.get(loss).bind(ratio=ratio, **parameters).contains == frozenset(found)
    assert losses.get(loss).holds == LOSSES[loss].holds
    assert losses.get(loss).ratio == LOSSES[loss].ratio


@pytest.mark.parametrize("loss", ["minirl", "capped_ratio", "dppo_tv", "dppo_kl", "vespo", "topr", "ipo_tv"])
def test_a_ratio_is_never_counted_twice(loss: str) -> None:
    """At an engine ratio of 1.5 the coefficient would be 2.25."""
    for preset in ("decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop"):
        settings = config(loss, []).model_dump()
        settings["correction"]["preset"] = preset
        with pytest.raises(ConfigError, match="twice") as refused:
            recipe(Config.model_validate(settings))
        assert loss in str(refused.value)
    for ratio in RATIO_NAMES:
        with pytest.raises(ConfigError, match="counted twice"):
            recipe(config(loss, [{"name": "token_tis", "thresholds": {"ratio": ratio}}]))
        with pytest.raises(ConfigError, match="counted twice"):
            recipe(config(loss, [{"name": "icepop", "thresholds": {"ratio": ratio}}]))
    with pytest.raises(ConfigError, match="counted twice"):
        recipe(config(loss, [{"name": "token_tis", "target_reject_rate": 0.1}]))


def test_what_only_rejects_or_reads_another_part_is_allowed() -> None:
    for loss in ("minirl", "vespo"):
        recipe(config(loss, [{"name": "trm_max", "thresholds": {"max_kl": 0.5}}]))
        recipe(config(loss, [{"name": "icepop", "thresholds": {"weight": "one"}}]))
    for ratio in ("engine", "lag", "merged"):
        recipe(config("ppo_clip", [{"name": "token_tis", "thresholds": {"ratio": ratio}}]))
        recipe(config("dppo_tv", [{"name": "token_tis", "thresholds": {"ratio": ratio}}], ratio="update"))
    for ratio in ("update", "staleness", "total"):
        with pytest.raises(ConfigError, match="counted twice"):
            recipe(config("ppo_clip", [{"name": "token_tis", "thresholds": {"ratio": ratio}}]))
        recipe(config("reinforce", [{"name": "token_tis", "thresholds": {"ratio": ratio}}]))


def test_two_weighing_rules_do_not_count_a_part_twice_either() -> None:
    rules: list[dict[str, Any]] = [{"name": "token_tis", "thresholds": {"ratio": "engine"}}, {"name": "seq_tis"}]
    with pytest.raises(ConfigError, match="counted twice"):
        recipe(config("ppo_clip", rules))
    recipe(config("ppo_clip", [rules[0], {"name": "seq_tis", "thresholds": {"ratio": "lag"}}]))
