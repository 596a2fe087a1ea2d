"""Models that the servers of an engine cannot serve: refused alike by the planner, the doctor and every start.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.engines import KEY
from moe_trm.config.schema import RolloutConfig
from moe_trm.methods.load import load_function


def check_served(
    full_config: Mapping[str, Any],
    where: str,
    rollout: RolloutConfig,
    *,
    masks: bool,
    exact: bool,
    pictures: bool,
    cuda: bool,
) -> None:
    """Refuse a model that the engine of `rollout` cannot serve, by the rules that its traits name.

    Args:
        full_config: config.json as it is.
        where: its file.
        rollout: the engine and its server.
        masks, exact, pictures: as of `Served`.
        cuda: the server that the run starts computes on CUDA.

    Raises:
        ConfigError: a setting that does not go with this model.
        CheckpointError: a model that this engine would serve as another one, or not at all.
    """
    if rollout.traits.has_servers and rollout.traits.model_rules:
        check = load_function(rollout.traits.model_rules, key=KEY)
        check(full_config, where, rollout, masks=masks, exact=exact, pictures=pictures, cuda=cuda)
