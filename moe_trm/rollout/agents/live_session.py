"""One sample's session while its agent runs: requests in, answers of the engine into the tree. No HTTP here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from moe_trm.errors import CheckpointError, RecordRejected
from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.messages import Message
from moe_trm.rollout.agents.parameters import MODEL
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.request import (
    ChatRequest,
    CompletionRequest,
    Request,
    RequestOptions,
    one_token_stops,
)
from moe_trm.rollout.agents.template import ChatTemplate, TooLongError
from moe_trm.rollout.agents.tree import Context, Node, SessionTree
from moe_trm.rollout.agents.turn_boundary import TextAnswer, cut_at_stop
from moe_trm.rollout.sessions.dialogue import Limits, TurnEngine
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import SampledTurn, SamplingParams

MAX_IN_FLIGHT = 64
"""Requests of one session at the same time; a further one is told to come again."""
MAX_REFUSED = 200
"""Requests of one session that are refused; one more rejects its sample."""

Tools = tuple[Mapping[str, Any], ...]
T = TypeVar("T")
_LANGUAGE = ThreadPoolExecutor(1, "agents' text")
"""Templates, tokenizer and parsers work here, one after the other: a long text must not stop the controller."""


async def beside(work: Callable[[], T]) -> T:
    """The value of `work`, which takes texts of agents and may take long; the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_LANGUAGE, work)


@dataclass(frozen=True)
class Policy:
    """Parts that all sessions of a run share: engine, tokenizer, reader of answers, and the limits of each."""

    engine: TurnEngine
    tokens: Tokens
    reader: AnswerReader
    limits: Limits
    model_names: Collection[str] = (MODEL,)


class LiveSession:
    """Answers an agent's requests until it is closed. A request may add stop tokens to `params`, and ask for fewer
    tokens.

    `bare`: sample without recording routes and masks, for an evaluation.
    """

    def __init__(self, policy: Policy, params: SamplingParams, *, bare: bool) -> None:
        self._policy, self.params, self._bare = policy, params, bare
        self._template = ChatTemplate(policy.tokens, policy.limits.tokens)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that ends the sample, whatever the agent makes of it."""
        self.restart()

    def restart(self) -> None:
        """Begin again with nothing said, as a call of the agent does that is repeated."""
        self.close()
        self.tree = SessionTree(self._template)
        self.counts: Counter[str] = Counter()
        self.kept: dict[str, tuple[Message, ...]] = {}
        """Conversations up to an answer, by the name of the answer."""
        self._num_started = self._calls = 0
        self.ended = False
        """A further answer was asked for and did not fit."""

    def close(self) -> None:
        """Give up the answers in flight."""
        for task in self._tasks:
            task.cancel()

    @property
    def reads_calls(self) -> bool:
        """True when tool calls can be found in answers."""
        return self._policy.reader.reads_calls

    @property
    def model_names(self) -> Collection[str]:
        """Names of the policy in requests."""
        return self._policy.model_names

    @property
    def vocabulary(self) -> Tokens:
        """The tokenizer."""
        return self._policy.tokens

    async def answer(self, request: Request, name: str) -> Node:
        """The policy's answer, which a later request may refer to by its `name`. Raises `ApiError`."""
        tree = self.tree
        if isinstance(request, CompletionRequest):
            prompt = request.prompt
            context = await self._written(lambda: tree.completion(prompt))
            return await self._sampled(context, request.options, None)
        context = await self._written(self._chat(request))
        node = await self._sampled(context, request.options, request.template.tools)
        if request.kept is not None and node.answer.message is not None:
            # The tree's own messages: it keeps each of them once.
            messages = node.context.messages or ()
            self.kept[name] = (*messages[len(messages) - len(request.kept) :], node.answer.message)
        return node

    async def count(self, request: ChatRequest) -> int:
        """The tokens that the policy would be given. Raises `ApiError`."""
        context = await self._written(self._chat(request), ends=False)
        return context.num_tokens

    def _chat(self, request: ChatRequest) -> Callable[[], Context]:
        tree, reader, tools = self.tree, self._policy.reader, request.template.tools
        return lambda: tree.chat(request.messages, request.template, lambda text: reader(text, tools))

    def refuse(self) -> None:
        """Count a refusal. Very many of them are a fault of the agent, and cost its sample."""
        self.counts["refused"] += 1
        if self.counts["refused"] > MAX_REFUSED:
            self.fail(
                RecordRejected(
                    "rollout_flood",
                    "the agent goes on with requests that are refused",
                    got=f"{self.counts['refused']} refusals",
                    expected=f"at most {MAX_REFUSED}",
                    fix="let the agent end at an error, or raise rollout.max_turns and rollout.max_tokens",
                )
            )

    def fail(self, error: Exception) -> None:
        """End the sample with `error`."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def _written(self, write: Callable[[], Context], *, ends: bool = True) -> Context:
        if len(self._tasks) >= MAX_IN_FLIGHT:
            raise ApiError(429, f"{MAX_IN_FLIGHT} requests of this session are in flight", code="too_many_requests")
        try:
            return await self._in_flight(beside(write))
        except CheckpointError as error:
            raise ApiError(400, str(error), param="messages") from error
        except TooLongError as error:
            self.ended |= ends
            text = f"{error}; rollout.max_tokens says how many there may be"
            raise ApiError(400, text, param="messages", code="context_length_exceeded") from error
        except RecordRejected as rejection:
            self.fail(rejection)
            raise ApiError(500, "an answer cannot be read; the sample is given up") from rejection

    async def _sampled(self, context: Context, options: RequestOptions, tools: Tools | None) -> Node:
        params = self._params_for(context, options)
        tree = self.tree
        self._num_started += 1
        try:
            turn = await self._in_flight(
                self._policy.engine.turn(context.token_ids, params, start=context.known_rows, bare=self._bare)
            )
            answer = await self._in_flight(beside(lambda: self._read(turn, params, tools)))
        except asyncio.CancelledError:
            # A client that hung up gets its turn back; it never saw an answer.
            self._num_started -= tree is self.tree
            raise
        except Exception as error:
            self.fail(error)
            raise ApiError(500, f"the policy cannot answer; the sample is given up: {error}") from error
        self.counts["requests"] += 1
        self.counts["overridden"] += bool(options.overridden)
        return tree.add(context, turn, answer, options.dialect)

    async def _in_flight(self, work: Awaitable[T]) -> T:
        """The value of `work`, which `close` gives up."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            return await task
        finally:
            task.cancel()
            self._tasks.discard(task)

    def _params_for(self, context: Context, options: RequestOptions) -> SamplingParams:
        limits, used = self._policy.limits, context.num_tokens
        room = limits.tokens - used
        if room < 1:
            self.ended = True
            text = f"this conversation has {used} tokens, and rollout.max_tokens allows {limits.tokens}"
            raise ApiError(400, text, param="messages", code="context_length_exceeded")
        if self._num_started >= limits.turns:
            self.ended = True
            raise ApiError(400, f"rollout.max_turns allows {limits.turns} answers", code="turn_limit")
        stops = one_token_stops(options.stop, self._policy.tokens.encode_plain)
        stop_ids = self.params.stop_token_ids
        return replace(
            self.params,
            max_new_tokens=min(self.params.max_new_tokens, room, options.max_tokens or room),
            stop_token_ids=(*stop_ids, *(token for token in dict.fromkeys(stops) if token not in stop_ids)),
            stop_texts=options.stop,
        )

    def _read(self, turn: SampledTurn, params: SamplingParams, tools: Tools | None) -> TextAnswer:
        ids, decode = turn.tokens.tolist(), self._policy.tokens.decode_all
        ended = turn.finish_reason == "stop" and ids[-1] in params.stop_token_ids
        body, end = (decode(ids[:-1]), decode(ids[-1:])) if ended else (decode(ids), "")
        body, end, stop = cut_at_stop(body, end, params.stop_texts)
        if tools is None:
            return TextAnswer(None, body, end, stop)
        message = self._policy.reader(body, tools)
        if tools and end and "tool_calls" not in message:
            # Some parsers want the token that ends a call (gpt-oss).
            full_message = self._policy.reader(body + end, tools)
            message = full_message if "tool_calls" in full_message else message
        for call in message.get("tool_calls", ()):
            # Nine letters and digits: some templates take no other ids.
            call["id"] = f"call{self._calls:05d}"
            self._calls += 1
        return TextAnswer(message, body, end, stop)
