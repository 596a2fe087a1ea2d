"""Models and layouts that a learner does not train: refused alike by the planner, the doctor and every start.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.learner.deepspeed.settings import check_model
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.models.quantisation import quantisation_of
from moe_trm.models.registry import find_family


def check_trained(config: Config, hf: Mapping[str, Any], where: str, *, megatron: str, world_size: int) -> None:
    """Refuse a model or a layout that the configured learner cannot train, from config.json alone.

    Args:
        config: the whole run.
        hf: config.json of the text.
        where: its file.
        megatron: version of Megatron-Core.
        world_size: learner ranks.

    Raises:
        ConfigError: a layout or combination that is refused.
        CheckpointError: a model that this learner does not support, or weights in a form that is not read here; on
            DeepSpeed, a family without a description here for which replay is not exact (`check_proved`).
    """
    if config.learner.backend == "deepspeed":
        check_model(config, hf)
        if config.task.has_pictures and not config.learner.freeze_vision:
            _check_vision(world_size)
    else:
        check_layout(config, megatron, hf, world_size=world_size)
    quantisation_of(hf, where)
    if config.learner.backend == "deepspeed":
        check_proved(hf, where)


def check_proved(hf: Mapping[str, Any], where: str) -> None:
    """The proof of the DeepSpeed learner for a family that has no description here, before anything is started.

    Raises `CheckpointError` as `conformance.check_conformance`, which needs torch.
    """
    if find_family(hf) is None:
        from moe_trm.learner.deepspeed.conformance import check_conformance

        check_conformance(hf, where)


def _check_vision(world_size: int) -> None:
    """DeepSpeed adds gradients up in the order in which they come, and of rows of text the tower has none."""
    if world_size > 1:
        raise ConfigError(
            "ranks whose rows have no pictures would add their gradients to those of other weights",
            where="config key learner.freeze_vision",
            got=f"false on {world_size} ranks",
            expected="true, or one rank",
            fix="Set learner.freeze_vision=true.",
        )
