"""The doctor's check of a chat template, on checkpoints with a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from launch.start.checks import Check
from moe_trm.config.schema import Config
from moe_trm.tools.doctor.examine import chat_template
from tests.unit.rollout.agents.templates import tokens_of


def check(folder: Path, name: str | None, **sections: object) -> list[Check]:
    """The checks of a run on a checkpoint whose tokenizer has the template `name`."""
    made = tokens_of(name or "chatml")._tokenizer
    if name is None:
        made.chat_template = None
    made.save_pretrained(str(folder))
    size = len(made) + 1
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "eos_token_id": 2}))
    config = Config.model_validate({"model": {"checkpoint": str(folder)}, **sections})
    return list(chat_template(config.rollout, config.model, config.agent, config.task))


AGENT = {"rollout": {"agent": "a.py:run"}}


def test_a_template_that_goes_on_passes(tmp_path: Path) -> None:
    [found] = check(tmp_path, "deepseek", **AGENT)
    assert found.status == "ok"
    assert "the user's next message" in found.says
    assert "a tool's result" not in found.says


def test_the_situations_in_which_branches_are_cut_are_listed(tmp_path: Path) -> None:
    parsers = {"tool_parser": "qwen25", "reasoning_parser": "qwen3"}
    [found] = check(tmp_path, "chatml", **AGENT, agent=parsers)
    assert found.status == "warn"
    going, *lines = found.says.splitlines()
    assert "a tool's result behind thinking" in going
    assert [line.partition(":")[0] for line in lines] == [
        "begins another branch at the user's next message behind thinking"
    ]
    assert "agent/cut" in found.fix


def test_a_tokenizer_without_a_template_is_no_fault(tmp_path: Path) -> None:
    [found] = check(tmp_path, None, **AGENT)
    assert (found.status, "completions" in found.says) == ("skip", True)


def test_runs_without_an_agent_are_not_examined(tmp_path: Path) -> None:
    assert check(tmp_path, "rewriting") == []
