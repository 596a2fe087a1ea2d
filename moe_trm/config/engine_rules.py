"""Rules between the rollout engine's capabilities and what the run wants of it. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.choices import wants_routes
from moe_trm.config.engines import KEY, traits_of
from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config, RolloutConfig
from moe_trm.errors import ConfigError
from moe_trm.methods.load import load_function


def unknown(rollout: RolloutConfig) -> Iterator[Problem]:
    """The reason why nothing is known of this engine, if there is one."""
    try:
        traits_of(rollout.engine)
    except ConfigError as error:
        yield Problem(KEY, error.what, got=str(error.got), expected=str(error.expected), fix=error.fix)


def refusals(config: Config) -> Iterator[Problem]:
    """Wishes of this run that the engine cannot fulfil, and the engine's own rules."""
    name, traits = config.rollout.engine, config.rollout.traits
    if traits.rules:
        yield from load_function(traits.rules, key=KEY)(config)
    if wants_routes(config) and not traits.records_routes:
        yield Problem(
            KEY,
            "this engine records no routes",
            got=f"{name} with replay.mode={config.replay.mode} and probe.every={config.probe.every}",
            expected="replay.mode=none or R2, and probe.every=0",
        )
    if config.keeps_masks and not traits.records_masks:
        yield Problem(
            "sampling_mask.mode",
            "this engine records no sampling masks",
            got=f"keep with rollout.engine={name}",
            expected="off",
        )
    if config.rollout.colocate and traits.has_weights and not traits.lends_memory:
        yield Problem(
            "rollout.colocate",
            "this engine does not lend its memory",
            got=f"true with rollout.engine={name}",
            expected="false",
        )
    if config.sync.method == "distributed" and traits.has_weights and not traits.broadcast_receivers:
        yield Problem(
            "sync.method",
            "this engine takes no broadcasts",
            got=f"distributed with rollout.engine={name}",
            expected="disk",
        )
    ranks = config.rollout.server.tensor_parallel
    if config.sync.method == "distributed" and traits.broadcast_to_one_rank and ranks > 1:
        yield Problem(
            "sync.method",
            f"a broadcast reaches {name} servers of one rank; others load folders",
            got=f"distributed with rollout.server.tensor_parallel={ranks}",
            expected="disk",
        )
