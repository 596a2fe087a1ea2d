"""The chat template of the policy, as a session needs it: whole conversations as text, and text as ids."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe_trm.errors import CheckpointError
from moe_trm.rollout.agents.messages import Message
from moe_trm.tasks.tokens import ANSWER_MARK, Tokens


@dataclass(frozen=True)
class TemplateOptions:
    """Input of the template beside the messages: descriptions of tools, and variables by name."""

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


class Template(Protocol):
    """The text of conversations, and its ids."""

    def render(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """The whole conversation, ready for the policy to answer. Raises `CheckpointError`."""

    def closing(self, options: TemplateOptions) -> str | None:
        """The text between an answer and the message after it.

        It is empty where the next message itself ends the answer, and where it is not known. None: the template ends
        the last answer with another token than an earlier one.
        """

    def encode(self, text: str) -> tuple[int, ...]:
        """Text as ids, by itself. Raises `TooLongError`."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Text of a completion's prompt as ids, with the tokenizer's beginning token. Raises `TooLongError`."""


class TooLongError(ValueError):
    """A text that has too many tokens by its length alone. It has not been tokenised, which would take long."""


class ChatTemplate:
    """`Template` of a checkpoint.

    Args:
        tokens: the checkpoint's tokenizer.
        most_tokens: that a text may have.
    """

    def __init__(self, tokens: Tokens, most_tokens: int = sys.maxsize) -> None:
        self._tokens, self._most_tokens = tokens, most_tokens
        self._latest: tuple[TemplateOptions, str | None] | None = None
        """The latest options and their closing: a session mostly has the same ones in all requests."""

    def render(self, messages: Sequence[Message], options: TemplateOptions, *, opens_answer: bool = True) -> str:
        """See `Template.render`. Without `opens_answer` the text ends behind the last message."""
        return self._render(messages, options, opens_answer=opens_answer)

    def closing(self, options: TemplateOptions) -> str | None:
        """See `Template.closing`.

        It is what stands behind an answer both at the end and before a message. A template that opens the next answer
        unasked would otherwise make that a part of it.
        """
        if self._latest is None or self._latest[0] != options:
            self._latest = options, self._closing(options)
        return self._latest[1]

    def _closing(self, options: TemplateOptions) -> str | None:
        talk = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER_MARK}]
        try:
            last = self._behind_mark(talk, options, opens_answer=False)
            between = self._behind_mark([*talk, talk[0]], options, opens_answer=True)
        except CheckpointError:
            # A template that only writes conversations of another form, e.g. with a system message.
            return ""
        return self.shared(last, between)

    def shared(self, last: str, between: str) -> str | None:
        """The beginning that two texts behind an answer share; None where they begin with different tokens."""
        pairs = zip(last, between, strict=False)
        same = "".join(character for character, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        first_tokens = [self.decode(self.encode(text)[:1]) for text in (last, between)]
        return None if all(len(token) > len(same) for token in first_tokens) else same

    def _behind_mark(self, talk: Sequence[Message], options: TemplateOptions, *, opens_answer: bool) -> str:
        """The text behind the marked answer; empty where the template does not write it as it is."""
        _, separator, behind = self._render(talk, options, opens_answer=opens_answer).rpartition(ANSWER_MARK)
        return behind if separator else ""

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Template.encode`."""
        return self._tokens.encode_plain(self._bounded(text)) if text else ()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens included."""
        return self._tokens.decode_all(token_ids)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """See `Template.encode_prompt`."""
        return self._tokens.encode(self._bounded(text))

    def _bounded(self, text: str) -> str:
        if len(text) > self._most_tokens * self._tokens.longest_token:
            raise TooLongError(f"a text of {len(text)} characters has more than {self._most_tokens} tokens")
        return text

    def _render(self, messages: Sequence[Message], options: TemplateOptions, *, opens_answer: bool) -> str:
        with_thinking = [_with_thinking(message) for message in messages]
        # Some templates put arguments together as text, others write a mapping as JSON themselves. And one takes no
        # reasoning beside content and calls.
        forms = [
            form(list(form_messages)) for form_messages in (with_thinking, messages) for form in (list, _all_textual)
        ]
        refusal: CheckpointError | None = None
        for number, form_messages in enumerate(forms):
            if form_messages in forms[:number]:
                continue
            try:
                return self._tokens.render(
                    form_messages, tools=options.tools or None, variables=options.variables, opens_answer=opens_answer
                )
            except CheckpointError as error:
                refusal = refusal or error
        assert refusal is not None, "there is one form at least"
        raise refusal


def _all_textual(messages: Sequence[Message]) -> list[Message]:
    return [_with_textual_arguments(message) for message in messages]


def _with_thinking(message: Message) -> Message:
    """The message with its reasoning under the name that gpt-oss's template has for it, too.

    That one writes reasoning before calls only, and some copies of it write an answer with reasoning as reasoning.
    """
    if "reasoning_content" not in message or "tool_calls" not in message:
        return message
    return message | {"thinking": message["reasoning_content"]}


def _with_textual_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def as_text(arguments: object) -> str:
    """Arguments of a tool call as the text that a client reads."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def reserved_variables() -> frozenset[str]:
    """Names that mean something else to the tokenizer than a variable of the template."""
    from transformers import PreTrainedTokenizerBase

    named = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(named) | {"messages", "bos_token", "eos_token", "strftime_now", "raise_exception"}
