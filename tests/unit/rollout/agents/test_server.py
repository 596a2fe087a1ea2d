"""The interface for agents over a real socket: what it takes, and what it answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moe_trm.rollout.agents.live_session import LiveSession
from moe_trm.rollout.agents.reader import AnswerReader
from tests.unit.rollout.agents.http_client import Client, Refusal, as_sent
from tests.unit.rollout.agents.served import PARAMS, TOKENS, TOOL, Served, run, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record


def test_a_tool_and_the_answer_before_it_continue_on_the_sampled_ids() -> None:
    call = '<think>\nhm\n</think>\n\nI add. <tool_call>\n{"name":"add", "arguments":{"a":1}}\n</tool_call>'

    async def talk(served: Served) -> None:
        history: list[Any] = [user("1 + 1?")]
        first = await served.say(*history, tools=[TOOL], temperature=0.8)
        [choice] = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content.strip() == "hm"
        [made] = choice.message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
        history += [as_sent(choice.message), {"role": "tool", "tool_call_id": made.id, "content": "2"}]
        second = await served.say(*history, tools=[TOOL])
        assert second.choices[0].message.content == "It is 2 — naïve, 漢字."
        assert second.choices[0].finish_reason == "stop"
        assert second.system_fingerprint == "weights-0"
        [leaf] = served.session.tree.leaves()
        assert [node.answer.body for node in leaf.path()] == [call, "It is 2 — naïve, 漢字."]
        assert second.usage.prompt_tokens == len(leaf.context.token_ids)
        assert second.usage.completion_tokens == leaf.turn.num_sampled
        check_record(leaf)
        # A server that tokenises the history again would train other ids.
        assert TOKENS.encode_plain(leaf.context.text) != leaf.context.token_ids

    run(talk, SpeakingEngine(speaker(call, "It is 2 — naïve, 漢字.")))


def test_a_stream_says_what_a_whole_answer_says() -> None:
    call = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    async def talk(served: Served) -> None:
        events = await served.say(user("?"), tools=[TOOL], stream=True, stream_options={"include_usage": True})
        deltas = [event.choices[0].delta for event in events if event.choices]
        assert "".join(delta.content or "" for delta in deltas) == "I add."
        [found] = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
        assert (found.index, found.function.name, found.function.arguments) == (0, "add", '{"a": 1}')
        assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "tool_calls"
        assert events[-1].usage.completion_tokens == served.session.tree.nodes[0].turn.num_sampled
        whole = await served.client.complete("Say:", stream=True)
        assert "".join(event.choices[0].text for event in whole) == "hello"

    run(talk, SpeakingEngine(speaker(call, "hello")))


def test_completions_continue_and_carry_log_probs() -> None:
    async def talk(served: Served) -> None:
        complete = served.client.complete
        first = await complete("A:", logprobs=1)
        node = served.session.tree.nodes[0]
        values = first.choices[0].logprobs
        assert values.token_logprobs == pytest.approx(node.turn.full_logprobs.tolist())
        assert "".join(values.tokens) == "hello<|im_end|>"
        await complete("A:hello\nB:")
        assert served.session.tree.nodes[1].parent is node
        check_record(served.session.tree.nodes[1])
        chat = await served.say(user("?"), logprobs=True)
        assert [one.token for one in chat.choices[0].logprobs.content][-1] == "<|im_end|>"

    run(talk, SpeakingEngine(speaker("hello")))


def test_stop_and_max_tokens_end_an_answer() -> None:
    async def talk(served: Served) -> None:
        answer = await served.say(user("?"), stop=["c"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "stop")
        assert answer.choices[0].matched_stop == "c"
        cut = await served.say(user("?"), max_tokens=3, max_completion_tokens=9)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("abc", "length")
        assert cut.choices[0].matched_stop is None
        history = [user("?"), {"role": "assistant", "content": "ab"}, user("c?")]
        await served.say(*history)
        # The stop text was sampled, so it stays where it was sampled.
        assert TOKENS.decode_all(served.session.tree.nodes[-1].context.token_ids).startswith(
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>\n"
        )

    run(talk, SpeakingEngine(speaker("abcdef")))


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"n": 2}, 400, "unsupported_parameter"),
        ({"presence_penalty": 0.5}, 400, "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter"),
        ({"tools": [TOOL], "tool_choice": "required"}, 400, "unsupported_parameter"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "unsupported_parameter"),
        ({"guess": 1}, 400, "unknown_parameter"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, None),
        ({"model": "gpt-4o"}, 404, "model_not_found"),
        ({"max_tokens": 0}, 400, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
        ({"tools": [{"type": "web_search"}]}, 400, None),
    ],
)
def test_what_would_be_another_policy_or_makes_no_sense_is_refused(
    options: dict[str, Any], status: int, code: str | None
) -> None:
    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        with pytest.raises(Refusal) as caught:
            await served.client._post("chat/completions", {"messages": [user("?")]} | options, 60.0)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert served.session.counts == {"refused": 1}

    run(talk, engine)
    assert engine.asked == []


def test_sampling_settings_of_others_are_overridden_and_named() -> None:
    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        await served.say(user("?"), temperature=0.8, top_p=1.0, presence_penalty=0)
        assert "x-moe-trm-overridden" not in served.client.headers
        await served.say(user("?"), temperature=0, top_p=0.5, seed=1)
        assert served.client.headers["x-moe-trm-overridden"] == "temperature,top_p,seed"
        assert served.session.counts["overridden"] == 1

    run(talk, engine)
    assert {(params.temperature, params.top_p) for params in engine.asked} == {(0.8, 1.0)}


def test_a_parser_may_want_the_token_that_ends_a_call() -> None:
    """As SGLang's parser of gpt-oss does."""

    def parse(text: str, tools: object) -> tuple[str, list[dict[str, Any]]]:
        ended = text.endswith("<|im_end|>")
        return ("", [{"name": "add", "arguments": {"a": 1}}]) if ended and "call" in text else (text, [])

    async def talk(served: Served) -> None:
        policy = replace(served.session._policy, reader=AnswerReader(parse))
        session = LiveSession(policy, PARAMS, bare=False)
        address = served.server.open(session)
        client = Client(address.base_url, address.api_key)
        try:
            first = (await client.chat(user("1 + 1?"), tools=[TOOL])).choices[0].message
            [made] = first.tool_calls
            result = {"role": "tool", "tool_call_id": made.id, "content": "2"}
            last = (await client.chat(user("1 + 1?"), as_sent(first), result, tools=[TOOL])).choices[0].message
        finally:
            await client.close()
        assert (last.tool_calls, last.content) == (None, "It is 2.")
        # The template writes the call in its own form, which is read with its end, too.
        assert +Counter(session.tree.counts) == {"continued": 1, "rewritten": 1}

    run(talk, SpeakingEngine(speaker("I call add", "It is 2.")))
