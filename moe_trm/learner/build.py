"""The learner that the configuration names."""

from __future__ import annotations

from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner


def build_learner(config: Config) -> Learner:
    """The learner of this rank; only the chosen engine is imported.

    Collective: torch.distributed must be initialised on every rank.
    """
    if config.learner.backend == "deepspeed":
        from moe_trm.learner.deepspeed.build import build_deepspeed_learner

        return build_deepspeed_learner(config)
    from moe_trm.learner.megatron.cpu_shim import import_uncompiled

    import_uncompiled()
    from moe_trm.learner.megatron.build import build_megatron_learner

    return build_megatron_learner(config)


def close_learner(backend: str) -> None:
    """Tear down the groups of the learner that was built, so that another can be built in this process."""
    if backend == "deepspeed":
        from moe_trm.learner.deepspeed.build import close_learner as close
    else:
        from moe_trm.learner.megatron.build import close_learner as close
    close()
