"""Rules between the rows of an agent's sessions and methods that need one row of each sample. See
`moe_trm.config.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import AdvantageConfig, AgentConfig, Config, KlConfig, LossConfig, RolloutConfig
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.losses import needs

FIX = "set agent.rows=last, or choose another method"


def refusals(config: Config) -> list[Problem]:
    """The reasons that these settings cannot work; empty when they can."""
    several = several_rows(config.rollout, config.agent)
    return list(_rows(config.agent, config.advantage, config.loss, config.kl)) if several else []


def several_rows(rollout: RolloutConfig, agent: AgentConfig) -> bool:
    """True where a sample may be several rows."""
    return rollout.agent is not None and agent.rows != "last"


def _rows(agent: AgentConfig, advantage: AdvantageConfig, loss: LossConfig, kl: KlConfig) -> Iterator[Problem]:
    rows, name = f"agent.rows={agent.rows}", advantage.name
    if "groups" in needs(loss.name):
        yield Problem(
            "loss.name",
            f"loss {loss.name} compares the samples of a prompt row by row, and a session may be several rows",
            got=f"{loss.name} with {rows}",
            expected="a loss that does not compare samples",
            fix=FIX,
        )
    if ADVANTAGES[name].level == "token" or ADVANTAGES[name].reads_ratios:
        yield Problem(
            "advantage.name",
            f"{name} compares samples along one row of each, and a session may be several rows",
            got=f"{name} with {rows}",
            expected="an advantage of samples or of turns",
            fix=FIX,
        )
    if advantage.zero_variance_scale:
        yield Problem(
            "advantage.zero_variance_scale",
            "the samples of a prompt are compared row by row, and a session may be several rows",
            got=f"{advantage.zero_variance_scale} with {rows}",
            expected="0",
            fix=FIX,
        )
    if kl.coef and kl.where == "reward":
        yield Problem(
            "kl.where",
            "the KL of a row would lower its reward alone, and a session's rows share one reward",
            got=f"reward with {rows}",
            expected="loss",
            fix="set kl.where=loss",
        )
