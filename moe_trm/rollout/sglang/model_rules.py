"""Models that SGLang cannot serve here. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import refuse_together
from moe_trm.models.hf_config import text_config
from moe_trm.rollout.servers.indexers import check_indexer
from moe_trm.rollout.sglang.served_differences import (
    check_cpu_kernels,
    check_cuda_kernels,
    check_epsilons,
    check_intervals,
    check_layers,
    check_options,
    check_vision_levels,
)
from moe_trm.rollout.sglang.start_folder import check_quantised


def check_model(
    full_config: Mapping[str, Any],
    where: str,
    rollout: RolloutConfig,
    *,
    masks: bool,
    exact: bool,
    pictures: bool,
    cuda: bool,
) -> None:
    """See `check_served`, `check_quantised` of `start_folder`, and each `check_*` of `served_differences`."""
    hf, server = text_config(full_config), rollout.server
    repeats = server.deterministic or exact

    def kernels() -> None:
        if cuda and rollout.starts_server:
            check_cuda_kernels(hf, server.dtype, where, deterministic=repeats)
        elif rollout.starts_server:
            check_cpu_kernels(hf, where)

    refuse_together(
        lambda: check_quantised(rollout, hf, where),
        lambda: check_indexer(hf, where),
        lambda: check_intervals(hf, where),
        lambda: check_layers(hf, where),
        lambda: check_options(hf, where),
        lambda: check_epsilons(hf, where),
        lambda: check_vision_levels(full_config, where) if pictures else None,
        kernels,
    )
