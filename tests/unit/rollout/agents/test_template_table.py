"""The table of chat templates in docs/agents.md: each is continued, or cut with a count."""

from __future__ import annotations

import random
from pathlib import Path

from moe_trm.rollout.agents.messages import plain
from moe_trm.rollout.agents.template import ChatTemplate, TemplateOptions
from tests.unit.rollout.agents.situations import FAMILIES, SITUATIONS, WORDS
from tests.unit.rollout.agents.talks import TOOLS, Talk
from tests.unit.rollout.agents.templates import TEMPLATES, tokens_of
from tests.unit.rollout.agents.test_tree import check_record

PAGE = (Path(__file__).parents[4] / "docs" / "agents.md").read_text(encoding="utf-8")


def rows_of(page: str) -> dict[str, dict[str, str]]:
    """Family to situation to what the page says."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    [start] = [number for number, line in enumerate(lines) if line.startswith("| template |")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    head, rows = table[0], table[2:]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows[: len(FAMILIES)]}


def test_the_page_says_what_happens() -> None:
    found = {
        family: {title: situation(name) for title, situation in SITUATIONS.items()} for family, name in FAMILIES.items()
    }
    assert rows_of(PAGE) == found


def test_every_shape_has_words_of_its_model() -> None:
    assert WORDS.keys() == TEMPLATES.keys()


def test_gpt_oss_keeps_its_thoughts_until_the_final_answer() -> None:
    """The model writes calls in another form than the template. Its ids stay; the end of a last answer is another."""
    talk = Talk("harmony", random.Random(2), edits=0.0)
    words = WORDS["harmony"]
    assert words.thought is not None
    assert words.call is not None
    talk.history.append({"role": "user", "content": "1 + 1?"})
    talk.answer(words.thought + words.call, ends=True)
    talk.history.append({"role": "tool", "content": "2"})
    made = talk.context()
    assert (made.rewritten, made.cut) == (True, "")
    text = talk.tokens.decode_all(made.token_ids)
    behind = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    assert text.endswith(f"{words.thought}{words.call}<|call|>{behind}")
    talk.answer(words.plain, ends=True)
    talk.history.append({"role": "user", "content": "Sure?"})
    made = talk.context()
    assert (made.parent, made.cut) == (None, "template")
    assert "analysis<|message|>so" not in made.text
    assert "an answer<|end|>" in made.text
    for leaf in talk.tree.leaves():
        check_record(leaf)


def test_two_ways_to_end_an_answer_are_no_closing() -> None:
    assert ChatTemplate(tokens_of("harmony")).closing(TemplateOptions()) is None


def test_reasoning_has_two_names() -> None:
    """The other forms of a message do not get in the way of a template that takes only one."""
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]}
    history = [plain({"role": "user", "content": "?"}), plain(said), plain({"role": "tool", "content": "2"})]
    for name, written in (("harmony", "analysis<|message|>so<|end|>"), ("glm45", "<think>so</think>")):
        text = ChatTemplate(tokens_of(name)).render(history, TemplateOptions(TOOLS))
        assert written in text
        assert "thinking" not in text
