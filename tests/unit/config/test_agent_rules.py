"""Rows of sessions beside the methods that cannot take them, and settings that agents may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.batch.plan import compares_groups
from moe_trm.config import InvalidConfigError, load
from moe_trm.config.agent_rules import several_rows
from moe_trm.config.rules import warnings
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from tests.unit.sections import sections_of

AGENT = "rollout.agent=examples/agent/agent.py:run"
POST_TOOL = "correction.rules=[{name: token_tis, thresholds: {tokens: post_tool}}]"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("model: {checkpoint: none}\n")
    return path


@pytest.mark.parametrize("rows", ["trajectory", "turns"])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["loss.name=oapl"], "loss.name"),
        (["loss.name=r2vpo_clip"], "loss.name"),
        (["advantage.name=otb"], "advantage.name"),
        (["advantage.name=opob"], "advantage.name"),
        (["kl.coef=0.1", "kl.where=reward"], "kl.where"),
        (["advantage.zero_variance_scale=0.1"], "advantage.zero_variance_scale"),
    ],
)
def test_what_needs_one_row_of_each_sample_is_refused(file: Path, rows: str, settings: list[str], key: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"agent.rows={rows}") as refused:
        load(file, [AGENT, f"agent.rows={rows}", *settings])
    assert key in str(refused.value)
    load(file, [AGENT, "agent.rows=last", *settings])


@pytest.mark.parametrize(
    "settings",
    [
        ["advantage.name=turn_grpo"],
        ["advantage.name=gdpo"],
        ["advantage.name=opo"],
        ["loss.name=gspo"],
        ["loss.name=turn_ppo"],
        ["loss.aggregation=seq-mean-token-mean"],
        ["kl.coef=0.1", "kl.where=loss", "kl.estimator=k3"],
        ["pipeline.mode=async", "pipeline.behavior=merged"],
        [POST_TOOL],
    ],
)
def test_what_takes_rows_is_allowed(file: Path, settings: list[str]) -> None:
    load(file, [AGENT, "agent.rows=turns", *settings])


def test_agents_have_turns_and_tools(file: Path) -> None:
    """Rules and advantages by turn are neither refused nor idle."""
    load(file, [AGENT, POST_TOOL])
    told = warnings(load(file, [AGENT, "advantage.name=turn_grpo"]))
    assert not [line for line in told if "advantage.name" in line]
    with pytest.raises(InvalidConfigError, match=r"rollout\.agent=null"):
        load(file, [POST_TOOL])


def test_rows_without_an_agent_are_idle(file: Path) -> None:
    config = load(file, ["agent.rows=turns", "loss.name=oapl"])
    assert not several_rows(config.rollout, config.agent)
    assert "agent.rows has no effect: rollout.agent is not set" in warnings(config)


def test_a_loss_of_the_users_own_that_compares_samples_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from moe_trm.losses.loss import loss\n"
        "@loss(aggregation='token-mean', scope='batch', needs=['groups'])\n"
        "def mine(inputs, log_ratio): ...\n",
        encoding="utf-8",
    )
    settings = {"model": {"checkpoint": "none"}, "loss": {"name": f"{own}:mine"}, "rollout": {"agent": "a.py:run"}}
    assert compares_groups(*sections_of(Config.model_validate(settings), "loss", "rollout", "agent"))
    with pytest.raises(ConfigError, match="row by row"):
        compares_groups(
            *sections_of(Config.model_validate({**settings, "agent": {"rows": "turns"}}), "loss", "rollout", "agent")
        )
