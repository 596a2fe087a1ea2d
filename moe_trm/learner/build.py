"""From configuration to a learner; everything that can be refused is refused before a tensor is loaded."""

from __future__ import annotations

from importlib.metadata import version

from moe_trm.config.schema import Config
from moe_trm.learner.megatron.layout import check_layout, check_vocabulary, read_hf_config
from moe_trm.learner.protocol import Learner
from moe_trm.objective import Objective


def check_launch(config: Config, *, world_size: int) -> None:
    """Raise `ConfigError` or `CheckpointError` with the reason when this run cannot work; loads nothing."""
    hf_config = read_hf_config(config.model.checkpoint)
    check_layout(config, version("megatron-core"), hf_config, world_size=world_size)
    check_vocabulary(config.model.checkpoint, int(hf_config["vocab_size"]))
    Objective(config)


def build_learner(config: Config) -> Learner:
    """The learner of this rank. Collective: torch.distributed must be initialised on every rank."""
    from moe_trm.learner.megatron.build import build_megatron_learner

    return build_megatron_learner(config)
