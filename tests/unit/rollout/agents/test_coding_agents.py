"""Whole coding agents from the registries, unmodified: a repair task becomes samples whose ids are the sampled ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.rollout.agents.coding_agents import REPAIR, TASK, TESTS, Solved, call, check, solve, transcript
from tests.unit.rollout.agents.test_example_agents import fresh_environment

REQUIREMENTS = ("mini-swe-agent==2.4.6",)
CODEX = "@openai/codex@0.171.0"
SETTINGS = {
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
FORMS = {
    "chat": ("openai/policy", "litellm"),
    "messages": ("anthropic/policy", "litellm"),
    "responses": ("openai/policy", "litellm_response"),
}


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of mini-swe-agent in a virtual environment of its own."""
    return fresh_environment(tmp_path_factory.mktemp("mini") / "venv", REQUIREMENTS).with_name("mini")


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of codex, as npm installs it."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing")
    folder = tmp_path_factory.mktemp("codex")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), CODEX]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the package cannot be installed: {done.stderr[-300:]}")
    return folder / "node_modules" / ".bin" / "codex"


def answers(tool: str, field: str, *, right: bool, last: str) -> list[str]:
    repair = REPAIR if right else "echo I cannot"
    return [
        f"<think>\nFirst I look.\n</think>\n\nI look.{call(tool, **{field: 'cat *.py'})}",
        f"<think>\nA sign is wrong.\n</think>\n\nI repair it.{call(tool, **{field: repair})}",
        f"I run the test.{call(tool, **{field: TESTS})}\n{call(tool, **{field: 'ls'})}",
        last,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("dialect", FORMS)
def test_mini_swe_agent_over_every_interface(mini: Path, tmp_path: Path, dialect: str, right: bool) -> None:
    model, kind = FORMS[dialect]
    command = [str(mini), "-y", "--exit-immediately", "-t", TASK, "-m", model, "--model-class", kind]
    home = str(tmp_path / "config")
    last = f"Done.{call('bash', command='echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT')}"
    said = answers("bash", "command", right=right, last=last)
    solved = solve(command, said, tmp_path, SETTINGS | {"MSWEA_GLOBAL_CONFIG_DIR": home})
    check_whole(solved, dialect, tmp_path, right=right)


@pytest.mark.slow
def test_codex_over_a_stream_of_responses(codex: Path, tmp_path: Path) -> None:
    provider = 'model_providers.run={name="run", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}'
    command = [str(codex), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command += ["-m", "policy", "-c", 'model_provider="run"', "-c", provider, "-c", 'web_search="disabled"']
    # Its tools for further agents are of a type that the policy cannot be given.
    command += ["--disable", "multi_agent", TASK]
    (tmp_path / "settings").mkdir()
    said = answers("exec_command", "cmd", right=True, last="The test passes.")
    solved = solve(command, said, tmp_path, {"CODEX_HOME": str(tmp_path / "settings")})
    check_whole(solved, "responses", tmp_path, right=True)


def check_whole(solved: Solved, dialect: str, folder: Path, *, right: bool) -> None:
    """The task is solved or not as the policy's answers are, in one branch without a cut, and the report has it."""
    check(solved, dialect)
    assert solved.status == 0, solved.output[-3000:]
    assert solved.passes is right
    [leaf] = solved.tree.leaves()
    assert len(leaf.path()) == len(solved.tree.nodes) == 4
    assert [node.context.cut for node in leaf.path()] == [""] * 4
    text, page = transcript(solved, folder)
    assert f"reward {right:g}" in text
    assert TASK in text
    assert "cat *.py" in text
    assert "return sum(-PRICES[name] for name in names)" in text, "the output of the agent's first command"
    assert [f"answer {place}" in text for place in range(5)] == [True] * 4 + [False]
    assert text.count(f"over {dialect}") == 4
    assert page.count(f'data-dialect="{dialect}"') == 4
