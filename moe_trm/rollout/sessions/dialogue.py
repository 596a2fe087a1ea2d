"""The run's end of a `Session`: what a rollout function asks for, done to one `Conversation` with the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from moe_trm.errors import MoeTrmError
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.runtime.child import Refused
from moe_trm.types import Prompt, SampledTurn, SamplingParams


class TurnEngine(Protocol):
    """The part of `RolloutEngine` that is needed here."""

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """See `RolloutEngine.turn`."""


class TurnTokens(Protocol):
    """The part of `Tokens` that is needed here."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode_plain(self, text: str) -> tuple[int, ...]: ...

    def encode_continuation(self, messages: Sequence[Mapping[str, str]], last_token: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Limits:
    """Limits of one sample: answers, and tokens in all (prompt, answers and appended tokens)."""

    turns: int
    tokens: int


class Dialogue:
    """Serves one call of a rollout function; `await dialogue(op, arguments)` is an `Answerer`.

    The conversation begins at `prompt` and ends at `limits`. A function may add stop tokens to `params`, and ask for
    fewer tokens. `bare`: sample without recording routes and masks, for an evaluation.
    """

    def __init__(
        self,
        prompt: Prompt,
        engine: TurnEngine,
        tokens: TurnTokens,
        params: SamplingParams,
        limits: Limits,
        *,
        bare: bool,
    ) -> None:
        self.conversation = Conversation(prompt)
        self._engine, self._tokens, self._params, self._limits, self._bare = engine, tokens, params, limits, bare
        self._sampling = False
        self.ended = False
        """A further answer was asked for and did not fit."""

    @property
    def finish_reason(self) -> str | None:
        """The end of the dialogue: `length` at a limit, else None, and the last answer has the reason."""
        return "length" if self.ended else None

    async def __call__(self, op: str, arguments: Mapping[str, Any]) -> Any:
        """Serve one request of the function.

        Raises `Refused` for requests that are not allowed, and `RecordRejected` and `EngineError` as
        `RolloutEngine.turn` does.
        """
        if self._sampling:
            raise Refused(
                "usage", "one request at a time: await the answer before anything else is appended or sampled"
            )
        if op == "sample":
            return await self._sample(arguments["stop"], arguments["max_new_tokens"])
        if op == "append":
            self.conversation.append(self._encoded(arguments["text"]))
        elif op == "append_ids":
            self.conversation.append(self._checked(arguments["token_ids"]))
        else:
            self.conversation.append(self._messages(arguments["messages"]))
        return None

    async def _sample(self, stop: Sequence[str], max_new_tokens: int | None) -> dict[str, Any]:
        stops = {self._one_token(text): text for text in stop}
        room = self._limits.tokens - len(self.conversation.tokens)
        if len(self.conversation.turns) >= self._limits.turns or room < 1:
            self.ended = True
            raise Refused(
                "ended",
                f"{len(self.conversation.turns)} turns, {len(self.conversation.tokens)} tokens: a limit is reached",
            )
        if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
            raise Refused("usage", f"max_new_tokens is a positive number, not {max_new_tokens!r}")
        params = replace(
            self._params,
            max_new_tokens=min(self._params.max_new_tokens, room, max_new_tokens or self._params.max_new_tokens),
            stop_token_ids=(
                *self._params.stop_token_ids,
                *(token for token in stops if token not in self._params.stop_token_ids),
            ),
        )
        self._sampling = True
        try:
            turn = await self._engine.turn(
                self.conversation.tokens, params, start=self.conversation.known_rows, bare=self._bare
            )
        finally:
            self._sampling = False
        self.conversation.add(turn)
        token_ids = turn.tokens.tolist()
        return {
            "text": self._tokens.decode(token_ids),
            "token_ids": token_ids,
            "finish_reason": turn.finish_reason,
            "stopped_by": stops.get(token_ids[-1]) if turn.finish_reason == "stop" else None,
        }

    def _encoded(self, text: object) -> tuple[int, ...]:
        if not isinstance(text, str):
            raise Refused("usage", f"only text can be appended, not a {type(text).__name__}")
        return self._tokens.encode_plain(text)

    def _checked(self, token_ids: Sequence[object]) -> list[int]:
        ids = [token for token in token_ids if isinstance(token, int) and 0 <= token < self._tokens.vocab_size]
        if len(ids) != len(token_ids):
            raise Refused("usage", f"token ids are numbers from 0 to {self._tokens.vocab_size - 1}")
        return ids

    def _one_token(self, text: object) -> int:
        ids = self._encoded(text)
        if len(ids) != 1:
            raise Refused("usage", f"a stop text is one token; {text!r} is {len(ids)}")
        return ids[0]

    def _messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        if not self.conversation.turns:
            raise Refused("usage", "messages follow an answer of the policy; the prompt itself comes from the task")
        try:
            return self._tokens.encode_continuation(messages, self.conversation.tokens[-1])
        except MoeTrmError as error:
            raise Refused("usage", str(error)) from error
