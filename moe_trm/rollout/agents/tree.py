"""Tree of one session's requests, as ids: what an agent's messages continue, and the record of every branch. Pure.

A node is one answer of the policy. Its ids are those of its parent, then the ids of what was said in between, then the
sampled ones. Ids are stored once, where they came up, and never change. A request continues the deepest node whose
conversation it begins with, if the chat template leaves the text up to there as it was. Elsewhere it begins another
branch at the last node for which that holds, or at the root.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from moe_trm.rollout.agents.messages import Message, returned, same
from moe_trm.rollout.agents.template import Template, TemplateOptions
from moe_trm.rollout.agents.turn_boundary import Reader, TextAnswer, find_boundary
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.types import Prompt, SampledTurn


@dataclass(frozen=True)
class Context:
    """Beginning of an answer.

    Attributes:
        parent: the answer before it in its branch; None at the root.
        messages: of the request; None for a completion.
        text: all of it, as the template writes it.
        added: `[A]` ids behind those of the parent; the policy did not sample them.
        rewritten: the template would write the parent's answer in another form.
        cut: the messages continue an answer that the ids do not: the template changes earlier text, or text was sampled
            that the client never saw.
    """

    parent: Node | None
    messages: tuple[Message, ...] | None
    text: str
    added: tuple[int, ...]
    rewritten: bool = False
    cut: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids before the answer."""
        return (*self.parent.token_ids, *self.added) if self.parent is not None else self.added

    @property
    def known_rows(self) -> int:
        """Rows whose routes are known: all of the parent's but that of its last id."""
        if self.parent is None or self.parent.turn.routes is None:
            return 0
        return len(self.parent.token_ids) - 1


@dataclass(eq=False)
class Node:
    """One answer: where it begins, what the engine recorded, and its text."""

    context: Context
    turn: SampledTurn
    answer: TextAnswer
    children: int = 0

    @property
    def parent(self) -> Node | None:
        """The answer before it in its branch."""
        return self.context.parent

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids up to the last sampled one."""
        return tuple(
            token for node in self.path() for part in (node.context.added, node.turn.tokens.tolist()) for token in part
        )

    def path(self) -> list[Node]:
        """The answers of its branch from the root on, itself included."""
        found, node = [self], self.parent
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


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

        `cut`: see `Context`.
        """
        contexts = [node.context for node in self.nodes]
        return {
            "continued": sum(context.parent is not None for context in contexts),
            "rewritten": sum(context.rewritten for context in contexts),
            "cut": sum(context.cut for context in contexts),
        }

    def chat(self, messages: Sequence[Message], options: TemplateOptions, read: Reader) -> Context:
        """The context of the answer to `messages`. Raises `CheckpointError` where the template cannot write them."""
        given, closing = tuple(messages), self.template.closing(options)
        meant = self._deepest(given)
        node = meant
        while node is not None:
            text = self.template.render(_with_answers(given, node), options)
            if text.startswith(node.context.text):
                boundary = find_boundary(node.answer, text[len(node.context.text) :], closing, read)
                if boundary is not None:
                    added = self.template.encode(boundary.rest)
                    return Context(node, given, text, added, rewritten=boundary.rewritten, cut=node is not meant)
            node = node.parent
        text = self.template.render(given, options)
        return Context(None, given, text, self.template.encode(text), cut=meant is not None)

    def completion(self, prompt: str) -> Context:
        """The context of the completion of `prompt`, which may begin with an earlier prompt and its completion."""
        begun = [
            (len(node.context.text) + len(node.answer.body), -node.children, number, node)
            for number, node in enumerate(self.nodes)
            if node.context.messages is None and prompt.startswith(_shown(node))
        ]
        # Text behind a stop text was sampled, and the client never saw it.
        found = [one for one in begun if not one[3].answer.overruns or prompt.startswith(one[3].answer.end, one[0])]
        if not found:
            return Context(None, None, prompt, self.template.encode_prompt(prompt), cut=bool(begun))
        length, _, _, node = max(found, key=lambda item: item[:3])
        longest = max(one[0] for one in begun)
        rest = prompt[length:]
        rewritten = bool(node.answer.end) and not rest.startswith(node.answer.end)
        return Context(
            node,
            None,
            prompt,
            self.template.encode(rest.removeprefix(node.answer.end)),
            rewritten=rewritten,
            cut=length < longest,
        )

    def add(self, context: Context, turn: SampledTurn, answer: TextAnswer) -> Node:
        """The engine's answer to `context`."""
        node = Node(context, turn, answer)
        if context.parent is not None:
            context.parent.children += 1
        self.nodes.append(node)
        return node

    def leaves(self) -> list[Node]:
        """The last answer of every branch, in the order in which they came."""
        return [node for node in self.nodes if not node.children]

    def _deepest(self, messages: tuple[Message, ...]) -> Node | None:
        """The node with the longest conversation that `messages` begin with.

        Among equal ones it is the newest that nothing continues yet.
        """
        found = [
            (len(node.context.messages), -node.children, number, node)
            for number, node in enumerate(self.nodes)
            if node.context.messages is not None and _begins_with(messages, node.context.messages, node.answer)
        ]
        return max(found, key=lambda item: item[:3])[3] if found else None


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


def _begins_with(messages: tuple[Message, ...], said: tuple[Message, ...], answer: TextAnswer) -> bool:
    place = len(said)
    return (
        len(messages) > place
        and answer.message is not None
        and returned(answer.message, messages[place])
        and all(same(one, other) or _either_answer(one, other) for one, other in zip(said, messages, strict=False))
    )


def _either_answer(one: Message, other: Message) -> bool:
    """True for an answer with its reasoning and without it."""
    return one["role"] == "assistant" and (returned(one, other) or returned(other, one))


def _with_answers(messages: tuple[Message, ...], leaf: Node) -> list[Message]:
    """`messages` with the answers of the branch whole, also where the client sent them back without their reasoning."""
    whole = list(messages)
    for node in leaf.path():
        assert node.context.messages is not None, "only chats are matched"
        assert node.answer.message is not None, "only chats are matched"
        whole[len(node.context.messages)] = node.answer.message
    return whole
