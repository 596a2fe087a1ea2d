"""Rules between the rows of an agent's sessions and methods that need one row of each sample. See
`moe_trm.config.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import AgentConfig, Config, RolloutConfig
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.losses import needs

FIX = "set agent.rows=last, or choose another method"


def refusals(config: Config) -> list[Problem]:
    """The reasons that these settings cannot work; empty when they can."""
    return list(_rows(config)) if several_rows(config.rollout, config.agent) else []


def several_rows(rollout: RolloutConfig, agent: AgentConfig) -> bool:
    """True where a sample may be several rows."""
    return rollout.agent is not None and agent.rows != "last"


def _rows(config: Config) -> Iterator[Problem]:
    rows, advantage = f"agent.rows={config.agent.rows}", config.advantage.name
    if "groups" in needs(config.loss.name):
        yield Problem(
            "loss.name",
            f"loss {config.loss.name} compares the samples of a prompt row by row, and a session may be several rows",
            got=f"{config.loss.name} with {rows}",
            expected="a loss that does not compare samples",
            fix=FIX,
        )
    if ADVANTAGES[advantage].level == "token" or ADVANTAGES[advantage].reads_ratios:
        yield Problem(
            "advantage.name",
            f"{advantage} compares samples along one row of each, and a session may be several rows",
            got=f"{advantage} with {rows}",
            expected="an advantage of samples or of turns",
            fix=FIX,
        )
    if config.advantage.zero_variance_scale:
        yield Problem(
            "advantage.zero_variance_scale",
            "the samples of a prompt are compared row by row, and a session may be several rows",
            got=f"{config.advantage.zero_variance_scale} with {rows}",
            expected="0",
            fix=FIX,
        )
    if config.kl.coef and config.kl.where == "reward":
        yield Problem(
            "kl.where",
            "the KL of a row would lower its reward alone, and a session's rows share one reward",
            got=f"reward with {rows}",
            expected="loss",
            fix="set kl.where=loss",
        )
