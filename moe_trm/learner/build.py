"""The learner that the configuration names."""

from __future__ import annotations

from moe_trm.config.schema import Config
from moe_trm.learner.megatron.build import build_megatron_learner
from moe_trm.learner.protocol import Learner


def build_learner(config: Config) -> Learner:
    """The learner of this rank. Collective: torch.distributed must be initialised on every rank."""
    return build_megatron_learner(config)
