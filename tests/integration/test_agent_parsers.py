"""SGLang's own parsers behind `agent.tool_parser` and `agent.reasoning_parser`, in a process that can import SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, random
from moe_trm.errors import ConfigError
from moe_trm.rollout.agents.reader import build_reader
from tests.unit.rollout.agents.talks import CALLS, TOOLS, Talk
from tests.unit.rollout.agents.test_tree import check_record

qwen = build_reader("qwen25", "qwen3")
found = [
    qwen('<think>\\nhm\\n</think>\\n\\nI add. <tool_call>\\n{"name":"add", "arguments":{"a":1}}\\n</tool_call>', TOOLS),
    qwen('I add. <tool_call>\\n{"name": "add", "arguments": {"a"', TOOLS),
    build_reader("glm45", None)(CALLS["glm"](random.Random(0)), TOOLS),
]
try:
    build_reader("no_such_parser", None)
except ConfigError as error:
    found.append(str(error))

# Answers that these parsers read are continued on the sampled ids, through a template of the same model.
talk = Talk("chatml", random.Random(1), edits=0.0, thinks=0.0)
talk.reader = build_reader("qwen25", None)
talk.go(12)
for leaf in talk.tree.leaves():
    check_record(leaf)
calls = sum("tool_calls" in (node.answer.message or {}) for node in talk.tree.nodes)
found.append({"cut": talk.tree.counts["cut"], "continued": talk.tree.counts["continued"], "calls": calls})
# gpt-oss: a call is read with the token that ends it, in the model's form and in the template's.
oss = build_reader("gpt-oss", "gpt-oss")
thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
for form in ("<|channel|>commentary to=functions.add <|constrain|>json", " to=functions.add<|channel|>commentary json"):
    found.extend(oss(f'{before}{form}<|message|>{{"a":1}}<|call|>', TOOLS) for before in (thought, ""))
found.append(oss(thought + "<|channel|>final<|message|>It is 2.", TOOLS))
# GLM-4.5 puts a line end in front of its reasoning.
found.append(build_reader("glm45", "glm45")("\\n<think>so</think>\\nan answer", TOOLS))
found.append(build_reader("glm45", "glm45")("\\n<think></think>\\nan answer", TOOLS))
print("FOUND", json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")
def test_sglangs_parsers_read_answers() -> None:
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    whole, cut, glm, unknown, talk, *shapes = json.loads(line.removeprefix("FOUND "))
    assert whole["reasoning_content"].strip() == "hm"
    assert whole["content"].strip() == "I add."
    assert calls_of(whole) == [("add", {"a": 1})]
    # A call that is not finished is text, and none of it is lost.
    assert cut["content"] == 'I add. <tool_call>\n{"name": "add", "arguments": {"a"'
    assert calls_of(glm) == [("add", {"a": 1})] or calls_of(glm) == [("add", {"a": "1"})]
    assert "agent.tool_parser" in unknown
    assert "qwen25" in unknown
    assert talk["cut"] == 0
    assert talk["continued"] == 11
    assert talk["calls"] > 2
    *calls, final, glm_thinks, glm_does_not = shapes
    assert [calls_of(one) for one in calls] == [[("add", {"a": 1})]] * 4
    assert [one.get("reasoning_content") for one in calls] == ["so", None] * 2
    assert (final["content"], final["reasoning_content"]) == ("It is 2.", "so")
    assert (glm_thinks["content"], glm_thinks["reasoning_content"]) == ("\nan answer", "so")
    assert glm_does_not == {"role": "assistant", "content": "\nan answer"}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
