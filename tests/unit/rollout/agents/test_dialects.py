"""One contract for all dialects: the same conversation is the same tree, and what was sampled is what is trained."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moe_trm.rollout.agents.live_session import LiveSession
from moe_trm.rollout.agents.tree import SessionTree
from moe_trm.rollout.sessions.dialogue import Limits
from tests.unit.rollout.agents.dialect_clients import CLIENTS, DialectClient, History
from tests.unit.rollout.agents.served import PARAMS, TOKENS, TOOL, Served, serving, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.talks import CALLS, spelled, words
from tests.unit.rollout.agents.test_tree import check_record

Talk = Callable[[DialectClient], Any]
Tree = list[tuple[Any, ...]]


def tree_of(tree: SessionTree) -> Tree:
    """Everything about a tree but the names of its dialects."""
    number = {node: place for place, node in enumerate(tree.nodes)}
    return [
        (
            number[node.parent] if node.parent is not None else -1,
            node.token_ids,
            node.answer.message,
            node.context.messages,
            node.context.cut,
            node.context.rewritten,
        )
        for node in tree.nodes
    ]


def tree_in(
    name: str, speak: Callable[[Sequence[int]], list[int]], talk: Talk, *, streams: bool, limits: Limits | None = None
) -> SessionTree:
    """The tree of `talk` in one dialect; every branch is a record whose numbers are right."""

    async def go() -> SessionTree:
        async with serving(SpeakingEngine(speak, masks=True), limits) as served:
            session = LiveSession(served.session._policy, PARAMS, bare=False)
            address = served.server.open(session)
            client = CLIENTS[name](address.base_url, address.api_key, streams=streams)
            try:
                await talk(client)
            finally:
                await client.close()
            assert not session.failure.done()
            return session.tree

    tree = asyncio.run(go())
    for leaf in tree.leaves():
        check_record(leaf)
    assert {node.dialect for node in tree.nodes} == {name.split(",")[0]}
    return tree


def random_speaker(seed: int) -> Callable[[Sequence[int]], list[int]]:
    """Answers with thinking, text and up to two calls, in ids that no tokenizer would choose."""
    rng = random.Random(seed)

    def speak(context: Sequence[int]) -> list[int]:
        text = f"<think>{words(rng)}</think>" if rng.random() < 0.5 else ""
        text += words(rng) if rng.random() < 0.8 else ""
        text += "".join(CALLS["chatml"](rng) for _ in range(rng.choice((0, 0, 1, 1, 2))))
        end = TOKENS.stop_token_ids
        return [*(token for token in spelled(rng, TOKENS, text) if token not in end), *end]

    return speak


def random_talk(seed: int, *, edits: bool) -> Talk:
    """A conversation with tools. `edits`: the client leaves turns and thinking out, and words thinking otherwise."""
    rng = random.Random(seed)

    async def talk(client: DialectClient) -> None:
        history: History = [{"role": "system", "content": words(rng)}] if rng.random() < 0.5 else []
        history.append(user(words(rng)))
        for _ in range(rng.randint(2, 6)):
            message = await client.say(history, [TOOL])
            history.append(message)
            for call in message.get("tool_calls") or ():
                history.append({"role": "tool", "tool_call_id": call["id"], "content": words(rng)})
            if not message.get("tool_calls"):
                history.append(user(words(rng)))
            if edits:
                edit(history, rng)

    return talk


def edit(history: History, rng: random.Random) -> None:
    match rng.choice(("drop", "drop", "edit", "edit", "forget", "again", "")):
        case "drop":
            for message in history:
                message.pop("reasoning_content", None)
        case "edit":
            thoughts = [message for message in history if message.get("reasoning_content")]
            if thoughts:
                thoughts[-1]["reasoning_content"] += "!"
        case "forget":
            first = 1 if history[0]["role"] == "system" else 0
            del history[first + 1 :]
        case "again":
            history[-1] = {**history[-1], "content": words(rng)}


@pytest.mark.parametrize("edits", [False, True])
def test_the_same_conversation_is_the_same_tree_in_every_dialect(edits: bool) -> None:
    cuts: set[str] = set()
    for seed in range(16 if edits else 5):
        # A client that names its last answer cannot change what came before it.
        names = [name for name in CLIENTS if not (edits and name == "responses, stored")]
        trees = {
            name: tree_in(name, random_speaker(seed), random_talk(seed, edits=edits), streams=seed % 2 == 0)
            for name in names
        }
        for name in names:
            assert tree_of(trees[name]) == tree_of(trees["chat"]), name
        cuts |= {node.context.cut for node in trees["chat"].nodes}
    assert cuts >= ({"", "template", "thinking_dropped", "thinking_edited"} if edits else {"", "template"})


def test_parallel_calls_and_their_results_go_on_behind_the_sampled_ids() -> None:
    call = '<tool_call>\n{"name":"add", "arguments":{"a":1}}\n</tool_call>'

    async def talk(client: DialectClient) -> None:
        history: History = [user("1 + 1?")]
        message = await client.say(history, [TOOL])
        first, second = message["tool_calls"]
        history.append(message)
        for one in (first, second):
            history.append({"role": "tool", "tool_call_id": one["id"], "content": "2"})
        assert (await client.say(history, [TOOL]))["content"] == "It is 2."

    for name in CLIENTS:
        said = speaker(f"<think>\nhm\n</think>\n\nI add. {call}\n{call}", "It is 2.")
        first, second = tree_in(name, said, talk, streams=False).nodes
        assert second.parent is first
        assert not second.context.cut


def test_usage_and_reasons_to_stop_are_in_the_words_of_each_dialect() -> None:
    async def talk(served: Served) -> None:
        address = served.address
        clients = {name: CLIENTS[name](address.base_url, address.api_key) for name in ("messages", "responses")}
        try:
            short = {"model": "policy", "messages": [user("?")], "max_tokens": 3}
            answer = await clients["messages"].post("messages", short)
            node = served.session.tree.nodes[-1]
            assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)
            assert answer["usage"]["input_tokens"] == len(node.context.token_ids)
            counted = await clients["messages"].post("messages/count_tokens", short)
            assert counted == {"input_tokens": len(node.context.token_ids)}
            stopped = await clients["messages"].post("messages", short | {"stop_sequences": ["c"], "max_tokens": 9})
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "c")
            assert (await clients["messages"].post("messages", short | {"max_tokens": 99}))["stop_reason"] == "end_turn"
            asked = {"model": "policy", "input": "?"}
            cut = await clients["responses"].post("responses", asked | {"max_output_tokens": 3})
            assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            whole = await clients["responses"].post(
                "responses", asked | {"include": ["message.output_text.logprobs"], "instructions": "Be brief."}
            )
            assert whole["status"] == "completed"
            usage, node = whole["usage"], served.session.tree.nodes[-1]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] == len(node.token_ids)
            assert len(whole["output"][0]["content"][0]["logprobs"]) == node.turn.num_sampled
            assert node.context.messages is not None
            assert [message["role"] for message in node.context.messages] == ["system", "user"]
            # Instructions hold for one request.
            await clients["responses"].post("responses", asked | {"previous_response_id": whole["id"]})
            messages = served.session.tree.nodes[-1].context.messages
            assert messages is not None
            assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        finally:
            for client in clients.values():
                await client.close()

    async def go() -> None:
        async with serving(SpeakingEngine(speaker("abcdef"), TOKENS.decode_all)) as served:
            await talk(served)

    asyncio.run(go())


def test_reasoning_tokens_are_those_up_to_its_end() -> None:
    async def go() -> None:
        async with serving(SpeakingEngine(speaker("<think>hm</think>ok"))) as served:
            client = CLIENTS["responses"](served.address.base_url, served.address.api_key)
            try:
                answer = await client.post("responses", {"model": "policy", "input": "?"})
            finally:
                await client.close()
        details = answer["usage"]["output_tokens_details"]
        pieces = TOKENS.pieces(served.session.tree.nodes[0].turn.tokens.tolist())
        assert "".join(pieces[: details["reasoning_tokens"]]) == "<think>hm"

    asyncio.run(go())


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
def test_a_hundred_turns_are_one_branch_and_a_compaction_begins_another(name: str) -> None:
    """As a coding agent does whose context is full: it goes on from a summary."""

    async def talk(client: DialectClient) -> None:
        history: History = [user("begin")]
        for _ in range(100):
            history += [await client.say(history), user("on")]
        history[1:-1] = [{"role": "assistant", "content": "a summary of 100 answers"}]
        for _ in range(3):
            history += [await client.say(history), user("on")]

    tree = tree_in(name, speaker("ok"), talk, streams=False, limits=Limits(200, 20_000))
    assert [len(leaf.path()) for leaf in tree.leaves()] == [100, 3]
    assert not any(node.context.cut for node in tree.nodes)
