"""Session trees: ids that are trained are ids that were sampled, whatever a client does to its history."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.rollout.agents.messages import BadMessageError, Message, alike, plain, same_reasoning
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.template import ChatTemplate, TemplateOptions
from moe_trm.rollout.agents.tree import Node, SessionTree, conversation_of
from moe_trm.rollout.agents.turn_boundary import TextAnswer
from tests.unit.rollout.agents.speaking_engine import kept, logprob, route_row, turn_of
from tests.unit.rollout.agents.talks import Talk
from tests.unit.rollout.agents.templates import TEMPLATES, tokens_of


def check_record(leaf: Node) -> None:
    """Every number of the record is that of the ids before it, and the sampled ids are those of the answers."""
    record = conversation_of(leaf, "p").record(sample_id=1, group_id=0, keep_changed=False)
    ids = list(leaf.token_ids)
    assert record.tokens.tolist() == ids
    places = np.flatnonzero(record.sampled)
    spans = [(len(node.context.token_ids), len(node.token_ids)) for node in leaf.path()]
    assert places.tolist() == [place for start, end in spans for place in range(start, end)]
    said = [token for node in leaf.path() for token in node.turn.tokens.tolist()]
    assert record.tokens[places].tolist() == said
    np.testing.assert_allclose(record.rollout_logprobs, [logprob(ids[:place]) for place in places], rtol=1e-6)
    assert record.versions.tolist() == [int(v) for node in leaf.path() for v in node.turn.versions]
    assert record.turn_ids[places].tolist() == [
        turn for turn, (start, end) in enumerate(spans) for _ in range(start, end)
    ]
    assert record.routes is not None
    record.routes.check_tokens(record.tokens, record.origin)
    assert np.array_equal(record.routes.experts, [route_row(ids[: row + 1]) for row in range(len(ids) - 1)])
    if leaf.turn.sampling_mask is not None:
        assert record.sampling_mask is not None
        rows = np.split(record.sampling_mask.ids, record.sampling_mask.offsets[1:-1])
        assert [row.tolist() for row in rows] == [kept(ids[:place], ids[place]) for place in places]


@settings(max_examples=80)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    rng=st.randoms(use_true_random=False),
    turns=st.integers(2, 8),
    edits=st.sampled_from([0.0, 0.3]),
)
def test_trained_ids_are_sampled_ids_in_any_conversation(
    name: str, rng: random.Random, turns: int, edits: float
) -> None:
    talk = Talk(name, rng, edits)
    talk.go(turns)
    for context in talk.contexts:
        if context.parent is not None:
            assert context.token_ids[: len(context.parent.token_ids)] == context.parent.token_ids
        if name != "mixtral" and talk.faithful(context):
            # The ids say what the template says, letter by letter.
            assert talk.tokens.decode_all(context.token_ids) == context.text
    leaves = talk.tree.leaves()
    for leaf in leaves:
        check_record(leaf)
    assert {node for leaf in leaves for node in leaf.path()} == set(talk.tree.nodes)
    # Whatever was sampled is once in the tree, at the end of its own context.
    assert len(talk.tree.nodes) == len(talk.contexts)


@settings(max_examples=40)
@given(rng=st.randoms(use_true_random=False), turns=st.integers(1, 6), edits=st.sampled_from([0.3, 0.8]))
def test_the_answer_that_a_request_goes_on_behind_is_the_one_that_comparing_everything_names(
    rng: random.Random, turns: int, edits: float
) -> None:
    talk = Talk("chatml", rng, edits)
    talk.go(turns)
    for end in range(1, len(talk.history) + 1):
        messages = tuple(map(plain, talk.history[:end]))
        assert talk.tree._deepest(messages) is searched(talk.tree, messages)


def searched(tree: SessionTree, messages: tuple[Message, ...]) -> Node | None:
    """The longest conversation that `messages` begin with: by most thinking, fewest successors, then the newest."""
    best: tuple[tuple[int, ...], Node | None] = ((), None)
    for number, node in enumerate(tree.nodes):
        path = [(answer.context.messages or (), answer.answer.message or {}) for answer in node.path()]
        before, answer = path[-1]
        if len(messages) > len(before) and all(map(alike, [*before, answer], messages)):
            thinking = sum(same_reasoning(said, messages[len(earlier)]) for earlier, said in path)
            best = max(best, ((len(before), thinking, -node.children, number), node), key=lambda item: item[0])
    return best[1]


def test_a_long_session_keeps_each_message_once() -> None:
    """Each request brings the whole conversation anew."""
    talk = Talk("chatml", random.Random(1), edits=0.0, thinks=0.0)
    for number in range(20):
        talk.history.append({"role": "user", "content": f"q{number}"})
        talk.answer(f"a{number}", ends=True)
    messages = [message for node in talk.tree.nodes for message in node.context.messages or ()]
    assert len(messages) == 20 * 20
    assert len({id(message) for message in messages}) == 2 * 20 - 1


def test_thinking_stays_while_tools_work_for_one_question_and_is_cut_after_it() -> None:
    talk = Talk("chatml", random.Random(3), edits=0.0)
    call = '<think>\nadd them\n</think>\n\nI add. <tool_call>\n{"name": "add",  "arguments": {"a": 1}}\n</tool_call>'
    talk.history.append({"role": "user", "content": "1 + 1?"})
    message = talk.answer(call, ends=True)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    talk.history.append({"role": "tool", "content": "2"})
    talk.answer("<think>\nI see\n</think>\n\nIt is 2.", ends=True)
    assert +Counter(talk.tree.counts) == {"continued": 1, "rewritten": 1}
    talk.history.append({"role": "user", "content": "Sure?"})
    talk.answer("Yes.", ends=True)
    assert talk.tree.counts["cut"] == 1
    assert [len(leaf.path()) for leaf in talk.tree.leaves()] == [2, 1]
    # The cut branch has what the template says now: nothing of the thinking.
    text = talk.tokens.decode_all(talk.tree.nodes[-1].context.token_ids)
    assert "add them" not in text
    assert "It is 2." in text


def test_an_edited_history_begins_a_branch_at_the_longest_prefix() -> None:
    talk = Talk("deepseek", random.Random(1), edits=0.0)
    for number in range(3):
        talk.history.append({"role": "user", "content": f"q{number}"})
        talk.answer(f"a{number}", ends=True)
    first, second, _ = talk.tree.nodes
    del talk.history[4:]
    talk.history.append({"role": "user", "content": "another q2"})
    assert talk.context().parent is second
    talk.history[3] = {"role": "assistant", "content": "a summary"}
    made = talk.context()
    assert made.parent is first
    text = talk.tokens.decode_all(made.added)
    assert text == "<|User|>q1<|Assistant|>a summary<eos><|User|>another q2<|Assistant|>"
    talk.history.insert(0, {"role": "system", "content": "be brief"})
    assert talk.context().parent is None


CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("sent", "reason"), [("\nhm\n", ""), (None, "thinking_dropped"), ("\nhmm\n", "thinking_edited")]
)
def test_thinking_that_comes_back_otherwise_begins_a_branch_with_the_ids_of_what_was_sent(
    sent: str | None, reason: str
) -> None:
    talk = Talk("chatml", random.Random(3), edits=0.0)
    talk.history.append({"role": "user", "content": "1 + 1?"})
    talk.answer(CALL, ends=True)
    assert talk.history[-1].pop("reasoning_content") == "\nhm\n"
    if sent is not None:
        talk.history[-1]["reasoning_content"] = sent
    talk.history.append({"role": "tool", "content": "2"})
    made = talk.context()
    assert made.cut == reason
    assert made.parent is (None if reason else talk.tree.nodes[0])
    text = talk.tokens.decode_all(made.token_ids)
    assert [word in text for word in ("hm", "hmm")] == [sent is not None, reason == "thinking_edited"]
    if reason:
        assert made.token_ids == talk.tokens.encode_plain(made.text)
    talk.answer("It is 2.", ends=True)
    assert +Counter(talk.tree.counts) == ({reason: 1} if reason else {"continued": 1, "rewritten": 1})


def test_thinking_that_the_template_leaves_out_may_be_left_out() -> None:
    """Behind the user's next message the text has no earlier thinking, whatever the client sends."""
    talk = Talk("chatml", random.Random(3), edits=0.0)
    talk.history.append({"role": "user", "content": "1 + 1?"})
    talk.answer("<think>\nI see\n</think>\n\nIt is 2.", ends=True)
    talk.history.append({"role": "user", "content": "Sure?"})
    del talk.history[1]["reasoning_content"]
    assert talk.context().cut == "template"
    talk.answer(CALL, ends=True)
    talk.history[1]["reasoning_content"] = "something else"
    talk.history.append({"role": "tool", "content": "2"})
    assert (talk.context().parent, talk.context().cut) == (talk.tree.nodes[1], "")


def test_of_two_answers_that_differ_in_thinking_alone_the_right_one_goes_on() -> None:
    talk = Talk("chatml", random.Random(3), edits=0.0)
    talk.history.append({"role": "user", "content": "1 + 1?"})
    for thought in ("a", "b"):
        talk.answer(CALL.replace("hm", thought), ends=True)
        sent: Message = talk.history.pop()
    for node, thought in zip(talk.tree.nodes, ("\na\n", "\nb\n"), strict=True):
        talk.history[1:] = [sent | {"reasoning_content": thought}, {"role": "tool", "content": "2"}]
        assert talk.context().parent is node


@pytest.mark.parametrize(
    ("name", "channel", "closed"),
    [
        ("chatml", "", "<|im_end|>\n<|im_start|>user\ngo on"),
        ("glm", "", "<|user|>\ngo on"),
        ("deepseek", "", "<eos><|User|>go on"),
        ("eager", "", "<eos>user: go on"),
        ("harmony", "<|channel|>final<|message|>", "<|end|><|start|>user<|message|>go on<|end|>"),
    ],
)
def test_a_cut_answer_is_closed_by_the_template(name: str, channel: str, closed: str) -> None:
    talk = Talk(name, random.Random(0), edits=0.0)
    talk.history.append({"role": "user", "content": "q"})
    talk.answer(f"{channel}half an ans", ends=False)
    talk.history.append({"role": "user", "content": "go on"})
    made = talk.context()
    assert not made.cut
    assert talk.tokens.decode_all(made.added).startswith(closed)


def test_equal_answers_of_parallel_requests_are_two_nodes() -> None:
    talk = Talk("glm", random.Random(0), edits=0.0)
    talk.history.append({"role": "user", "content": "q"})
    for _ in range(2):
        talk.answer("the same", ends=True)
        talk.history.pop()
    one, two = talk.tree.nodes
    talk.history += [{"role": "assistant", "content": "the same"}, {"role": "user", "content": "next"}]
    talk.answer("first", ends=True)
    assert talk.tree.nodes[-1].parent is two
    talk.history.pop()
    talk.answer("second", ends=True)
    assert talk.tree.nodes[-1].parent is one


def test_a_completion_goes_on_behind_the_sampled_ids() -> None:
    tokens = tokens_of("deepseek")
    tree = SessionTree(ChatTemplate(tokens))
    context = tree.completion("Question: 1\nAnswer:")
    sampled = [*tokens.encode_plain(" t"), *tokens.encode_plain("wo"), tokens.stop_token_ids[0]]
    node = tree.add(context, turn_of(context.token_ids, sampled), TextAnswer(None, " two", "<eos>"))
    further = tree.completion("Question: 1\nAnswer: two<eos>\nQuestion: 2")
    assert further.parent is node
    assert tokens.decode_all(further.added) == "\nQuestion: 2"
    tree.add(further, turn_of(further.token_ids, sampled), TextAnswer(None, " two", "<eos>"))
    assert +Counter(tree.counts) == {"continued": 1}
    assert tree.completion("Question: 2").parent is None
    # A chat never continues a completion.
    assert (
        tree.chat([plain({"role": "user", "content": "Question: 1"})], TemplateOptions(), lambda text: {}).parent
        is None
    )


def test_a_parser_that_fails_rejects_the_sample_and_text_without_calls_is_kept_whole() -> None:
    def parse(text: str, tools: object) -> tuple[str, list[dict[str, object]]]:
        if "bad" in text:
            raise KeyError("name")
        return "beside", []

    reader = AnswerReader(parse)
    assert reader("text <tool_call>", ({},)) == {"role": "assistant", "content": "text <tool_call>"}
    with pytest.raises(Exception, match="cannot be read"):
        reader("bad", ({},))


def test_messages_are_compared_by_what_they_say() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1, "b":"x"}'}}
    answer = plain({"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"})
    again = {"id": "2", "function": {"name": "f", "arguments": '{"b": "x", "a": 1}'}}
    sent_back = plain({"role": "assistant", "tool_calls": [again]})
    assert alike(answer, sent_back)
    assert not same_reasoning(answer, sent_back)
    other = {"function": {"name": "f", "arguments": "{}"}}
    assert not alike(answer, plain({"role": "assistant", "tool_calls": [other]}))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert alike(plain({"role": "user", "content": parts}), plain({"role": "user", "content": "ab"}))


@pytest.mark.parametrize(
    "message",
    [
        "text",
        {"role": "critic", "content": ""},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "user", "content": "", "name": 3},
    ],
)
def test_messages_that_no_template_can_be_given_are_refused(message: object) -> None:
    with pytest.raises(BadMessageError):
        plain(message)


def test_a_prompt_that_is_asked_again_does_not_continue_an_empty_completion() -> None:
    """The first answer is its end token alone: the same prompt is a branch, and one with the end in it goes on."""
    tokens = tokens_of("deepseek")
    tree = SessionTree(ChatTemplate(tokens))
    context = tree.completion("Answer:")
    node = tree.add(context, turn_of(context.token_ids, tokens.stop_token_ids[:1]), TextAnswer(None, "", "<eos>"))
    again = tree.completion("Answer:")
    assert (again.parent, again.token_ids) == (None, context.token_ids)
    assert tree.completion("Answer: 12").parent is None
    further = tree.completion("Answer:<eos>\nQuestion: 2")
    assert further.parent is node
    assert tokens.decode_all(further.added) == "\nQuestion: 2"
