"""The address at which an agent finds the policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_trm.config.schema.section import Positive, Section

AgentRows = Literal["last", "trajectory", "turns"]


class AgentConfig(Section):
    """OpenAI's and Anthropic's interfaces to the policy, for `rollout.agent` (docs/agents.md)."""

    rows: AgentRows = "last"
    """Part of a session that is trained. `last`: the branch of the last answer, one row; what was sampled elsewhere is
    counted and left out. `trajectory`: every branch, one row for each; what branches share is scored in the first.
    `turns`: one row for each answer, with its history as context. A session is one member of its group, and one
    sequence of the loss, in all of them."""
    tool_parser: str | None = None
    """Form of the model's tool calls: a name of SGLang's `--tool-call-parser`, e.g. `qwen25`, or a function of your
    own, `path/to/file.py:function`. None: requests with tools are refused."""
    reasoning_parser: str | None = None
    """Form of the model's reasoning: a name of SGLang's `--reasoning-parser`, e.g. `qwen3`, or a function of your
    own, `path/to/file.py:function`. None: reasoning stays in the content of answers."""
    model_names: list[str] = []
    """Names of the policy beside `policy`, for an agent that has one in its code, e.g. `[gpt-5.5]`. Requests for other
    models are refused."""
    host: str = "127.0.0.1"
    """Address of this machine to listen at; every session has a key. Agents run beside the controller, so only what
    they start elsewhere needs another one."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port; 0: any free one."""
    max_body_bytes: Positive = 16777216
    """Longest body of a request."""
    max_commands: Positive = 128
    """Command lines of `rollout.agent` that run at the same time. The others wait, and their time has not begun."""
    max_output_bytes: Positive = 16777216
    """Most that one command line may print. A sample whose command prints more is rejected (`rollout_output`)."""
