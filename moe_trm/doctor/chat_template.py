"""A check that the policy's chat template lets sessions of several answers go on behind the sampled ids."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.schema import AgentConfig, ModelConfig, RolloutConfig
from moe_trm.doctor.checks import Check, attempt
from moe_trm.rollout.agents.continuity import cut, situations
from moe_trm.rollout.agents.template import ChatTemplate
from moe_trm.tasks.tokens import Tokens

NAME = "chat template"


def chat_template(rollout: RolloutConfig, model: ModelConfig, agent: AgentConfig) -> Iterator[Check]:
    """The check of a run with an agent; none elsewhere."""
    if rollout.agent is not None:
        yield attempt(NAME, lambda: look(model, agent))


def look(model: ModelConfig, agent: AgentConfig) -> Check:
    """Each situation in which ids go on, and each in which a branch is cut. Raises `CheckpointError`."""
    tokens = Tokens(model.checkpoint)
    if not tokens.has_chat_template:
        return Check(NAME, "skip", "the tokenizer has none; completions go on behind the sampled ids without it")
    thinks = agent.reasoning_parser is not None
    found = situations(ChatTemplate(tokens), tools=agent.tool_parser is not None, thinks=thinks)
    going = "goes on behind the sampled ids at " + ", ".join(one.name for one in found if not one.why)
    lines = [f"begins another branch at {one.name}: {one.why}" for one in cut(found)]
    return Check(
        NAME,
        "warn" if lines else "ok",
        "\n".join([going, *lines] if len(lines) < len(found) else lines),
        "agent/cut counts such branches, and agent.rows says what of them is trained (docs/agents.md)" if lines else "",
    )
