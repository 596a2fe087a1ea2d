"""One request to a server and the reading of its answer, as intake processes do it.

The controller does the same without them: it asks through its own connections, and calls `read`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moe_trm.rollout.intake.messages import IntakeSettings
from moe_trm.rollout.intake.reading import Reading
from moe_trm.rollout.intake.room import Room, Visit
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.continuation import settled
from moe_trm.rollout.sglang.http import EngineHttp
from moe_trm.rollout.sglang.parse import Wanted, parse_turn
from moe_trm.rollout.sglang.served import ServedModel
from moe_trm.tasks.rewards import written_text
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, SamplingParams

GENERATE = "/generate"


class Whole(msgspec.Struct, frozen=True):
    """The parts that make a whole sample of an answer: the reading has its record then."""

    sample_id: int
    group_id: int
    prompt_id: str
    params: SamplingParams
    keep_changed: bool


class Request(msgspec.Struct, frozen=True):
    """One request to an engine, and how its answer is read.

    `body` is the JSON. `start` is the first row of the routes that it asks for.
    """

    body: dict[str, Any]
    wanted: Wanted
    start: int = 0
    whole: Whole | None = None


class ReaderSettings(msgspec.Struct, frozen=True):
    """What a reader is made of.

    `timeout_s` and `max_attempts` are those of a request; `tokenizer` is a checkpoint's folder, empty for none.
    """

    model: ServedModel
    api_key: str | None
    timeout_s: float
    max_attempts: int
    tokenizer: str = ""


def intake_settings(settings: ReaderSettings) -> IntakeSettings:
    """Those of processes that read with `SglangReader`."""
    return IntakeSettings(f"{__name__}:{SglangReader.__name__}", settings)


def read(body: bytes, request: Request, model: ServedModel, tokens: Tokens | None) -> Reading:
    """Parse and check one answer of SGLang's `/generate`. Pure.

    Raises `RecordRejected` as `parse_turn` and `Conversation.record` do.
    """
    context, whole = request.body["input_ids"], request.whole
    turn = parse_turn(body, context, model, request.wanted, start=request.start)
    if whole is None or (finished := settled(turn, whole.params)).finish_reason == "abort":
        return Reading(turn, turn.retracted)
    conversation = Conversation(Prompt(whole.prompt_id, tuple(context)))
    conversation.add(finished)
    record = conversation.record(sample_id=whole.sample_id, group_id=whole.group_id, keep_changed=whole.keep_changed)
    written = written_text(tokens, len(context), record) if tokens is not None else None
    return Reading(record, turn.retracted, written)


class SglangReader:
    """`Reader` of SGLang's answers. One event loop owns it."""

    def __init__(self, settings: Any) -> None:
        self._settings = msgspec.convert(settings, ReaderSettings)
        self._tokens = Tokens(self._settings.tokenizer) if self._settings.tokenizer else None
        self._servers: dict[str, EngineHttp] = {}
        self._room = Room()

    async def read(self, url: str, asked: Any) -> Reading:
        """See `Reader.read`."""
        request = msgspec.convert(asked, Request)
        async with Visit(self._room) as visit:
            body = await self._server(url).request("POST", GENERATE, request.body, admit=visit.enter)
            return read(body, request, self._settings.model, self._tokens)

    def _server(self, url: str) -> EngineHttp:
        if url not in self._servers:
            settings = self._settings
            self._servers[url] = EngineHttp(
                url, settings.api_key, timeout_s=settings.timeout_s, max_attempts=settings.max_attempts
            )
        return self._servers[url]
