"""Random conversations of a client with a session tree: answers, tools, thinking, edits of the history."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_trm.rollout.agents.messages import plain
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.template import ChatTemplate, TemplateOptions
from moe_trm.rollout.agents.tree import Context, SessionTree
from moe_trm.rollout.agents.turn_boundary import TextAnswer
from tests.unit.rollout.agents import parsers
from tests.unit.rollout.agents.speaking_engine import turn_of
from tests.unit.rollout.agents.templates import TemplateTokens, tokens_of

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
SEAMS = ("", " ", "\n", "\n\n", "  ", "\t")
WORDS = (
    *("the answer", "is 12", "hello there", "naïve café", "漢字", "🙂🙂", "e\u0301", "[INST]", "done.", "  indents"),
    *("tool says", '{"a": 1}', "\n\nwe think", "кириллица", "\u2028", "don't", "x" * 9),
)
CALLS: dict[str, Callable[[random.Random], str]] = {
    "chatml": lambda rng: (
        f'{rng.choice(SEAMS)}<tool_call>\n{{"name":{rng.choice(SEAMS)}"add", "arguments":{{"a":{rng.choice(SEAMS)}1}}}}'
        "\n</tool_call>"
    ),
    "glm": lambda rng: (
        f"\n<tool_call>add\n<arg_key>a</arg_key>{rng.choice(('', chr(10)))}<arg_value>1</arg_value>\n</tool_call>"
    ),
    "deepseek": lambda rng: f'<|calls|><|call|>add<|sep|>{{"a":{rng.choice((" ", ""))}1}}<|callend|><|callsend|>',
    "glm45": lambda rng: (
        f"\n<tool_call>add\n<arg_key>a</arg_key>{rng.choice(('', chr(10)))}<arg_value>1</arg_value>\n</tool_call>"
    ),
}
MODELS_CALL = "<|channel|>commentary to=functions.add <|constrain|>json"
"""A call as gpt-oss writes it; its template writes it in another form."""
READERS = {
    "chatml": AnswerReader(parsers.hermes, parsers.think),
    "glm": AnswerReader(parsers.glm, None),
    "glm45": AnswerReader(parsers.glm, parsers.think),
    "harmony": AnswerReader(parsers.harmony, parsers.harmony_reasoning),
    "deepseek": AnswerReader(parsers.deepseek, None),
}


def words(rng: random.Random) -> str:
    return "".join(rng.choice(SEAMS) + rng.choice(WORDS) for _ in range(rng.randint(1, 4))) + rng.choice(SEAMS)


def spelled(rng: random.Random, tokens: TemplateTokens, text: str) -> list[int]:
    """Ids of `text` as a policy may sample them: not the ones that the tokenizer would choose."""
    places = sorted(rng.sample(range(len(text) + 1), min(3, len(text) + 1))) if rng.random() < 0.6 else []
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    return [token for part in parts if part for token in tokens.encode_plain(part)]


def for_client(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client has it after an answer: arguments are text."""
    calls = [
        {"id": f"call{number}", "type": "function", "function": call["function"] | {"arguments": _text(call)}}
        for number, call in enumerate(message.get("tool_calls", ()))
    ]
    return message | {"refusal": None, "tool_calls": calls or None, "content": message["content"] or None}


def _text(call: dict[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


@dataclass
class Talk:
    """One session and its client."""

    name: str
    rng: random.Random
    edits: float = 0.2
    thinks: float = 0.3
    tokens: TemplateTokens = field(init=False)
    tree: SessionTree = field(init=False)
    history: list[dict[str, Any]] = field(default_factory=list)
    drifted: int = 0
    """Contexts that a naive server would have tokenised into other ids."""
    contexts: list[Context] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = tokens_of(self.name)
        self.tree = SessionTree(ChatTemplate(self.tokens))
        self.reader = READERS.get(self.name, AnswerReader())
        self.tools = TOOLS if self.name in (*CALLS, "harmony") else ()

    def go(self, turns: int) -> None:
        if self.rng.random() < 0.5:
            self.history.append({"role": "system", "content": words(self.rng)})
        self.history.append({"role": "user", "content": words(self.rng)})
        for _ in range(turns):
            message = self.answer(self.say())
            if self.rng.random() < self.edits:
                self.edit()
            calls = message.get("tool_calls", ())
            for number in range(len(calls)):
                self.history.append({"role": "tool", "tool_call_id": f"call{number}", "content": words(self.rng)})
            if not calls or self.rng.random() < 0.1:
                self.history.append({"role": "user", "content": words(self.rng)})

    def say(self) -> str:
        if self.name == "harmony":
            return self.say_in_channels()
        text = f"<think>{words(self.rng)}</think>" if self.rng.random() < self.thinks else ""
        text += words(self.rng)
        if self.name in CALLS and self.rng.random() < 0.5:
            text += CALLS[self.name](self.rng)
        return text

    def say_in_channels(self) -> str:
        start = "<|start|>assistant"
        text = (
            f"<|channel|>analysis<|message|>{words(self.rng)}<|end|>{start}" if self.rng.random() < self.thinks else ""
        )
        if self.rng.random() < 0.5:
            return f"{text}<|channel|>final<|message|>{words(self.rng)}"
        form = self.rng.choice((" to=functions.add<|channel|>commentary json", MODELS_CALL))
        return f'{text}{form}<|message|>{{"a":{self.rng.choice((" ", ""))}1}}'

    def context(self) -> Context:
        options = TemplateOptions(self.tools)
        made = self.tree.chat([plain(one) for one in self.history], options, lambda text: self.reader(text, self.tools))
        self.contexts.append(made)
        if made.parent is not None:
            self.drifted += self.tokens.encode_plain(made.text) != made.token_ids
        return made

    def answer(self, text: str, *, ends: bool | None = None) -> dict[str, Any]:
        """The policy says `text`, and the client takes it into its history."""
        context = self.context()
        sampled = spelled(self.rng, self.tokens, text) or [5]
        sampled = [token for token in sampled if token not in self.tokens.stop_token_ids]
        body = self.tokens.decode_all(sampled)
        ends = self.rng.random() < 0.9 if ends is None else ends
        message = self.reader(body, self.tools)
        # GLM ends a call with the role that answers it.
        end = self.tokens.stop_token_ids[-1 if message.get("tool_calls") else 0]
        answer = TextAnswer(message, body, self.tokens.decode_all([end]) if ends else "")
        turn = turn_of(
            context.token_ids, [*sampled, *([end] * ends)], start=context.known_rows, version=len(self.contexts)
        )
        self.tree.add(context, turn, answer)
        self.history.append(for_client(message))
        return message

    def edit(self) -> None:
        """Change the history as agents do."""
        match self.rng.choice(("drop", "system", "reword", "forget", "strip", "again")):
            case "drop" if len(self.history) > 3:
                del self.history[1:3]
            case "system":
                self.history.insert(0, {"role": "system", "content": words(self.rng)})
            case "reword":
                self.history[-1] = {"role": "assistant", "content": "a summary " + words(self.rng)}
            case "forget":
                self.history[-1].pop("reasoning_content", None)
            case "strip":
                self.history[-1] |= {"content": (self.history[-1]["content"] or "").strip()}
            case "again":
                del self.history[-1]
                self.answer(self.say())

    def faithful(self, context: Context) -> bool:
        """True when no answer of the branch has another form in the template."""
        path = [node.context for node in context.parent.path()] if context.parent is not None else []
        return not any(one.rewritten for one in (*path, context))
