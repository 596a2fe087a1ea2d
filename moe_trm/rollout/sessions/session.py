"""Session of a user's rollout function: its conversation with the policy.

This file is all it needs; it imports no engine.

    async def rollout(session: Session) -> None:
        while (turn := await session.sample(stop=("=",))).stopped_by == "=":
            await session.append(answer_of(turn.text))

Every id the policy samples is recorded as it was sampled: with its log-prob, sampling mask, routes, weight version and
turn. Nothing is tokenised again. Appended text is tokenised alone, replayed through the learner's routers, and never
scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

from moe_trm.errors import ConfigError
from moe_trm.runtime.child_service import Asker
from moe_trm.runtime.functions.hosted import FunctionSettings, Hosted, is_async


class SessionEnded(Exception):
    """No further answer fits: `rollout.max_turns` or `rollout.max_tokens` is reached.

    Let it pass, or catch it to return a reward. Either way the sample is kept as it is, as unfinished (finish reason
    `length`).
    """


class SessionError(ValueError):
    """The session was asked for something that cannot be done.

    Let it pass and the sample is rejected as `rollout_error`.
    """


@dataclass(frozen=True)
class SessionPrompt:
    """The prompt: its id, text and token ids, the expected answer, and the other fields of its prompt-file row."""

    prompt_id: str
    text: str
    answer: str
    token_ids: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One answer of the policy.

    Attributes:
        text: special tokens left out, a stop text of yours included.
        token_ids: all of it, as sampled.
        finish_reason: `stop`, or `length` when it was cut.
        stopped_by: the text of `stop` that ended it; None when the model's own end token did, or nothing.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    stopped_by: str | None


class Session:
    """One sample in the making. Every method raises `SessionError` for arguments that make no sense.

    Attributes:
        prompt: where it begins.
        turns: the answers so far.
    """

    def __init__(self, prompt: SessionPrompt, ask: Asker) -> None:
        self.prompt = prompt
        self.turns: list[Turn] = []
        self._ask = ask

    async def sample(self, *, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Turn:
        """Let the policy continue until it ends its answer, writes one of `stop`, or reaches a limit.

        `stop` are texts of one token each; the token is recorded and trained like any other. `max_new_tokens` is at
        most `rollout.max_new_tokens`, its default. Raises `SessionEnded` where no further turn or token is allowed.
        """
        turn = await self._ask("sample", {"stop": list(stop), "max_new_tokens": max_new_tokens})
        self.turns.append(Turn(turn["text"], tuple(turn["token_ids"]), turn["finish_reason"], turn["stopped_by"]))
        return self.turns[-1]

    async def append(self, text: str) -> None:
        """Add text that the policy did not write, e.g. a tool's answer.

        It is tokenised alone, without a beginning token.
        """
        await self._ask("append", {"text": text})

    async def append_ids(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy did not write."""
        await self._ask("append_ids", {"token_ids": [index(token) for token in token_ids]})

    async def append_messages(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Add messages (`role`, `content`) in the chat template's form.

        It closes the answer before and opens the next one.

        An end token that the policy sampled itself is not written twice.
        """
        await self._ask("append_messages", {"messages": [dict(message) for message in messages]})


Rollout = Callable[[Session], Any]
"""An async function.

It returns None, and the task gives the reward; or a number, or a dict of named numbers, which is the reward.
"""


def adapt(function: Rollout, settings: FunctionSettings) -> Hosted:
    """See `moe_trm.runtime.functions.hosted`. Raises `ConfigError` for a function that does not await."""
    if not is_async(function):
        raise ConfigError(
            "a rollout function has to await its session",
            where=f"config key {settings.key}",
            got=f"{settings.function} is not an async function",
            expected="async def rollout(session)",
        )

    async def call(payload: Any, ask: Asker) -> Any:
        session = Session(SessionPrompt(**(payload | {"token_ids": tuple(payload["token_ids"])})), ask)
        try:
            return await function(session)
        except SessionEnded:
            return None

    return Hosted(call, errors={"ended": SessionEnded, "usage": SessionError})
