"""Tree of one session's requests, as ids: what an agent's messages continue, and the record of every branch. Pure.

A node is one answer of the policy. Its ids are its parent's, then the ids of what was said in between, then the
sampled ones. Ids are stored once, where they came up, and never change. A request continues the deepest node whose
conversation it begins with, if the chat template leaves the text up to there as it was. Elsewhere it begins another
branch at the last node for which that holds, or at the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from moe_trm.rollout.agents.messages import Message, alike, same_reasoning
from moe_trm.rollout.agents.template import Template, TemplateOptions
from moe_trm.rollout.agents.turn_boundary import Reader, TextAnswer, TurnBoundary, find_boundary
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.types import Prompt, SampledTurn

Cut = Literal["", "template", "stop_text", "thinking_dropped", "thinking_edited"]
"""Reasons for another branch where the messages go on: the template changes earlier text, text was sampled that the
client never saw, or the client sends an answer back without its thinking, or with another.
"""


@dataclass(frozen=True)
class Context:
    """Beginning of an answer.

    Attributes:
        parent: the answer before it in its branch; None at the root.
        messages: of the request; None for a completion.
        text: all of it, as the template writes it.
        added: `[A]` ids behind the parent's; the policy did not sample them.
        rewritten: the template would write the parent's answer in another form.
        cut: why the messages continue an answer that the ids do not; empty where that is not so.
    """

    parent: Node | None
    messages: tuple[Message, ...] | None
    text: str
    added: tuple[int, ...]
    rewritten: bool = False
    cut: Cut = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids before the answer."""
        return (*self.parent.token_ids, *self.added) if self.parent is not None else self.added

    @cached_property
    def num_tokens(self) -> int:
        """Number of ids before the answer."""
        return len(self.added) + (self.parent.num_tokens if self.parent is not None else 0)

    @property
    def known_rows(self) -> int:
        """Rows whose routes are known: all of the parent's but its last id's."""
        if self.parent is None or self.parent.turn.routes is None:
            return 0
        return self.parent.num_tokens - 1


@dataclass(eq=False)
class Node:
    """One answer: where it begins, what the engine recorded, its text, and the interface over which it was asked for.

    `dialect` is a name for the report; nothing depends on it.
    """

    context: Context
    turn: SampledTurn
    answer: TextAnswer
    dialect: str = ""
    children: int = 0

    @property
    def parent(self) -> Node | None:
        """The answer before it in its branch."""
        return self.context.parent

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids up to the last sampled one."""
        parts = ((node.context.added, node.turn.tokens.tolist()) for node in self.path())
        return tuple(chain.from_iterable(chain.from_iterable(parts)))

    @property
    def num_tokens(self) -> int:
        """Number of ids up to the last sampled one."""
        return self.context.num_tokens + self.turn.num_sampled

    def path(self) -> list[Node]:
        """The answers of its branch from the root on, itself included."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass
class SessionTree:
    """All branches of one session.

    Attributes:
        template: writes conversations.
        nodes: the answers, in the order in which they came.
    """

    template: Template
    nodes: list[Node] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Answers whose context goes on behind sampled ids (`continued`), and those of them that are `rewritten`.

        The others are cuts, by their reason (`Cut`): `cut` are those of the template and of stop texts.
        """
        contexts = [node.context for node in self.nodes]
        cuts = Counter(context.cut for context in contexts)
        return {
            "continued": sum(context.parent is not None for context in contexts),
            "rewritten": sum(context.rewritten for context in contexts),
            "cut": cuts["template"] + cuts["stop_text"],
            "thinking_dropped": cuts["thinking_dropped"],
            "thinking_edited": cuts["thinking_edited"],
        }

    def chat(self, messages: Sequence[Message], options: TemplateOptions, read: Reader) -> Context:
        """The context of the answer to `messages`. Raises `CheckpointError` where the template cannot write them."""
        history, closing = tuple(messages), self.template.closing(options)
        deepest = self._deepest(history)
        history = _shared(history, deepest)
        for node in deepest.path()[::-1] if deepest is not None else ():
            text, boundary = self._continued(node, _with_answers(history, node), options, closing, read)
            if boundary is not None:
                added = self.template.encode(boundary.rest)
                cut = self._cut(deepest, history, options, closing, read) if node is not deepest else ""
                return Context(node, history, text, added, rewritten=boundary.rewritten, cut=cut)
        text = self.template.render(history, options)
        cut = self._cut(deepest, history, options, closing, read)
        return Context(None, history, text, self.template.encode(text), cut=cut)

    def _cut(
        self,
        deepest: Node | None,
        messages: Sequence[Message],
        options: TemplateOptions,
        closing: str | None,
        read: Reader,
    ) -> Cut:
        """The reason why `messages` do not continue the ids of `deepest`: its thinking, where only that is missing."""
        if deepest is None:
            return ""
        _, boundary = self._continued(deepest, _with_answers(messages, deepest, thinking=True), options, closing, read)
        return "template" if boundary is None else _lost_thinking(messages, deepest)

    def _continued(
        self, node: Node, messages: Sequence[Message], options: TemplateOptions, closing: str | None, read: Reader
    ) -> tuple[str, TurnBoundary | None]:
        """The text of `messages`, and where the answer of `node` ends in it; None where the text does not have it."""
        text = self.template.render(messages, options)
        if not text.startswith(node.context.text):
            return text, None
        return text, find_boundary(node.answer, text[len(node.context.text) :], closing, read)

    def completion(self, prompt: str) -> Context:
        """The context of the completion of `prompt`, which may begin with an earlier prompt and its completion."""
        started = [
            (len(node.context.text) + len(node.answer.body), -node.children, number, node)
            for number, node in enumerate(self.nodes)
            if node.context.messages is None and prompt.startswith(_shown(node))
        ]
        # Text behind a stop text was sampled, and the client never saw it.
        usable = [
            candidate
            for candidate in started
            if not candidate[3].answer.overruns or prompt.startswith(candidate[3].answer.end, candidate[0])
        ]
        if not usable:
            return Context(None, None, prompt, self.template.encode_prompt(prompt), cut="stop_text" if started else "")
        length, _, _, node = max(usable, key=lambda item: item[:3])
        longest = max(candidate[0] for candidate in started)
        rest = prompt[length:]
        rewritten = bool(node.answer.end) and not rest.startswith(node.answer.end)
        return Context(
            node,
            None,
            prompt,
            self.template.encode(rest.removeprefix(node.answer.end)),
            rewritten=rewritten,
            cut="stop_text" if length < longest else "",
        )

    def add(self, context: Context, turn: SampledTurn, answer: TextAnswer, dialect: str = "") -> Node:
        """The engine's answer to `context`."""
        node = Node(context, turn, answer, dialect)
        if context.parent is not None:
            context.parent.children += 1
        self.nodes.append(node)
        return node

    def leaves(self) -> list[Node]:
        """The last answer of every branch, in the order in which they came."""
        return [node for node in self.nodes if not node.children]

    def _deepest(self, messages: tuple[Message, ...]) -> Node | None:
        """The node with the longest conversation that `messages` begin with, whatever thinking they have.

        Among equal ones it is one whose thinking they have, then the newest that nothing continues yet.
        """
        matching: set[Node] = set()
        for node in self.nodes:
            # What an earlier answer has been compared with is not compared again: a parent's conversation comes first.
            parent = node.parent
            start = len(parent.context.messages or ()) + 1 if parent is not None else 0
            if (parent is None or parent in matching) and _begins_with(messages, node, start):
                matching.add(node)
        longest = max((len(node.context.messages or ()) for node in matching), default=0)
        candidates = [
            (_num_alike(messages, node), -node.children, number, node)
            for number, node in enumerate(self.nodes)
            if node in matching and len(node.context.messages or ()) == longest
        ]
        return max(candidates, key=lambda item: item[:3])[3] if candidates else None


def conversation_of(
    leaf: Node, prompt_id: str, *, trained: Collection[Node] | None = None, routes: bool = True
) -> Conversation:
    """The branch that ends in `leaf` as one conversation, whose record goes to the learner.

    The record is about the answers in `trained` (None: all), `leaf` among them; the others are its context. `routes`:
    with the recorded routes. Raises `RecordRejected` as `Conversation.add` does.
    """
    nodes = leaf.path()
    conversation = Conversation(Prompt(prompt_id, nodes[0].context.added))
    for node in nodes:
        if node.parent is not None:
            conversation.append(node.context.added)
        turn = node.turn if routes else replace(node.turn, routes=None)
        conversation.add(turn, trained=trained is None or node in trained)
    return conversation


def _shown(node: Node) -> str:
    """Text that a prompt has to begin with to continue the completion `node`.

    One without any text but its end is continued where that is in the prompt: else the same prompt asked again would be
    taken for its continuation.
    """
    return node.context.text + (node.answer.body or node.answer.stop or node.answer.end)


def _begins_with(messages: tuple[Message, ...], node: Node, start: int) -> bool:
    """True when `messages` have the conversation of `node` from message `start` on, and its answer."""
    before, answer = node.context.messages, node.answer.message
    return (
        before is not None
        and answer is not None
        and len(messages) > len(before)
        and alike(answer, messages[len(before)])
        and all(map(alike, before[start:], messages[start:]))
    )


def _shared(messages: tuple[Message, ...], node: Node | None) -> tuple[Message, ...]:
    """`messages`, with the message of `node` itself where it is the same: a long session keeps each of them once."""
    conversation = () if node is None else (*(node.context.messages or ()), node.answer.message or {})
    same = (kept if kept == message else message for kept, message in zip(conversation, messages, strict=False))
    return (*same, *messages[len(conversation) :])


def _answers(leaf: Node) -> Iterator[tuple[int, Message]]:
    """The answers of a branch, with their places in its conversation."""
    for node in leaf.path():
        assert node.context.messages is not None, "only chats are matched"
        assert node.answer.message is not None, "only chats are matched"
        yield len(node.context.messages), node.answer.message


def _num_alike(messages: Sequence[Message], leaf: Node) -> int:
    """Answers of a branch that `messages` have with their thinking."""
    return sum(same_reasoning(answer, messages[place]) for place, answer in _answers(leaf))


def _with_answers(messages: Sequence[Message], leaf: Node, *, thinking: bool = False) -> list[Message]:
    """`messages` with the answers of the branch as the policy gave them, where their thinking is the same.

    `thinking`: everywhere.
    """
    restored = list(messages)
    for place, answer in _answers(leaf):
        if thinking or same_reasoning(answer, messages[place]):
            restored[place] = answer
    return restored


def _lost_thinking(messages: Sequence[Message], leaf: Node) -> Cut:
    """The first difference between the thinking in `messages` and in the branch."""
    for place, answer in _answers(leaf):
        if not same_reasoning(answer, messages[place]):
            return "thinking_edited" if "reasoning_content" in messages[place] else "thinking_dropped"
    return "template"
