"""Stop texts: what was sampled stays, what the client reads is cut, and what follows is exact or another branch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moe_trm.rollout.agents.turn_boundary import cut_at_stop
from tests.unit.rollout.agents.http_client import Refusal
from tests.unit.rollout.agents.served import TOKENS, Served, run, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record

SAID = "Thought: add\nObservation: made up"
LONG_ID = next(
    token for token in range(500) if (text := TOKENS.decode_all([token])).isalpha() and text.isascii() and len(text) > 3
)
LONG = TOKENS.decode_all([LONG_ID])
"""A token of several letters."""


def letter_by_letter(*said: str) -> SpeakingEngine:
    return SpeakingEngine(speaker(*said), TOKENS.decode_all)


@pytest.mark.parametrize(
    ("body", "end", "stops", "found"),
    [
        ("a b", "<eos>", ("c",), ("a b", "<eos>", "")),
        ("a b", "", ("b",), ("a ", "b", "b")),
        ("a bc", "", ("b",), ("a ", "bc", "b")),
        ("a b", "<eos>", ("a", "b"), ("", "a b<eos>", "a")),
        ("2+9", "=", ("=",), ("2+9", "=", "=")),
        ("2+9", "=", ("x", "9="), ("2+", "9=", "9=")),
        ("2+9", "<eos>", ("<",), ("2+9", "<eos>", "")),
        ("", "<eos>", (), ("", "<eos>", "")),
    ],
)
def test_an_answer_is_cut_at_the_first_stop_text(
    body: str, end: str, stops: tuple[str, ...], found: tuple[str, str, str]
) -> None:
    assert cut_at_stop(body, end, stops) == found


def test_a_completion_goes_on_behind_a_stop_text_of_several_tokens() -> None:
    async def talk(served: Served) -> None:
        first = (await served.client.complete("Q: 1+1\n", stop=["Observation:", "=="])).choices[0]
        assert (first.text, first.finish_reason, first.matched_stop) == ("Thought: add\n", "stop", "Observation:")
        node = served.session.tree.nodes[0]
        assert TOKENS.decode_all(node.turn.tokens.tolist()) == "Thought: add\nObservation:"
        await served.client.complete(f"Q: 1+1\n{first.text}Observation: 2\n", stop=["Observation:"])
        leaf = served.session.tree.nodes[1]
        assert leaf.parent is node
        assert TOKENS.decode_all(leaf.context.added) == " 2\n"
        assert Counter(served.session.tree.counts) == Counter({"continued": 1, "rewritten": 0, "cut": 0})
        check_record(leaf)

    run(talk, letter_by_letter(SAID))


def test_a_stop_text_that_the_client_leaves_out_stays_where_it_was_sampled() -> None:
    async def talk(served: Served) -> None:
        answer = (await served.say(user("?"), stop="Observation:")).choices[0].message.content
        assert answer == "Thought: add\n"
        await served.say(user("?"), {"role": "assistant", "content": answer}, user("2"), stop="Observation:")
        text = TOKENS.decode_all(served.session.tree.nodes[1].context.token_ids)
        assert "Thought: add\nObservation:<|im_end|>\n<|im_start|>user\n2" in text
        assert Counter(served.session.tree.counts) == Counter({"continued": 1, "rewritten": 1, "cut": 0})

    run(talk, letter_by_letter(SAID))


def engine_of_a_long_token() -> SpeakingEngine:
    """Its answers have text behind any stop text that ends in the middle of their last token."""
    ids = [*TOKENS.encode_plain("so "), LONG_ID, *TOKENS.stop_token_ids]
    return SpeakingEngine(lambda context: ids, TOKENS.decode_all)


@pytest.mark.parametrize("whole", [False, True])
def test_text_behind_a_stop_text_that_the_client_never_saw_cuts_the_branch(whole: bool) -> None:
    async def talk(served: Served) -> None:
        stop = f"o {LONG[:2]}"
        first = (await served.client.complete("Q:", stop=[stop])).choices[0]
        assert (first.text, first.matched_stop) == ("s", stop)
        said = served.session.tree.nodes[0]
        assert said.answer.end == f"o {LONG}"
        await served.client.complete(f"Q:s{said.answer.end if whole else stop} and", stop=[stop])
        assert Counter(served.session.tree.counts) == Counter(
            {"continued": int(whole), "rewritten": 0, "cut": int(not whole)}
        )
        for leaf in served.session.tree.leaves():
            check_record(leaf)

    run(talk, engine_of_a_long_token())


def test_a_chat_behind_such_an_answer_is_another_branch() -> None:
    async def talk(served: Served) -> None:
        history: list[Any] = [user("?")]
        content = (await served.say(*history, stop=[f"o {LONG[:2]}"])).choices[0].message.content
        assert content == "s"
        history += [{"role": "assistant", "content": content}, user("2")]
        await served.say(*history)
        assert Counter(served.session.tree.counts) == Counter({"continued": 0, "rewritten": 0, "cut": 1})
        # The other branch says what the client said.
        text = TOKENS.decode_all(served.session.tree.nodes[1].context.token_ids)
        assert "<|im_start|>assistant\ns<|im_end|>" in text

    run(talk, engine_of_a_long_token())


def test_an_engine_that_passes_over_a_stop_text_is_no_harm() -> None:
    """It cannot see the text in whole where a weight push interrupts it."""

    async def talk(served: Served) -> None:
        first = (await served.client.complete("Q:", stop=["Observation:"])).choices[0]
        assert (first.text, first.matched_stop) == ("Thought: add\n", "Observation:")
        node = served.session.tree.nodes[0]
        assert TOKENS.decode_all(node.turn.tokens.tolist()) == f"{SAID}<|im_end|>"
        await served.client.complete("Q:Thought: add\nObservation: 2", stop=["Observation:"])
        assert served.session.tree.counts["cut"] == 1
        check_record(node)

    run(talk, SpeakingEngine(speaker(SAID)))


@pytest.mark.parametrize("stop", [["x" * 129], ["a"] * 33, ["漢" * 43], [""], [3]])
def test_stop_texts_that_cannot_be_looked_for_are_refused(stop: list[object]) -> None:
    async def talk(served: Served) -> None:
        with pytest.raises(Refusal, match="400"):
            await served.say(user("?"), stop=stop)

    run(talk, letter_by_letter(SAID))


def test_an_answer_of_nothing_but_text_that_the_client_never_saw_is_cut_too() -> None:
    async def talk(served: Served) -> None:
        stop = f"so {LONG[:2]}"
        first = (await served.client.complete("Q:", stop=[stop])).choices[0]
        assert (first.text, first.matched_stop) == ("", stop)
        await served.client.complete("Q:", stop=[stop])
        assert served.session.tree.counts["cut"] == 0, "the same question again"
        await served.client.complete(f"Q:{stop} and", stop=[stop])
        assert served.session.tree.counts["cut"] == 1

    run(talk, engine_of_a_long_token())
